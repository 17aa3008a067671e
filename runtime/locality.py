"""A model of locality: which candidates a sparse policy picks, as statistics of recorded selections and nothing else.

`fit_locality` takes recorded selections and finds for each layer, over all lists and steps:

    persistence   the share of what was picked that is kept in the next step, beyond what chance picks again
    run_tokens    the mean length of runs of neighbouring candidates, in tokens, beyond what chance puts side by side
    positions     how likely a pick is in each of 32 equal parts of the candidates, from the oldest to the newest

`LocalitySelection` answers questions of any context length, k and unit from these numbers. From a list's last answer it
keeps whole runs, each with probability `persistence`; the rest is drawn as runs of geometric length that begin where
`positions` says. Chance is counted in the fit, so what is generated has the statistics that were observed. Answers
depend on the seed, the question and the answer before it alone, and a list's are best first: what was kept, in its old
order, then what is new, in the order of drawing.

What it leaves out: how alike the lists are (heads are drawn independently), that some candidates are kept for many
steps and others never (persistence is the same for all), and that statistics change with the length of the context
(positions are relative). A layer that no record asks about has the numbers of the nearest one that was. Runs that were
fitted in blocks say little about rows: fit and question should have the same unit.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.decisions import Question
from tierloop.runtime.selection import Answer, SelectionRecord

Int64 = NDArray[np.int64]

FORMAT, VERSION = "tierloop-locality", 1
PARTS = 32
_LARGEST_FILE = 1 << 24
_ROUNDS = 12
"""Drawings before the rest of a list is taken from what is left of it: only where most candidates are picked."""


@dataclass(frozen=True)
class LayerLocality:
    """The numbers of one layer; `positions` are 32 shares that sum to 1, the oldest candidates first."""

    persistence: float
    run_tokens: float
    positions: tuple[float, ...]


@dataclass(frozen=True)
class LocalityModel:
    """What was fitted, by layer (None: the layer was never asked about), and to what."""

    layers: tuple[LayerLocality | None, ...]
    unit: int
    fitted_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer is not None for layer in self.layers):
            raise ConfigurationError("a locality model needs the numbers of at least one layer")

    def layer(self, number: int, num_layers: int) -> LayerLocality:
        """The numbers for a layer of a model that may have more or fewer layers: those at the same relative depth."""
        wanted = (number + 0.5) * len(self.layers) / num_layers - 0.5
        known = [(abs(i - wanted), layer) for i, layer in enumerate(self.layers) if layer is not None]
        return min(known, key=lambda pair: pair[0])[1]

    def lines(self) -> list[str]:
        """The parameters for people: one line per layer."""
        shown = [f"locality per unit of {self.unit} tokens, fitted to {'; '.join(self.fitted_to) or 'nothing named'}"]
        for number, layer in enumerate(self.layers):
            if layer is not None:
                old, new = sum(layer.positions[: PARTS // 8]), sum(layer.positions[-PARTS // 8 :])
                shown.append(
                    f"layer {number}: persistence {layer.persistence:.3f}, runs of {layer.run_tokens:.1f} tokens, "
                    f"oldest eighth {old:.1%}, newest eighth {new:.1%}"
                )
        return shown

    def to_json(self) -> str:
        """Text for a file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n"

    @classmethod
    def load(cls, path: Path) -> LocalityModel:
        """Read and check a file. Raises ConfigurationError."""
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise ConfigurationError(f"{path}: no locality model: {error.strerror or error}") from error
        try:
            if len(data) > _LARGEST_FILE:
                raise ValueError(f"it is larger than {_LARGEST_FILE:,} bytes")
            return _from_json(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: no locality model: {' '.join(str(error).split())}") from error


def _from_json(table: Any) -> LocalityModel:
    if not isinstance(table, dict) or table.get("format") != FORMAT or table.get("version") != VERSION:
        raise ValueError(f"it does not say {FORMAT}, version {VERSION}")
    unit, fitted_to, layers = table.get("unit"), table.get("fitted_to"), table.get("layers")
    if not isinstance(unit, int) or isinstance(unit, bool) or not 1 <= unit <= 1 << 20:
        raise ValueError(f"unit is {unit!r}; it must be a whole number from 1 to {1 << 20}")
    if not isinstance(fitted_to, list) or not all(isinstance(text, str) for text in fitted_to):
        raise ValueError("fitted_to must be a list of texts")
    if not isinstance(layers, list) or len(layers) > 1 << 12:
        raise ValueError("layers must be a list of at most 4,096 tables")
    return LocalityModel(tuple(_layer(i, layer) for i, layer in enumerate(layers)), unit, tuple(fitted_to))


def _layer(number: int, table: Any) -> LayerLocality | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ValueError(f"layer {number} is no table")
    positions = table.get("positions")
    if not isinstance(positions, list) or len(positions) != PARTS or not all(_within(p, 0, 1) for p in positions):
        raise ValueError(f"layer {number}: positions must be {PARTS} numbers from 0 to 1")
    if abs(sum(positions) - 1) > 1e-6:
        raise ValueError(f"layer {number}: positions sum to {sum(positions):g}, not to 1")
    persistence, run_tokens = table.get("persistence"), table.get("run_tokens")
    if not _within(persistence, 0, 1):
        raise ValueError(f"layer {number}: persistence is {persistence!r}; it must be from 0 to 1")
    if not _within(run_tokens, 1, 1 << 30):
        raise ValueError(f"layer {number}: run_tokens is {run_tokens!r}; it must be at least 1")
    return LayerLocality(float(persistence), float(run_tokens), tuple(map(float, positions)))


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


# -- fitting ------------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    """Sums over the answers of one layer."""

    picked: int = 0
    runs: int = 0
    by_chance: float = 0.0
    before: int = 0
    kept: int = 0
    kept_by_chance: float = 0.0
    parts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(PARTS))


def fit_locality(records: Sequence[SelectionRecord], num_layers: int | None = None) -> LocalityModel:
    """Fit a model to recorded selections of one unit and number of layers; labels are taken together.

    Raises ConfigurationError where they differ, or where nothing was selected.
    """
    depths = {record.origin.shape.num_layers for record in records} | ({num_layers} if num_layers else set())
    units = {kept.unit for record in records for kept in record.answers.values()}
    if len(units) != 1 or len(depths) != 1:
        raise ConfigurationError(
            f"a locality model is fitted to selections of one unit and depth; these have units {sorted(units)} and "
            f"{sorted(depths)} layers"
        )
    (unit,), (depth,) = units, depths
    assert depth is not None
    parts = [np.zeros(PARTS) for _ in range(depth)]
    for record in records:
        for (_, layer, _, _), kept in record.answers.items():
            if layer < depth:
                parts[layer] += np.bincount(_part(kept)[kept.answer >= 0], minlength=PARTS)
    counts = [_Counts(parts=p) for p in parts]
    for record in records:
        last: dict[tuple[int, str, int], Answer] = {}
        for (_, layer, label, number), kept in sorted(record.answers.items()):
            if layer < depth and (kept.answer >= 0).any():
                _count(counts[layer], kept, last.get((layer, label, number)))
                last[layer, label, number] = kept
    layers = tuple(_fitted(c, unit) for c in counts)
    return LocalityModel(layers, unit, tuple(dict.fromkeys(_named(record) for record in records)))


def _named(record: SelectionRecord) -> str:
    origin = record.origin
    prompts = ", ".join(f"{n:,}" for n in origin.prompt_tokens)
    return f"{origin.model} under {origin.policy}, prompt of {prompts} tokens, seed {origin.seed}, {origin.steps} steps"


def _part(kept: Answer) -> Int64:
    """The part of its list in which each candidate of an answer lies."""
    return np.minimum(kept.answer * PARTS // np.maximum(kept.lengths[:, None], 1), PARTS - 1).clip(0)


def _count(counts: _Counts, kept: Answer, last: Answer | None) -> None:
    valid = kept.answer >= 0
    shares = counts.parts / counts.parts.sum()
    picked = valid.sum(axis=1)
    density = np.minimum(picked[:, None] * shares[_part(kept)] * PARTS / np.maximum(kept.lengths[:, None], 1), 1.0)
    flat = np.sort(_flat(kept)[valid])
    counts.picked += len(flat)
    counts.runs += 1 + int((np.diff(flat) != 1).sum())
    counts.by_chance += float(density[valid].sum())
    if last is None or last.answer.shape[0] != kept.answer.shape[0] or not np.array_equal(last.first, kept.first):
        return
    before = (last.answer >= 0) & (last.answer < kept.lengths[:, None])
    old = _flat(last, kept)[before]
    counts.before += len(old)
    counts.kept += int(np.isin(old, flat).sum())
    again = picked[:, None] * shares[_part(Answer(last.answer, kept.lengths, kept.first, kept.unit))] * PARTS
    counts.kept_by_chance += float(np.minimum(again / np.maximum(kept.lengths[:, None], 1), 1.0)[before].sum())


def _flat(kept: Answer, like: Answer | None = None) -> Int64:
    """Candidates as one number each: lists lie apart by more than they are long."""
    stride = int((like or kept).lengths.max()) + 2
    return kept.answer + np.arange(len(kept.answer))[:, None] * stride


def _fitted(counts: _Counts, unit: int) -> LayerLocality | None:
    if not counts.picked:
        return None
    by_chance = min(counts.by_chance / counts.picked, 0.99)
    run = max(counts.picked / counts.runs * (1 - by_chance), 1.0)
    persistence = 0.0
    if counts.before:
        persistence = 1 - _left(counts.kept / counts.before, min(counts.kept_by_chance / counts.before, 0.99))
    shares = counts.parts / counts.parts.sum()
    return LayerLocality(persistence, run * unit, tuple(shares.tolist()))


def _left(observed: float, chance: float) -> float:
    """The share u of picks that are drawn anew, where of u · chance of them chance picks the old one again.

    What is observed to stay is 1 − u + u² · chance.
    """
    if chance < 1e-9:
        return 1 - observed
    under = 1 - 4 * chance * (1 - observed)
    return min((1 - math.sqrt(max(under, 0.0))) / (2 * chance), 1.0)


# -- generating ---------------------------------------------------------------------------------------------------


class LocalitySelection:
    """Decisions drawn from a locality model, for a model of `num_layers` layers; see the top of the file."""

    def __init__(self, model: LocalityModel, num_layers: int, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self._layers = [model.layer(number, num_layers) for number in range(num_layers)]
        self._cumulative = [np.concatenate(([0.0], np.cumsum(layer.positions))) for layer in self._layers]
        self._last: dict[tuple[str, int, tuple[str, ...]], tuple[_Picks, Int64, int]] = {}

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """k candidates of each list, best first. int64 (lists, k)."""
        layer = self._layers[question.layer]
        key = (question.label, question.layer, question.requests)
        label = zlib.crc32("\0".join((question.label, *question.requests)).encode())
        random = np.random.default_rng((self.seed, label, question.layer, question.step))
        picks = _Picks(question.lengths, question.k)
        if key in self._last:
            last, first, unit = self._last[key]
            if len(first) == len(question.first):
                tokens = last.answer * unit + (first - question.first)[:, None]
                same = unit == question.unit and np.array_equal(first, question.first)
                moved = None if same else np.where((last.answer < 0) | (tokens < 0), -1, tokens // question.unit)
                picks.keep(last, moved, layer.persistence, random)
        mean_run = max(layer.run_tokens / question.unit, 1.0)
        for _ in range(_ROUNDS):
            if not picks.add_runs(self._cumulative[question.layer], mean_run, random):
                break
        picks.fill(random)
        self._last[key] = (picks, question.first.copy(), question.unit)
        return picks.answer.copy()


class _Picks:
    """The lists of one answer as they fill up: `answer` int64 (lists, k), `count` int64 (lists,) so far.

    A pick is also a number of `_held`, in ascending order: list, candidate and place in the answer, from high bits to
    low ones. So neighbours are neighbours there, and one sort serves all lists, in this answer and the next.
    """

    def __init__(self, lengths: Int64, k: int) -> None:
        self._lengths = lengths
        self._wanted = np.minimum(lengths, k)
        self._high = (int(lengths.max(initial=0)) + 1).bit_length()
        self._low = (len(lengths) * max(k, 1)).bit_length()
        assert len(lengths).bit_length() + self._high + self._low < 63, "more lists than can be told apart"
        self.answer = np.full((len(lengths), k), -1, dtype=np.int64)
        self.count = np.zeros(len(lengths), dtype=np.int64)
        self._held = np.empty(0, dtype=np.int64)

    def keep(self, last: _Picks, moved: Int64 | None, share: float, random: np.random.Generator) -> None:
        """Keep whole runs of an earlier answer, each with probability `share`.

        `moved` are the earlier candidates as candidates of this one, −1 for what is none any more (None: they are).
        """
        if moved is None and (last._high, last.answer.shape) == (self._high, self.answer.shape):
            flat, place = last._held >> last._low, last._held & ((1 << last._low) - 1)
        else:
            flat, place = self._flat(last.answer if moved is None else moved)
        run = np.cumsum(np.diff(flat, prepend=-2) != 1) - 1
        mine = (random.random(int(run[-1]) + 1 if len(run) else 0) < share)[run]
        flat, place = flat[mine], place[mine]
        shape = last.answer.shape
        kept = np.zeros(shape[0] * shape[1], dtype=bool)
        kept[place] = True
        new = (np.cumsum(kept.reshape(shape), axis=1) - 1).reshape(-1)[place]
        lists = flat >> self._high
        fits = new < self._wanted[lists]
        self._hold(flat[fits], lists[fits], new[fits])

    def add_runs(self, cumulative: NDArray[np.float64], mean_run: float, random: np.random.Generator) -> bool:
        """Draw runs for what is missing; whether anything was. What is there already is not counted again.

        The run that is longer than what is left of a list is cut there as often as its shorter part is of it, and
        lengthens a run that is there otherwise: so the mean stays what it is.
        """
        missing = self._wanted - self.count
        number = np.where(missing > 0, np.ceil(missing / mean_run * 1.1).astype(np.int64) + 1, 0)
        if not number.any():
            return False
        lists = np.repeat(np.arange(len(number)), number)
        lengths = self._lengths[lists]
        where = np.interp(random.random(len(lists)), cumulative, np.linspace(0, 1, PARTS + 1))
        begins = np.minimum((where * lengths).astype(np.int64), lengths - 1)
        sizes = random.geometric(1 / mean_run, len(lists)) if mean_run > 1 else np.ones(len(lists), dtype=np.int64)
        begun = np.cumsum(sizes) - sizes
        some = number > 0
        begun -= np.repeat(begun[(np.cumsum(number) - number)[some]], number[some])
        cut = np.clip(missing[lists] - begun, 0, sizes)
        longer = np.flatnonzero((cut > 0) & (cut < sizes))
        longer = longer[random.random(len(longer)) * sizes[longer] >= cut[longer]]
        self._lengthen(begins, lists, longer, random)
        sizes = np.clip(cut, 0, lengths - begins)
        ends = np.cumsum(sizes)
        drawn = np.arange(int(ends[-1])) + np.repeat(begins - (ends - sizes), sizes)
        of_list = np.repeat(lists, sizes)
        bits = len(drawn).bit_length()
        packed = np.sort((((of_list << self._high) | drawn) << bits) | np.arange(len(drawn)))
        flat, order = packed >> bits, packed & ((1 << bits) - 1)
        fresh = np.diff(flat, prepend=-1) != 0
        if len(self._held):
            held = self._held >> self._low
            fresh &= held[np.minimum(np.searchsorted(held, flat), len(held) - 1)] != flat
        flat, order = flat[fresh], order[fresh]
        accepted = np.zeros(len(drawn), dtype=bool)
        accepted[order] = True
        taken = np.cumsum(accepted) - 1
        lists = flat >> self._high
        by_list = np.bincount(lists, minlength=len(self.count))
        self._hold(flat, lists, taken[order] - (np.cumsum(by_list) - by_list)[lists] + self.count[lists])
        return True

    def fill(self, random: np.random.Generator) -> None:
        """Take what is still missing evenly from what is left."""
        for number in np.flatnonzero(self.count < self._wanted).tolist():
            left = np.ones(int(self._lengths[number]), dtype=bool)
            left[self.answer[number, : self.count[number]]] = False
            missing = int(self._wanted[number] - self.count[number])
            chosen = np.sort(random.choice(np.flatnonzero(left), missing, replace=False))
            lists = np.full(missing, number, dtype=np.int64)
            self._hold((lists << self._high) | chosen, lists, self.count[number] + random.permutation(missing))

    def _lengthen(self, begins: Int64, lists: Int64, which: Int64, random: np.random.Generator) -> None:
        """Let these of the drawn runs begin where a run that is held ends, each list choosing one of its own."""
        if not len(self._held) or not len(which):
            return
        flat = self._held >> self._low
        ends = np.flatnonzero(np.diff(flat, append=-2) != 1)
        of_list = flat[ends] >> self._high
        first, last = (np.searchsorted(of_list, lists[which], side=side) for side in ("left", "right"))
        some = last > first
        chosen = first + (random.random(len(which)) * (last - first)).astype(np.int64)
        after = (flat[ends[chosen[some]]] & ((1 << self._high) - 1)) + 1
        begins[which[some]] = np.minimum(after, self._lengths[lists[which[some]]] - 1)

    def _flat(self, answer: Int64) -> tuple[Int64, Int64]:
        """Candidates with their lists, ascending, each once, and their places in the answer."""
        lists, place = np.nonzero((answer >= 0) & (answer < self._lengths[:, None]))
        flat = (lists << self._high) | answer[lists, place]
        flat, first = np.unique(flat, return_index=True)
        return flat, (lists * answer.shape[1] + place)[first]

    def _hold(self, flat: Int64, lists: Int64, place: Int64) -> None:
        """Add candidates, ascending, at their places in the answer."""
        at = lists * self.answer.shape[1] + place
        self.answer.reshape(-1)[at] = flat & ((1 << self._high) - 1)
        new = (flat << self._low) | at
        self._held = np.insert(self._held, np.searchsorted(self._held, new), new) if len(self._held) else new
        self.count += np.bincount(lists, minlength=len(self.count))
