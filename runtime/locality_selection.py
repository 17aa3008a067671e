"""Selections drawn from a locality model: what a policy that nobody has recorded would pick, in a phantom run.

Questions may have any context length, k and unit. From a list's last answer whole runs are kept, each with probability
`persistence`; the rest is drawn as runs of geometric length that begin where `positions` says. Answers depend on the
seed, the question and the answer before it alone, and a list's are best first: what was kept, in its old order, then
what is new, in the order of drawing. 2,048 of 2²⁰ rows for 40 lists take 12 to 18 ms of one core.

Groups are equal and strided, in every layer and list: neighbours are in different ones. So the rows of a few groups are
scattered over the context, as those of clusters are; that clusters differ in size is left out.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.locality import PARTS, LocalityModel

Int64 = NDArray[np.int64]

_ROUNDS = 12
"""Drawings before the rest of a list is taken from what is left of it: only where most candidates are picked."""
_FULL = 0.9
"""The share of a part that runs are drawn for, at most: beyond it nearly everything that is drawn is there already."""


class LocalitySelection:
    """Decisions drawn from a locality model, for a model of `num_layers` layers; see the top of the file."""

    def __init__(self, model: LocalityModel, num_layers: int, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self.asked = False
        """Whether any answer was needed: times of a policy that selects nothing do not rest on the model."""
        self._layers = [model.layer(number, num_layers) for number in range(num_layers)]
        self._last: dict[tuple[str, int, tuple[str, ...]], tuple[_Picks, Int64, int]] = {}

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """k candidates of each list, best first. int64 (lists, k)."""
        self.asked = True
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
        cumulative = _cumulative(layer.positions, question)
        accepted = 1.0
        for number in range(_ROUNDS):
            accepted = picks.add_runs(cumulative, mean_run, random, accepted, number == 0)
            if not accepted:
                break
        picks.fill(random)
        self._last[key] = (picks, question.first.copy(), question.unit)
        return picks.answer.copy()

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """Candidate j of every list belongs to group j modulo `groups`. int64 (lists, candidates), not writeable."""
        return strided_groups(grouping)

    def beyond(self, model: str | None, longest: int) -> list[str]:
        """Why answers are extrapolated, where they are: for a model by name and prompts of so many tokens."""
        if not self.asked:
            return []
        fitted = ", ".join(self.model.models) or "unnamed models"
        reasons = [] if model in self.model.models else [f"the selection has the locality of {fitted}"]
        if longest > self.model.longest:
            reasons.append(f"locality was fitted to prompts of at most {self.model.longest:,} tokens")
        return reasons


def strided_groups(grouping: Grouping) -> Int64:
    """Equal groups of which neighbours never belong to one. int64 (lists, candidates), one row of memory in all."""
    return np.broadcast_to(_strided(grouping.candidates, grouping.groups), (grouping.lists, grouping.candidates))


@lru_cache(maxsize=8)
def _strided(candidates: int, groups: int) -> Int64:
    labels = np.arange(candidates, dtype=np.int64) % max(groups, 1)
    labels.flags.writeable = False
    return labels


def _cumulative(positions: tuple[float, ...], question: Question) -> NDArray[np.float64]:
    """Where runs begin: the shares of the parts, cumulated, of which none is asked for more than it has.

    What a part of the lists cannot give is asked of the others, in proportion to theirs.
    """
    share = np.array(positions)
    most = _FULL * float(question.lengths.sum()) / (PARTS * max(question.k * len(question.lengths), 1))
    for _ in range(PARTS):
        over = share > most
        rest = share[~over].sum()
        if not over.any() or rest <= 0:
            break
        share = np.where(over, most, share * max(1 - most * over.sum(), 0) / rest)
    total = share.sum()
    share = share / total if total > 0 else np.full(PARTS, 1 / PARTS)
    return np.concatenate(([0.0], np.cumsum(share)))


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
        if moved is None and last._high == self._high:
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

    def add_runs(
        self,
        cumulative: NDArray[np.float64],
        mean_run: float,
        random: np.random.Generator,
        expected: float = 1.0,
        lengthen: bool = False,
    ) -> float:
        """Draw runs for what is missing; returns the share that was not there already, 0 where nothing was missing.

        More is drawn where less than 1 of it is `expected` to be new. The run that is longer than what is left of a
        list is cut there as often as its shorter part is of it, and lengthens a run that is there otherwise (if
        `lengthen`): so the mean stays what it is.
        """
        missing = self._wanted - self.count
        asked = np.ceil(missing / max(expected, 0.05)).astype(np.int64)
        number = np.where(missing > 0, np.ceil(asked / mean_run * 1.1).astype(np.int64) + 1, 0)
        if not number.any():
            return 0.0
        lists = np.repeat(np.arange(len(number)), number)
        lengths = self._lengths[lists]
        where = np.interp(random.random(len(lists)), cumulative, np.linspace(0, 1, PARTS + 1))
        begins = np.minimum((where * lengths).astype(np.int64), lengths - 1)
        sizes = random.geometric(1 / mean_run, len(lists)) if mean_run > 1 else np.ones(len(lists), dtype=np.int64)
        begun = np.cumsum(sizes) - sizes
        some = number > 0
        begun -= np.repeat(begun[(np.cumsum(number) - number)[some]], number[some])
        cut = np.clip(asked[lists] - begun, 0, sizes)
        if lengthen:
            longer = np.flatnonzero((cut > 0) & (cut < sizes))
            self._lengthen(begins, lists, longer[random.random(len(longer)) * sizes[longer] >= cut[longer]], random)
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
        new = np.zeros(len(drawn), dtype=bool)
        new[order] = True
        rank = np.cumsum(new) - 1
        lists = flat >> self._high
        by_list = np.bincount(lists, minlength=len(self.count))
        place = rank[order] - (np.cumsum(by_list) - by_list)[lists]
        fits = place < missing[lists]
        flat, lists, place = flat[fits], lists[fits], place[fits]
        self._hold(flat, lists, place + self.count[lists])
        return max(float(new.mean()), 1e-9)

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
