"""Recorded selections: what a policy decided on real bytes, to be answered again where there are none.

A phantom run has no bytes to decide by. `RecordedSelection` stands between a policy and what the devices read, and
keeps every answer; `SelectionRecord` is what it has kept, in memory or in a file; `ReplayedSelection` gives the same
answers to a run of the same model, shape, policy, options and prompts, whatever the platform. A question is found again
by its step, layer and label, and, where a policy asks several times for one of these, by the order in which it does.

The file is an .npz of four arrays, without pickles:

    header    uint8: JSON in UTF-8 with `format`, `version` and the fields of `Origin`
    entries   int64 (n, 7): step, layer, number of the label in the header's `labels`, lists, k, unit, and where in
              `answers` it begins
    lists     int64 (sum of lists, 2): length and first token position of each list, entry after entry
    answers   int32 (sum of lists · k): candidates, best first, −1 where a list is shorter

A file comes from outside: names, types, shapes and sizes are checked before anything is allocated for them, and every
index before it is used. Whatever is wrong is a ConfigurationError of one line that names the file.
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decisions import Decisions, Question
from tierloop.runtime.model_shapes import ShapeStages
from tierloop.runtime.stages import StageCost

Int64 = NDArray[np.int64]

FORMAT, VERSION = "tierloop-selection", 1
LARGEST_FILE = 1 << 30
"""Bytes that the arrays of a file may have together, unpacked."""
_HEADER_NBYTES = 1 << 24
_ARRAYS = {"header": ("|u1", 1), "entries": ("<i8", 2), "lists": ("<i8", 2), "answers": ("<i4", 1)}
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


Key = tuple[int, int, str, int]
"""Step, layer, label, and how many times these were asked for before."""


@dataclass
class SelectionRecord:
    """Where a selection comes from, and its answers by question."""

    origin: Origin
    answers: dict[Key, Answer] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        labels = list(dict.fromkeys(key[2] for key in self.answers))
        entries = np.zeros((len(self.answers), 7), dtype=np.int64)
        offset = 0
        for row, ((step, layer, label, _), kept) in zip(entries, self.answers.items(), strict=True):
            lists, k = kept.answer.shape
            row[:] = step, layer, labels.index(label), lists, k, kept.unit, offset
            offset += lists * k
        held = list(self.answers.values())
        lists_of = [np.stack((a.lengths, a.first), axis=1) for a in held]
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
                )
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> SelectionRecord:
        """Read and check a file. Raises ConfigurationError."""
        try:
            arrays = _read_arrays(path)
            return _checked(arrays)
        except _Malformed as error:
            raise ConfigurationError(f"{path}: no recorded selection: {error}") from error


class RecordedSelection:
    """Decisions that keep every answer: those of `inner`, or what was read where that is None."""

    def __init__(self, origin: Origin, inner: Decisions | None = None) -> None:
        self.record = SelectionRecord(origin)
        self._inner = inner
        self._asked: Counter[tuple[int, int, str]] = Counter()

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """The inner answer, kept. int64 (lists, k)."""
        answer = read if self._inner is None else self._inner.answer(question, read)
        if answer is None:
            raise ConfigurationError(f"{question.label}: a phantom run reads nothing; nobody has decided")
        key = _next_key(self._asked, question)
        kept = Answer(answer.astype(np.int64), question.lengths.copy(), question.first.copy(), question.unit)
        self.record.answers[key] = kept
        return answer


class ReplayedSelection:
    """Decisions from a record.

    Raises ConfigurationError for a question that was not recorded, or not with these lists.
    """

    def __init__(self, record: SelectionRecord) -> None:
        self.record = record
        self._asked: Counter[tuple[int, int, str]] = Counter()

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
        key = _next_key(self._asked, question)
        kept = self.record.answers.get(key)
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


def _next_key(asked: Counter[tuple[int, int, str]], question: Question) -> Key:
    same = (question.step, question.layer, question.label)
    asked[same] += 1
    return (*same, asked[same] - 1)


def _plain(options: Mapping[str, Any]) -> Any:
    """Options as they come back from JSON."""
    return json.loads(json.dumps(dict(options), sort_keys=True))


# -- files --------------------------------------------------------------------------------------------------------


class _Malformed(ValueError):
    """What is wrong with a file, without its name."""


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, each of the type and number of dimensions that it must have."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = Counter(info.filename for info in archive.infolist())
            if names != Counter(f"{name}.npy" for name in _ARRAYS):
                raise _Malformed(f"its parts are {', '.join(sorted(names)[:8])}; it must have {', '.join(_ARRAYS)}")
            if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in archive.infolist()):
                raise _Malformed("it is packed in an unknown way")
            total = sum(info.file_size for info in archive.infolist())
            if total > LARGEST_FILE:
                raise _Malformed(f"it unpacks to {total:,} bytes; at most {LARGEST_FILE:,} are allowed")
            return {name: _read_array(archive, name) for name in _ARRAYS}
    except FileNotFoundError:
        raise _Malformed("there is no such file") from None
    except OSError as error:
        raise _Malformed(error.strerror or str(error)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _Malformed(f"it is not a readable .npz file ({error})") from error


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    info = archive.getinfo(f"{name}.npy")
    limit = min(info.file_size, _HEADER_NBYTES) if name == "header" else info.file_size
    with archive.open(info) as member:
        data = member.read(limit + 1)
    if len(data) > limit:
        raise _Malformed(f"{name} is larger than it may be")
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        if version != (1, 0):
            raise _Malformed(f"{name} is an array of version {version}; it must be (1, 0)")
        with warnings.catch_warnings(action="error"):
            shape, fortran, dtype = npy.read_array_header_1_0(stream)
    except _Malformed:
        raise
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, Warning) as error:
        raise _Malformed(f"{name} has no readable array header") from error
    wanted, dimensions = _ARRAYS[name]
    if dtype != np.dtype(wanted) or fortran or len(shape) != dimensions:
        raise _Malformed(f"{name} is {dtype} of {len(shape)} dimensions; it must be {wanted} of {dimensions}")
    nbytes = math.prod(shape) * dtype.itemsize
    rest = len(data) - stream.tell()
    if nbytes != rest:
        raise _Malformed(f"{name} says that it has {nbytes} bytes, but has {rest}")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape)


def _checked(arrays: Mapping[str, NDArray[Any]]) -> SelectionRecord:
    header = _header(arrays["header"])
    entries, lists, answers = arrays["entries"], arrays["lists"], arrays["answers"]
    labels = header.pop("labels", None)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise _Malformed("header: labels must be a list of texts")
    if entries.shape[1] != 7 or lists.shape[1] != 2:
        raise _Malformed(f"entries and lists are {entries.shape} and {lists.shape}; they must be (n, 7) and (m, 2)")
    record = SelectionRecord(_origin(header))
    if (entries < 0).any() or (entries >= 1 << 40).any():
        raise _Malformed("entries has numbers below 0 or beyond reason")
    if (lists < 0).any() or (lists >= 1 << 40).any():
        raise _Malformed("lists has numbers below 0 or beyond reason")
    _, _, label, count, k, unit, offset = entries.T
    if (label >= len(labels)).any() or (unit < 1).any():
        raise _Malformed("entries names a label that the header has not, or has a unit of 0")
    if (count > len(lists)).any() or (k > len(answers)).any():
        raise _Malformed("entries names more lists or answers than there are")
    begins = np.concatenate(([0], np.cumsum(count * k)))
    if not np.array_equal(begins[:-1], offset) or begins[-1] != len(answers) or count.sum() != len(lists):
        raise _Malformed("the counts of entries are not those of lists and answers")
    asked: Counter[tuple[int, int, str]] = Counter()
    at = 0
    for step, layer, number, number_of, best, of_unit, start in entries.tolist():
        answer = answers[start : start + number_of * best].reshape(number_of, best).astype(np.int64)
        lengths, first = lists[at : at + number_of].T
        at += number_of
        if (answer < -1).any() or (answer >= lengths[:, None]).any():
            raise _Malformed(f"answers of step {step}, layer {layer} name candidates that there are not")
        ranked = np.sort(answer, axis=1)
        twice = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)
        if twice.any() or ((answer >= 0).sum(axis=1) != np.minimum(best, lengths)).any():
            raise _Malformed(f"answers of step {step}, layer {layer} name a candidate twice, or too few of them")
        same = (step, layer, labels[number])
        record.answers[(*same, asked[same])] = Answer(answer, lengths.copy(), first.copy(), of_unit)
        asked[same] += 1
    return record


def _header(data: NDArray[Any]) -> dict[str, Any]:
    try:
        header = json.loads(data.tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise _Malformed("its header is no JSON") from error
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise _Malformed(f"its header does not say {FORMAT}")
    version = header.pop("version", None)
    if version != VERSION:
        raise _Malformed(f"it has version {version!r}; this program reads {VERSION}")
    return header


def _origin(header: dict[str, Any]) -> Origin:
    """The origin of checked types; what the values mean is for whoever compares them."""
    types = {"model": str, "fingerprint": str, "policy": str, "options": dict, "steps": int, "seed": int}
    for name, kind in types.items():
        if not isinstance(header.get(name), kind) or isinstance(header[name], bool):
            raise _Malformed(f"header: {name} must be of type {kind.__name__}")
    if not _is_count(header["steps"]) or not _is_count(header["seed"]):
        raise _Malformed("header: steps and seed must be whole numbers from 0 on")
    prompts = header.get("prompt_tokens")
    if not isinstance(prompts, list) or not all(_is_count(n) for n in prompts):
        raise _Malformed("header: prompt_tokens must be a list of whole numbers")
    shape = header.get("shape")
    if not isinstance(shape, dict):
        raise _Malformed("header: shape must be a table")
    sizes = {name: value for name, value in shape.items() if name != "dtype"}
    if not all(_is_count(value) and value > 0 for value in sizes.values()):
        raise _Malformed("header: the sizes of shape must be whole numbers above 0")
    try:
        kept = KVShape(**shape)
    except (TypeError, ValueError) as error:
        raise _Malformed(f"header: shape: {error}") from error
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
            raise _Malformed("header: stages must have a cost for each layer")
        hidden, scale = table["hidden"], table["scale"]
        if not _is_count(hidden) or not isinstance(scale, float) or not (math.isfinite(scale) and scale > 0):
            raise _Malformed("header: stages: hidden or scale is no number")
        return ShapeStages(hidden, scale, _cost(table["head_cost"]), **per_layer)
    except (KeyError, TypeError) as error:
        raise _Malformed(f"header: stages: {error}") from error


def _cost(table: Any) -> StageCost:
    cost = StageCost(**table)
    if not _is_count(cost.flops_per_token) or not _is_count(cost.weight_nbytes):
        raise _Malformed("header: stages: a cost is no whole number")
    return cost


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
