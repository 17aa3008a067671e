"""A transformer made by hand that recalls associations: beyond a real model's reach its dense answers are still right.

A prompt is a list of pairs "after a comes b", one token each, in which every entity stands once as the key; a query
token asks for what comes after its entity. Every entity has a code of random ±1, `head_dim` of them for each KV head.
A pair's K row is the code of its key, its V row the code of what comes next; a query's rows are zero. The residual
stream keeps one code, at first that of the query's own entity. Every layer asks for it; layers of `hops` take the sign
of what attention brings (their MLP) as the code from there on, the others leave it. The logits of the answer are the
products of the code that is left with those of all entities.

`recall` has one hop, near the end: the query that the hop's layer asks is known from the first layer on, so a query
predicted one layer ahead is right. In `chain` hops follow each other layer after layer: the key of each is found by the
layer before it, so a query predicted one layer ahead is that of the hop before.

Why dense attention is exact. With q = k = ±1 codes of d bits and logits β·q·k, β = 2, the right row has logit βd. A
wrong row's weight relative to it is exp(β(q·k − d)), whose mean over random codes is ((1 + exp(−2β)) / 2)^d: 1.7e-19
with d = 64. The neighbours of a key share `TOPIC_BITS` = 8 bits in each head, as keys near each other do in real
models; for these 63 rows d is 56: 3.8e-17 each. The mean mass of all wrong rows among 131,072 is thus 2.5e-14, and by
Markov's inequality it is above 1e-6 for one query in 4e7 (a query token's row has logit 0: exp(−128)). A sign of what
attention brings would still be right with a wrong mass of 0.5; the answer's code is then exact, and no other entity has
it. float32 changes logits of 128 by at most 128 · 66 · 2⁻²⁴ = 5e-4.

No row depends on attention over the prompt, so a prompt's cache is written down and not computed: 131,072 tokens take
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.models import ModelShape
from tierloop.runtime.stages import LAST_QUERIES, Float32, Int64, Prefill, StageCost

SHARPNESS = 2.0
"""β: what q·k is multiplied by."""
TOPIC_TOKENS = 64
TOPIC_BITS = 8
"""Pairs of one topic, side by side; how many bits of each head's code they share."""
MAX_PAIRS = 131_072
"""As many pairs as the margin is shown for."""


class RecallModel:
    """`Stages` of the model, for a prompt of `num_pairs` pairs. Raises ValueError where there are too few or too many.

    Token b of [0, num_pairs) is the query "what comes after b?" and, as an output, the answer b. Token
    (a + 1) · num_pairs + b is the pair "after a comes b". The entities are in one circle, so that every answer can be
    asked for in turn.
    """

    num_layers, num_kv_heads, group, head_dim = 8, 2, 2, 64
    hops_of: ClassVar[Mapping[str, tuple[int, ...]]] = {"recall": (6,), "chain": (4, 5, 6)}

    def __init__(self, task: str, num_pairs: int, seed: int = 0) -> None:
        if task not in self.hops_of:
            raise ValueError(f"task {task!r} is not one of {', '.join(self.hops_of)}")
        if not 2 <= num_pairs <= MAX_PAIRS:
            raise ValueError(f"{num_pairs} pairs were asked for; from 2 to {MAX_PAIRS:,} can be recalled")
        self.task = task
        self.num_pairs = num_pairs
        self.hops = self.hops_of[task]
        chance = np.random.default_rng(seed)
        self._codes = _codes(chance, num_pairs, self.num_kv_heads, self.head_dim)
        circle = chance.permutation(num_pairs)
        self._next = np.empty(num_pairs, dtype=np.int64)
        self._next[circle] = np.roll(circle, -1)
        width = self.num_kv_heads * self.head_dim
        self.hidden = width
        self.scale = SHARPNESS
        self.queries = [StageCost(2 * width * width * self.group, 4 * width * width * self.group)] * self.num_layers
        self.projections = [StageCost(2 * width * width * 4, 4 * width * width * 4)] * self.num_layers
        self.finishes = [StageCost(2 * width * width * 2, 4 * width * width * 2)] * self.num_layers
        self.head_cost = StageCost(2 * width * num_pairs, 4 * width * num_pairs)

    @property
    def shape(self) -> ModelShape:
        """Its numbers; `context_length` has room for one query after each pair."""
        heads = self.num_kv_heads * self.group
        width = self.hidden
        context = 2 * self.num_pairs
        return ModelShape(
            self.num_layers, width, heads, self.num_kv_heads, self.head_dim, width, self.num_pairs, context
        )

    def prompt(self) -> tuple[int, ...]:
        """All pairs, in the order of their keys: topics are runs of the prompt."""
        keys = np.arange(self.num_pairs, dtype=np.int64)
        return tuple(((keys + 1) * self.num_pairs + self._next).tolist())

    def answer(self, entity: int) -> int:
        """What the query `entity` has to be answered with: as many steps on the circle as there are hops."""
        for _ in self.hops:
            entity = int(self._next[entity])
        return entity

    def prefill(self, first_token: int) -> Prefill:
        """The cache of `prompt`, before a query `first_token`; the last queries are those of pairs: their keys."""
        keys = np.ascontiguousarray(self._codes.transpose(1, 0, 2))
        values = np.ascontiguousarray(self._codes[self._next].transpose(1, 0, 2))
        last = np.repeat(self._codes[-LAST_QUERIES:], self.group, axis=1)
        layers = self.num_layers
        return Prefill(self.prompt(), (keys,) * layers, (values,) * layers, (last,) * layers, first_token)

    def begin(self, tokens: Sequence[Sequence[int]], positions: Int64) -> CodeActivations:
        """Start a step of the decoder (stages.py)."""
        held = np.array([list(mine) for mine in tokens], dtype=np.int64)
        if held.min(initial=0) < 0 or held.max(initial=0) >= self.num_pairs * (self.num_pairs + 1):
            raise ValueError(f"a token is outside [0, {self.num_pairs * (self.num_pairs + 1)})")
        return CodeActivations(self, held)

    def codes(self, entities: Int64) -> Float32:
        """float32 ±1 (…, kv heads, head_dim)."""
        found: Float32 = self._codes[entities]
        return found

    @cached_property
    def unembedding(self) -> Float32:
        """(entities, hidden)."""
        return self._codes.reshape(self.num_pairs, -1)


@dataclass
class CodeActivations:
    """The activations of one step: the code of each token, and of each pair what comes next."""

    model: RecallModel
    tokens: Int64

    def __post_init__(self) -> None:
        pairs = self.model.num_pairs
        self._is_pair = self.tokens >= pairs
        entities = np.where(self._is_pair, self.tokens // pairs - 1, self.tokens)
        self._own = self.model.codes(entities)
        self._next = self.model.codes(self.tokens % pairs)
        self._code = self._own.copy()  # (n, q_len, kv heads, head_dim)

    def project(self, layer: int) -> tuple[Float32, Float32, Float32]:
        """Queries of the code at hand; K and V rows of pairs, zeros of queries."""
        stored = self._is_pair[:, :, None, None]
        keys, values = (np.where(stored, c, np.float32(0)).transpose(0, 2, 1, 3) for c in (self._own, self._next))
        return self.queries(layer), np.ascontiguousarray(keys), np.ascontiguousarray(values)

    def queries(self, layer: int) -> Float32:
        """The code at hand, for each q head of the group."""
        asked: Float32 = np.repeat(self._code, self.model.group, axis=2)
        return asked

    def finish(self, layer: int, output: NDArray[np.uint8]) -> None:
        """A hop takes the sign of what the group's heads bring together; other layers leave the code as it is."""
        if layer in self.model.hops:
            shape = (*self.tokens.shape, self.model.num_kv_heads, self.model.group, self.model.head_dim)
            brought = output.view(np.float32).reshape(shape).sum(axis=3)
            self._code = np.where(brought >= 0, np.float32(1), np.float32(-1))

    def logits(self) -> Float32:
        """Products of the last position's code with every entity's."""
        last = self._code[:, -1].reshape(len(self.tokens), -1)
        products: Float32 = np.einsum("nd,ed->ne", last, self.model.unembedding)
        return products


def _codes(chance: np.random.Generator, count: int, heads: int, bits: int) -> Float32:
    """Random ±1, float32 (count, heads, bits); neighbours share the first `TOPIC_BITS` of each head."""
    codes = chance.integers(0, 2, (count, heads, bits), dtype=np.int8)
    topics = chance.integers(0, 2, (-(-count // TOPIC_TOKENS), heads, TOPIC_BITS), dtype=np.int8)
    codes[:, :, :TOPIC_BITS] = np.repeat(topics, TOPIC_TOKENS, axis=0)[:count]
    signed: Float32 = 2 * codes.astype(np.float32) - 1
    return signed
