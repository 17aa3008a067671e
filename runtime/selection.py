"""Recorded selections: what a policy decided on real bytes, to be answered again where there are none.

A phantom run has no bytes to decide by. `RecordedSelection` stands between a policy and what the devices read, and
keeps every answer; `SelectionRecord` is what it has kept, in memory or in a file; `ReplayedSelection` gives the same
answers to a run of the same model, shape, policy, options and prompts, whatever the platform. A question is found again
by its step, layer and label, and, where a policy asks several times for one of these, by the order in which it does; so
are groupings. Requests may have other names in a replay: one that ends a label counts as the n-th that was asked about.

The file is an .npz of six arrays, without pickles:

    header    uint8: JSON in UTF-8 with `format`, `version` and the fields of `Origin`
    entries   int64 (n, 7): step, layer, number of the label in the header's `labels`, lists, k, unit, and where in
              `answers` it begins
    lists     int64 (sum of lists, 2): length and first token position of each list, entry after entry
    answers   int32 (sum of lists · k): candidates, best first, −1 where a list is shorter
    groupings int64 (n, 6): step, layer, number of the label, lists, candidates, groups
    grouped   int32 (sum of lists · candidates): the group of each candidate, grouping after grouping

A file comes from outside: names, types, shapes and sizes are checked before anything is allocated for them, and every
index before it is used. Whatever is wrong is a ConfigurationError of one line that names the file.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.checked_npz import Malformed, read_arrays
from tierloop.runtime.decisions import Decisions, Grouping, Question
from tierloop.runtime.model_shapes import ShapeStages
from tierloop.runtime.stages import StageCost

Int64 = NDArray[np.int64]

FORMAT, VERSION = "tierloop-selection", 2
LARGEST_FILE = 1 << 30
"""Bytes that the arrays of a file may have together, unpacked."""
_ARRAYS = {
    "header": ("|u1", 1),
    "entries": ("<i8", 2),
    "lists": ("<i8", 2),
    "answers": ("<i4", 1),
    "groupings": ("<i8", 2),
    "grouped": ("<i4", 1),
}
"""Type and number of dimensions of each array."""


@dataclass(frozen=True)
class Origin:
    """What a recorded selection belongs to: a replay has to be of the same.

    `prompt_tokens` are the lengths of the prompts of the batch, `steps` the recorded decode steps; `stages` are the
    costs of the model's stages, so that a phantom run charges what the recorded one did (None: not known).
    """

    model: str
    fingerprint: str
    shape: KVShape
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: tuple[int, ...] = ()
    steps: int = 0
    seed: int = 0
    stages: ShapeStages | None = None


class Answer(NamedTuple):
    """An answer int64 (lists, k) and the parts of its question that a replay compares."""

    answer: Int64
    lengths: Int64
    first: Int64
    unit: int


class Groups(NamedTuple):
    """Labels int32 (lists, candidates) and how many groups there could be."""

    labels: NDArray[np.int32]
    groups: int


Key = tuple[int, int, str, int]
"""Step, layer, label, and how many times these were asked for before."""


@dataclass
class SelectionRecord:
    """Where a selection comes from, its answers by question and its labels by grouping."""

    origin: Origin
    answers: dict[Key, Answer] = field(default_factory=dict)
    groups: dict[Key, Groups] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        labels = list(dict.fromkeys(key[2] for key in (*self.answers, *self.groups)))
        entries = np.zeros((len(self.answers), 7), dtype=np.int64)
        offset = 0
        for row, ((step, layer, label, _), kept) in zip(entries, self.answers.items(), strict=True):
            lists, k = kept.answer.shape
            row[:] = step, layer, labels.index(label), lists, k, kept.unit, offset
            offset += lists * k
        held = list(self.answers.values())
        lists_of = [np.stack((a.lengths, a.first), axis=1) for a in held]
        groupings = [
            (step, layer, labels.index(label), *kept.labels.shape, kept.groups)
            for (step, layer, label, _), kept in self.groups.items()
        ]
        header = {"format": FORMAT, "version": VERSION, "labels": labels, **asdict(self.origin)}
        answers = [a.answer.reshape(-1).astype(np.int32) for a in held]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(
                    file,
                    header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
                    entries=entries,
                    lists=np.concatenate([np.empty((0, 2), dtype=np.int64), *lists_of]),
                    answers=np.concatenate([np.empty(0, dtype=np.int32), *answers]),
                    groupings=np.array(groupings, dtype=np.int64).reshape(-1, 6),
                    grouped=np.concatenate(
                        [np.empty(0, dtype=np.int32), *(kept.labels.reshape(-1) for kept in self.groups.values())]
                    ),
                )
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> SelectionRecord:
        """Read and check a file. Raises ConfigurationError."""
        try:
            return _checked(read_arrays(path, _ARRAYS, LARGEST_FILE))
        except Malformed as error:
            raise ConfigurationError(f"{path}: no recorded selection: {error}") from error


class RecordedSelection:
    """Decisions that keep every answer: those of `inner`, or what was read where that is None."""

    def __init__(self, origin: Origin, inner: Decisions | None = None) -> None:
        self.record = SelectionRecord(origin)
        self._inner = inner
        self._asked = _Asked()

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """The inner answer, kept. int64 (lists, k)."""
        answer = read if self._inner is None else self._inner.answer(question, read)
        if answer is None:
            raise ConfigurationError(f"{question.label}: a phantom run reads nothing; nobody has decided")
        kept = Answer(answer.astype(np.int64), question.lengths.copy(), question.first.copy(), question.unit)
        self.record.answers[self._asked.question(question)] = kept
        return answer

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """The inner labels, kept. int64 (lists, candidates)."""
        labels = read if self._inner is None else self._inner.group(grouping, read)
        if labels is None:
            raise ConfigurationError(f"{grouping.label}: a phantom run reads nothing; nobody has decided")
        self.record.groups[self._asked.grouping(grouping)] = Groups(labels.astype(np.int32), grouping.groups)
        return labels


class ReplayedSelection:
    """Decisions from a record.

    Raises ConfigurationError for a question or grouping that was not recorded, or not with these lists.
    """

    def __init__(self, record: SelectionRecord) -> None:
        self.record = record
        self._asked = _Asked()

    def check(
        self,
        shape: KVShape,
        policy: str,
        options: Mapping[str, Any],
        prompt_tokens: Sequence[int],
        steps: int,
        model: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """See before any work that the record is of this run. Raises ConfigurationError that names what differs."""
        origin = self.record.origin
        pairs: list[tuple[str, Any, Any]] = [
            ("model", origin.model, model if model is not None else origin.model),
            ("weights", origin.fingerprint, fingerprint if fingerprint is not None else origin.fingerprint),
            ("policy", origin.policy, policy),
            ("options", _plain(origin.options), _plain(options)),
            *((f"shape: {k}", v, asdict(shape)[k]) for k, v in asdict(origin.shape).items()),
            ("prompt tokens", list(origin.prompt_tokens), list(prompt_tokens)),
        ]
        for what, recorded, wanted in pairs:
            if recorded != wanted:
                raise ConfigurationError(
                    f"the recorded selection is of another run: {what}: {wanted} is asked for, {recorded} is recorded"
                )
        if steps > origin.steps:
            raise ConfigurationError(
                f"the recorded selection has {origin.steps} steps; {steps} are asked for (record as many)"
            )

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """What was answered then. int64 (lists, k)."""
        kept = self.record.answers.get(self._asked.question(question))
        where = f"{question.label}, layer {question.layer}, position {question.step}"
        if kept is None:
            raise ConfigurationError(f"the recorded selection has no answer for {where}")
        wanted = (len(question.lengths), question.k)
        if kept.answer.shape != wanted:
            raise ConfigurationError(
                f"the recorded selection has {kept.answer.shape} (lists, k) for {where}, and not {wanted}"
            )
        for what, then, now in (
            ("lengths", kept.lengths, question.lengths),
            ("first positions", kept.first, question.first),
            ("units", kept.unit, question.unit),
        ):
            if not np.array_equal(then, now):
                raise ConfigurationError(f"the recorded selection has other {what} for {where}")
        return kept.answer.copy()

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """How they were grouped then. int64 (lists, candidates)."""
        kept = self.record.groups.get(self._asked.grouping(grouping))
        where = f"{grouping.label}, layer {grouping.layer}, position {grouping.step}"
        if kept is None:
            raise ConfigurationError(f"the recorded selection has no groups for {where}")
        held, wanted = (*kept.labels.shape, kept.groups), (grouping.lists, grouping.candidates, grouping.groups)
        if held != wanted:
            raise ConfigurationError(
                f"the recorded selection has {held} (lists, candidates, groups) for {where}, and not {wanted}"
            )
        return kept.labels.astype(np.int64)


class _Asked:
    """What was asked for so far: how often, and which requests, by number."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._questions: Counter[tuple[int, int, str]] = Counter()
        self._groupings: Counter[tuple[int, int, str]] = Counter()

    def question(self, question: Question) -> Key:
        """The key of the next answer to this."""
        label = self._numbered(question.label, question.requests)
        return _next(self._questions, (question.step, question.layer, label))

    def grouping(self, grouping: Grouping) -> Key:
        """The key of the next labels of this."""
        label = self._numbered(grouping.label, (grouping.request,))
        return _next(self._groupings, (grouping.step, grouping.layer, label))

    def _numbered(self, label: str, requests: Sequence[str]) -> str:
        for name in requests:
            self._requests.setdefault(name, len(self._requests))
        name = max((n for n in requests if n and label.endswith(f" {n}")), key=len, default="")
        return f"{label.removesuffix(name)}{self._requests[name]}" if name else label


def _next(asked: Counter[tuple[int, int, str]], same: tuple[int, int, str]) -> Key:
    asked[same] += 1
    return (*same, asked[same] - 1)


def _plain(options: Mapping[str, Any]) -> Any:
    """Options as they come back from JSON."""
    return json.loads(json.dumps(dict(options), sort_keys=True))


# -- files --------------------------------------------------------------------------------------------------------


def _checked(arrays: Mapping[str, NDArray[Any]]) -> SelectionRecord:
    header = _header(arrays["header"])
    entries, lists, answers = arrays["entries"], arrays["lists"], arrays["answers"]
    labels = header.pop("labels", None)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise Malformed("header: labels must be a list of texts")
    if entries.shape[1] != 7 or lists.shape[1] != 2:
        raise Malformed(f"entries and lists are {entries.shape} and {lists.shape}; they must be (n, 7) and (m, 2)")
    record = SelectionRecord(_origin(header))
    if (entries < 0).any() or (entries >= 1 << 40).any():
        raise Malformed("entries has numbers below 0 or beyond reason")
    if (lists < 0).any() or (lists >= 1 << 40).any():
        raise Malformed("lists has numbers below 0 or beyond reason")
    _, _, label, count, k, unit, offset = entries.T
    if (label >= len(labels)).any() or (unit < 1).any():
        raise Malformed("entries names a label that the header has not, or has a unit of 0")
    if (count > len(lists)).any() or (k > len(answers)).any() or (count * k > len(answers)).any():
        raise Malformed("entries names more lists or answers than there are")
    begins = np.concatenate(([0], np.cumsum(count * k)))
    if not np.array_equal(begins[:-1], offset) or begins[-1] != len(answers) or count.sum() != len(lists):
        raise Malformed("the counts of entries are not those of lists and answers")
    asked: Counter[tuple[int, int, str]] = Counter()
    at = 0
    for step, layer, number, number_of, best, of_unit, start in entries.tolist():
        answer = answers[start : start + number_of * best].reshape(number_of, best).astype(np.int64)
        lengths, first = lists[at : at + number_of].T
        at += number_of
        if (answer < -1).any() or (answer >= lengths[:, None]).any():
            raise Malformed(f"answers of step {step}, layer {layer} name candidates that there are not")
        ranked = np.sort(answer, axis=1)
        twice = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)
        if twice.any() or ((answer >= 0).sum(axis=1) != np.minimum(best, lengths)).any():
            raise Malformed(f"answers of step {step}, layer {layer} name a candidate twice, or too few of them")
        key = _next(asked, (step, layer, labels[number]))
        record.answers[key] = Answer(answer, lengths.copy(), first.copy(), of_unit)
    _take_groups(record, arrays["groupings"], arrays["grouped"], labels)
    return record


def _take_groups(
    record: SelectionRecord, groupings: NDArray[Any], grouped: NDArray[Any], labels: Sequence[str]
) -> None:
    if groupings.shape[1] != 6:
        raise Malformed(f"groupings is {groupings.shape}; it must be (n, 6)")
    if (groupings < 0).any() or (groupings >= 1 << 40).any():
        raise Malformed("groupings has numbers below 0 or beyond reason")
    _, _, label, lists, candidates, _ = groupings.T
    if (label >= len(labels)).any():
        raise Malformed("groupings names a label that the header has not")
    most = len(grouped)
    if (lists > most).any() or (candidates > most).any() or (lists * candidates > most).any():
        raise Malformed("groupings names more candidates than there are in grouped")
    if int((lists * candidates).sum()) != most:
        raise Malformed("the counts of groupings are not those of grouped")
    asked: Counter[tuple[int, int, str]] = Counter()
    at = 0
    for step, layer, number, rows, columns, groups in groupings.tolist():
        held = grouped[at : at + rows * columns].reshape(rows, columns)
        at += rows * columns
        if (held < 0).any() or (held >= groups).any():
            raise Malformed(f"grouped of step {step}, layer {layer} names groups that there are not")
        record.groups[_next(asked, (step, layer, labels[number]))] = Groups(held, groups)


def _header(data: NDArray[Any]) -> dict[str, Any]:
    try:
        header = json.loads(data.tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise Malformed("its header is no JSON") from error
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise Malformed(f"its header does not say {FORMAT}")
    version = header.pop("version", None)
    if version != VERSION:
        raise Malformed(f"it has version {version!r}; this program reads {VERSION}")
    return header


def _origin(header: dict[str, Any]) -> Origin:
    """The origin of checked types; what the values mean is for whoever compares them."""
    types = {"model": str, "fingerprint": str, "policy": str, "options": dict, "steps": int, "seed": int}
    for name, kind in types.items():
        if not isinstance(header.get(name), kind) or isinstance(header[name], bool):
            raise Malformed(f"header: {name} must be of type {kind.__name__}")
    if not _is_count(header["steps"]) or not _is_count(header["seed"]):
        raise Malformed("header: steps and seed must be whole numbers from 0 on")
    prompts = header.get("prompt_tokens")
    if not isinstance(prompts, list) or not all(_is_count(n) for n in prompts):
        raise Malformed("header: prompt_tokens must be a list of whole numbers")
    shape = header.get("shape")
    if not isinstance(shape, dict):
        raise Malformed("header: shape must be a table")
    sizes = {name: value for name, value in shape.items() if name != "dtype"}
    if not all(_is_count(value) and value > 0 for value in sizes.values()):
        raise Malformed("header: the sizes of shape must be whole numbers above 0")
    try:
        kept = KVShape(**shape)
    except (TypeError, ValueError) as error:
        raise Malformed(f"header: shape: {error}") from error
    return Origin(
        **{name: header[name] for name in types},
        shape=kept,
        prompt_tokens=tuple(prompts),
        stages=_stages(header.get("stages"), kept.num_layers),
    )


def _stages(table: Any, num_layers: int) -> ShapeStages | None:
    if table is None:
        return None
    try:
        per_layer = {name: [_cost(c) for c in table[name]] for name in ("projections", "queries", "finishes")}
        if any(len(costs) != num_layers for costs in per_layer.values()):
            raise Malformed("header: stages must have a cost for each layer")
        hidden, scale = table["hidden"], table["scale"]
        if not _is_count(hidden) or not isinstance(scale, float) or not (math.isfinite(scale) and scale > 0):
            raise Malformed("header: stages: hidden or scale is no number")
        return ShapeStages(hidden, scale, _cost(table["head_cost"]), **per_layer)
    except (KeyError, TypeError) as error:
        raise Malformed(f"header: stages: {error}") from error


def _cost(table: Any) -> StageCost:
    cost = StageCost(**table)
    if not _is_count(cost.flops_per_token) or not _is_count(cost.weight_nbytes):
        raise Malformed("header: stages: a cost is no whole number")
    return cost


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
