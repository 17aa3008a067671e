"""Selections with scores behind them: candidates ranked by a seeded model of how attention scores persist.

`LocalitySelection` says which candidates are picked and nothing about the others. Look-ahead eviction goes by the order
of those that are not picked, so it needs scores. Here the score of candidate c of a list at time t is

    lift · [c is popular] + static · S(c) + f · (slow · A(c, t) + white · W(c, t)) + recency / (1 + age / tokens)

with S, A and W standard normal; S never changes, W is new at every step, A is an AR(1) process that keeps the share
1 − 1 / memory_steps of itself from step to step. A candidate is popular with probability `popular`, once and for all.
Heads differ: a head's factor f is 2 to the power of `spread` times a normal number (within ±2) that belongs to layer
and head. An answer ranks all candidates; the numbers are those of a layer, and only the order of scores means anything.
Ranking 2,048 of 8,192 candidates of 8 lists takes 2 ms of one core.

All lists are independent, and so are neighbouring candidates: runs are left out. Candidates are told by their number,
wherever a list begins. Time is that of a request and layer: a step that nobody asked about passes too, and questions
with other labels are about the same scores.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.checked_json import load_json
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.locality_selection import strided_groups

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

FORMAT, VERSION = "tierloop-score-trace", 1


@dataclass(frozen=True)
class LayerScores:
    """The numbers of one layer; amplitudes are in the unit of scores, `recency_tokens` is an age in tokens."""

    popular: float
    lift: float
    static: float
    slow: float
    memory_steps: float
    white: float
    recency: float = 0.0
    recency_tokens: float = 1.0
    spread: float = 0.0


_RANGES = {"popular": (0.0, 1.0), "memory_steps": (1.0, 1e9), "recency_tokens": (1.0, 1e9), "spread": (0.0, 4.0)}
"""What a number of a layer may be; amplitudes are from 0 to 1,000."""


@dataclass(frozen=True)
class ScoreTraceModel:
    """The numbers of each layer, and in words what they rest on."""

    layers: tuple[LayerScores, ...]
    rests_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigurationError("a score trace needs the numbers of at least one layer")

    def layer(self, number: int, num_layers: int) -> LayerScores:
        """The numbers for a layer of a model that may have more or fewer layers: those at the same relative depth."""
        wanted = (number + 0.5) * len(self.layers) / num_layers - 0.5
        return self.layers[min(range(len(self.layers)), key=lambda i: abs(i - wanted))]

    def to_json(self) -> str:
        """Text for a file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> ScoreTraceModel:
        """Read and check a file. Raises ConfigurationError."""
        return load_json(path, "score trace", FORMAT, VERSION, _from_json)


def _from_json(table: dict[str, Any]) -> ScoreTraceModel:
    layers, words = table.get("layers"), table.get("rests_on")
    if not isinstance(words, list) or not all(isinstance(text, str) for text in words):
        raise ValueError("rests_on must be a list of texts")
    if not isinstance(layers, list) or not 1 <= len(layers) <= 1 << 12:
        raise ValueError("layers must be a list of 1 to 4,096 tables")
    return ScoreTraceModel(tuple(_layer(i, layer) for i, layer in enumerate(layers)), tuple(words))


def _layer(number: int, table: Any) -> LayerScores:
    names = {field.name for field in fields(LayerScores)}
    if not isinstance(table, dict) or set(table) != names:
        raise ValueError(f"layer {number} must be a table of {', '.join(sorted(names))}")
    for name, value in table.items():
        low, high = _RANGES.get(name, (0.0, 1e3))
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"layer {number}: {name} is {value!r}; it must be from {low:g} to {high:g}")
    return LayerScores(**{name: float(value) for name, value in table.items()})


class ScoreTrace:
    """Decisions by scores, for a model of `num_layers` layers; see the top of the file.

    The lists of a question belong to its requests in equal parts. Where another request leads the batch than in the
    question before, its position says nothing about how many steps have passed: one has, unless it is the same.
    """

    def __init__(self, model: ScoreTraceModel, num_layers: int, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self.asked = False
        """Whether any answer was needed: times of a policy that selects nothing do not rest on the model."""
        self._layers = [model.layer(number, num_layers) for number in range(num_layers)]
        self._scores: dict[tuple[int, str], _Scores] = {}

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """k candidates of each list, best first. int64 (lists, k)."""
        self.asked = True
        numbers, lists = self._layers[question.layer], len(question.lengths) // len(question.requests)
        assert lists * len(question.requests) == len(question.lengths), "all requests have as many lists"
        answer = np.full((len(question.lengths), question.k), -1, dtype=np.int64)
        for i, request in enumerate(question.requests):
            key = question.layer, request
            if key not in self._scores:
                self._scores[key] = _Scores(numbers, lists, (self.seed, zlib.crc32(request.encode()), question.layer))
            held, mine = self._scores[key], slice(i * lists, (i + 1) * lists)
            lengths = question.lengths[mine]
            held.advance(question.step, question.requests[0])
            held.grow(int(lengths.max(initial=0)))
            _rank(held.now, lengths, _recency(numbers, lengths, held.now.shape[1], question.unit), answer[mine])
        return answer

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """Candidate j of every list belongs to group j modulo `groups`. int64 (lists, candidates), not writeable."""
        return strided_groups(grouping)

    def beyond(self, model: str | None, longest: int) -> list[str]:
        """Why answers are extrapolated: scores are those of no model, so they always are, once anything was asked."""
        return [f"the selection has scores that rest on {'; '.join(self.model.rests_on) or 'nothing named'}"][
            : self.asked
        ]


def ranked_steps(
    model: ScoreTraceModel, num_layers: int, num_heads: int, candidates: int, k: int, steps: int, seed: int = 0
) -> Iterator[Int64]:
    """The k best candidates of each layer and head, best first, step after step. Each int64 (layers, heads, k)."""
    trace = ScoreTrace(model, num_layers, seed)
    lengths, first = np.full(num_heads, candidates, dtype=np.int64), np.zeros(num_heads, dtype=np.int64)
    for step in range(steps):
        asked = (Question("trace", layer, ("trace",), step, lengths, first, 1, k) for layer in range(num_layers))
        yield np.stack([trace.answer(question, None) for question in asked])


class _Scores:
    """Scores of one request and layer, without their recency: `now` float32 (lists, candidates)."""

    def __init__(self, numbers: LayerScores, lists: int, seed: tuple[int, ...]) -> None:
        self.now: Float32 = np.empty((lists, 0), dtype=np.float32)
        self._numbers = numbers
        self._seed = seed
        self._base, self._slow = self.now, self.now
        self._time = 0
        self._last: tuple[int, str] | None = None
        # Heads of all requests have the same factors.
        normal = _random((seed[0], seed[2], lists)).standard_normal(lists).clip(-2, 2)
        factor = np.array([math.pow(2, numbers.spread * z) for z in normal.tolist()])[:, None]
        self._slow_by = (factor * numbers.slow).astype(np.float32)
        self._white_by = (factor * numbers.white).astype(np.float32)

    def advance(self, step: int, leader: str) -> None:
        """Go to the time of a question."""
        before, self._last = self._last, (step, leader)
        if before is None or before == self._last:
            return
        passed = max(step - before[0], 0) if before[1] == leader else int(step != before[0])
        if passed:
            self._time += passed
            random = _random((*self._seed, self._time, 0))
            kept = (1 - 1 / self._numbers.memory_steps) ** passed
            self._slow *= np.float32(kept)
            self._slow += np.float32(math.sqrt(1 - kept * kept)) * self._normal(random, self._slow.shape[1])
            self.now = self._sum(random, self._base, self._slow)

    def grow(self, candidates: int) -> None:
        """Have scores for so many candidates; those that are there keep theirs."""
        more = candidates - self.now.shape[1]
        if more <= 0:
            return
        random = _random((*self._seed, self._time, candidates))
        popular = random.random((len(self.now), more)) < self._numbers.popular
        base = self._normal(random, more) * np.float32(self._numbers.static)
        base += popular * np.float32(self._numbers.lift)
        slow = self._normal(random, more)
        now = self._sum(random, base, slow)
        self._base = np.concatenate((self._base, base), axis=1)
        self._slow = np.concatenate((self._slow, slow), axis=1)
        self.now = np.concatenate((self.now, now), axis=1)

    def _sum(self, random: np.random.Generator, base: Float32, slow: Float32) -> Float32:
        now = self._normal(random, base.shape[1])
        now *= self._white_by
        now += self._slow_by * slow
        now += base
        return now

    def _normal(self, random: np.random.Generator, candidates: int) -> Float32:
        return random.standard_normal((len(self.now), candidates), dtype=np.float32)


def _random(seed: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def _recency(numbers: LayerScores, lengths: Int64, candidates: int, unit: int) -> Float32 | None:
    """What candidates have for their age, the newest of a list last. float32 (lists or 1, candidates)."""
    if not numbers.recency:
        return None
    newest = (lengths[:1] if (lengths == lengths[0]).all() else lengths)[:, None] - 1
    age = np.maximum(newest - np.arange(candidates, dtype=np.int64), 0) * unit
    bonus: Float32 = (numbers.recency / (1 + age / numbers.recency_tokens)).astype(np.float32)
    return bonus


def _rank(scores: Float32, lengths: Int64, recency: Float32 | None, answer: Int64) -> None:
    """Fill in the best of each list; equal scores in ascending order, so that no sort's habits show."""
    bits = (scores + (np.float32(0) if recency is None else recency)).view(np.int32)
    # As integers, floats fall with what they are worth if the bits of positive ones are turned over, but for the sign.
    keys = (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).astype(np.int64)
    keys <<= 32
    keys |= np.arange(keys.shape[1])
    for row, length, mine in zip(keys, lengths.tolist(), answer, strict=True):
        count = min(length, len(mine))
        if count:
            best = np.partition(row[:length], count - 1)[:count] if count < length else row[:length].copy()
            best.sort()
            mine[:count] = best & 0xFFFFFFFF
