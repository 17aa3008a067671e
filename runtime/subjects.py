"""What accuracy is measured on: a text model, or the hand-made recall model beyond its reach.

A `Subject` makes the cells of a measurement: for one task at one context length the stages of the model, cases, and the
prefill of each. `attend_densely` decodes a case with attention over all rows in plain NumPy, whatever the model: the
reference that a policy's answers are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.runtime.recall_model import MAX_PAIRS, RecallModel
from tierloop.runtime.stages import Float32, Prefill, Stages
from tierloop.runtime.tasks import TASKS, Case, Turn, text_cases

if TYPE_CHECKING:  # torch takes seconds to import, and the recall model needs none of it
    from tierloop.runtime.models import Model, ModelShape

RECORDED_TOKENS = 16_384
"""Contexts up to this are recorded in every layer; longer ones of the recall model in the layers of its hops."""


@dataclass(frozen=True)
class Cell:
    """One task at one context length. `layers` are those that the oracle checks; None: all."""

    task: str
    context: int
    is_text: bool
    stages: Stages
    shape: ModelShape
    cases: tuple[Case, ...]
    prefill: Callable[[Case], Prefill]
    layers: tuple[int, ...] | None = None


class Subject(Protocol):
    """A model that accuracy is measured on."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it can be given."""

    @property
    def longest(self) -> int:
        """The longest context that it takes, in tokens."""

    def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
        """A task at a context length, with `prompts` things that are asked. Raises WorkloadError."""


class TextSubject:
    """A causal language model: each prompt is a case of its own."""

    tasks = tuple(TASKS)

    def __init__(self, model: Model) -> None:
        from tierloop.runtime.modules import Modules

        self._model = model
        self._modules = Modules(model.module)
        self.name = model.name
        self.longest = model.shape.context_length

    def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
        """Cases of generated text."""
        cases = tuple(text_cases(self._model, task, context, prompts, seed))
        return Cell(task, context, TASKS[task].is_text, self._modules, self._model.shape, cases, self._prefill)

    def _prefill(self, case: Case) -> Prefill:
        from tierloop.runtime.prefill import generate_dense

        prefill = generate_dense(self._model, case.prompt, 1).prefill
        return replace(prefill, first_token=case.turns[0].token)


class RecallSubject:
    """The recall model: one prompt, of which as many entities are asked for as prompts are wanted."""

    name = "recall"
    tasks = tuple(RecallModel.hops_of)
    longest = MAX_PAIRS

    def cell(self, task: str, context: int, prompts: int, seed: int) -> Cell:
        """All of the context is pairs but for the questions. Raises ConfigurationError where there is no room."""
        pairs = context - prompts
        if pairs < 2 * prompts:
            raise ConfigurationError(f"a context of {context} tokens is too short for {prompts} questions about it")
        model = RecallModel(task, pairs, seed)
        asked = np.random.default_rng((seed, 1)).choice(pairs, prompts, replace=False).tolist()
        case = Case(model.prompt(), tuple(Turn(entity, (model.answer(entity),)) for entity in asked))
        layers = None if context <= RECORDED_TOKENS else model.hops
        return Cell(task, context, False, model, model.shape, (case,), self._prefill(model), layers)

    @staticmethod
    def _prefill(model: RecallModel) -> Callable[[Case], Prefill]:
        return lambda case: model.prefill(case.turns[0].token)


def check_task(subject: Subject, task: str) -> None:
    """Raises ConfigurationError for a task that the model cannot be given."""
    if task not in subject.tasks:
        known = nearest(task, list(subject.tasks))
        raise ConfigurationError(f"--task {task!r}: {subject.name} has no such task; {known}")


def check_context(subject: Subject, context: int) -> None:
    """Raises ConfigurationError for a context that the model does not take."""
    if not 1 <= context <= subject.longest:
        beyond = f"; --model {RecallSubject.name} takes up to {RecallSubject.longest}"
        raise ConfigurationError(
            f"--context {context}: {subject.name} takes from 1 to {subject.longest} tokens"
            + (beyond if subject.longest < context <= RecallSubject.longest else "")
        )


def attend_densely(cell: Cell, prefill: Prefill, case: Case) -> Iterator[Float32]:
    """Logits, float32 (vocabulary,), after each token that the case feeds, with attention over all rows in float32."""
    stages, shape = cell.stages, cell.shape
    group = shape.num_q_heads // shape.num_kv_heads
    later: list[list[tuple[Float32, Float32]]] = [[] for _ in range(shape.num_layers)]
    fed = [token for turn in case.turns for token in turn.fed]
    for position, token in enumerate(fed, start=len(prefill.tokens)):
        activations = stages.begin([[token]], np.array([[position]], dtype=np.int64))
        assert activations is not None, "a model with numbers"
        for layer in range(shape.num_layers):
            queries, keys, values = activations.project(layer)
            later[layer].append((keys[0], values[0]))
            all_keys = [prefill.keys[layer], *(k for k, _ in later[layer])]
            all_values = [prefill.values[layer], *(v for _, v in later[layer])]
            asked = queries[0, 0].reshape(shape.num_kv_heads, group, -1)
            outputs = [
                _attention(asked[head], [k[head] for k in all_keys], [v[head] for v in all_values], stages.scale)
                for head in range(shape.num_kv_heads)
            ]
            activations.finish(layer, np.concatenate(outputs).reshape(-1).view(np.uint8))
        yield activations.logits()[0]


def _attention(queries: Float32, keys: list[Float32], values: list[Float32], scale: float) -> Float32:
    """Queries (g, d) over runs of rows (n, d): (g, d_v)."""
    logits = scale * np.concatenate([np.einsum("gd,nd->gn", queries, run) for run in keys], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    parts = np.split(weights, np.cumsum([len(run) for run in values])[:-1], axis=1)
    output: Float32 = sum(
        (np.einsum("gn,nd->gd", part, run) for part, run in zip(parts, values, strict=True)),
        start=np.zeros((len(queries), values[0].shape[1]), dtype=np.float32),
    )
    return output.astype(np.float32)
