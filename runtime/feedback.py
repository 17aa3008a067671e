"""HybridGen's feedback scheduler (arXiv 2604.18529, Algorithm 1): how many rows the host attends, and when it chooses.

Pure code: a policy measures what the stages of a step took, calls `decide`, and does what the answer says. The
*setting* is K, the host rows that each KV head attends, and a timing:

    prev         rows and logits are taken one layer ahead, with a query predicted from the previous layer's input
    prev-select  rows one layer ahead, their logits with the true query
    current      rows and logits with the true query

The timings are in ascending order of accuracy and of what is exposed; *exposed* is T_cpu + T_tx, and in `current` also
T_select. Against the GPU's stage that is the load, exposed / T_gpu, and all of this is about keeping it near 1.

    load < 1 − ε   "full": the next timing, if the load that it is predicted to have is at most 1; else K one step up,
                   likewise. "adaptive": K alone.
    load > 1 + ε   "full": the timing before; if there is none, or it is "adaptive", K one step down.
    between        nothing.

What keeps noise from turning into a cycle:

- Times are smoothed: at first and after a step new measurements weigh more, then less and less down to `smoothing`.
- Predictions are in proportion: T_cpu and T_tx go with K. Where they have a large fixed part that is too much for a
  step up, so K stops short of what would fit, or creeps up to it.
- After a decision to do nothing it takes a load that differs by ε / 2 to do something.
- A step up that had to be undone leads back to exactly where it began, and is remembered with how far its prediction
  was off (load found / load predicted): the same step is taken again only when its prediction, times that, is at
  most 1.

Simulated on host = a + b·K with noise of ±10 % on every time, a and T_select together up to 0.5 · T_gpu: with steps of
20 % and more, K stays within one step from call 800 on in all of 2,000 runs. Where less of the load goes with K, or
with steps of 5 %, about one run in 100 still crept upwards then. K never turned around more than once.

Where the paper is silent or its text was not available [?], and what is done here:

- Algorithm 1 after its lines 1 and 2 (K ← K_min) is a reconstruction, and so is the order "timing up before K up,
  timing down before K down". The initial timing is the caller's.
- ε, the smoothing, how often to decide and the size of a step are unknown: arguments.
- A step down is the inverse of a step up (÷ 1.2 where up is × 1.2), not × 0.8, after which × 1.2 does not return.
- Three timings stand in a ladder, as the paper does not say whether its "previous" moves the logits too; `timings` can
  leave one out.
- Smoothing, rest, the prediction of a step's effect and the memory of an undone step are ours.

"port" is the rule of a third party's port (binkma-v/hybridgen-sglang), as an alternative: a share of the host rows is
attended, of the latest `scan` rows (0: of all); host ≤ GPU makes the share × 1.2 and the scan max(+1, × 1.2), all rows
once it reaches them; otherwise the share × 0.8 and the scan × 0.5, half of all rows where it was all. It has no dead
band and swings for ever. Its times are smoothed like those of the others; `smoothing=1` is the rule as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Timing = Literal["prev", "prev-select", "current"]
Kind = Literal["fixed", "adaptive", "full", "port"]
TIMINGS: tuple[Timing, ...] = get_args(Timing)
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Times:
    """What the stages of one layer or step took, in ns, all for the same amount of work.

    `t_gpu_ns` is what the GPU does meanwhile, `t_cpu_ns` the logits on the host, `t_tx_ns` the transfer of logits and V
    rows, `t_select_ns` the choice of rows.
    """

    t_gpu_ns: float
    t_cpu_ns: float
    t_tx_ns: float
    t_select_ns: float


@dataclass(frozen=True)
class Setting:
    """K host rows for each KV head, the timing, and how many of the latest host rows are scanned (0: all)."""

    k: int
    timing: Timing
    scan: int = 0


@dataclass(frozen=True)
class _Step:
    """A step up: from where, to where, and the load that was predicted there."""

    below: int
    above: int
    predicted: float


class FeedbackScheduler:
    """K and timing of one request, from measured times; the same times give the same settings.

    `k_max` is the number of host rows; it may change with every `decide`. Settings never go above it, and never below
    `k_min` while there are so many rows. `step` is how far K moves: a float is a share (0.2: × 1.2 and ÷ 1.2), an
    int rows. `epsilon` is half the dead band, as a share of T_gpu; `smoothing` the least weight of a new measurement
    (1: no smoothing), equal weights until there are 1 / smoothing; `every` how many calls lie between decisions.
    `scan`, `scan_min` and `port_shares` (least and largest share of rows) belong to "port".

    Raises ValueError for numbers that cannot be.
    """

    def __init__(
        self,
        k_min: int,
        k_max: int,
        k: int | None = None,
        timing: Timing = "prev",
        *,
        kind: Kind = "full",
        step: float = 0.2,
        epsilon: float = 0.1,
        smoothing: float = 0.05,
        every: int = 4,
        timings: Sequence[Timing] = TIMINGS,
        scan: int = 0,
        scan_min: int = 32,
        port_shares: tuple[float, float] = (0.01, 0.5),
    ) -> None:
        k = k_min if k is None else k
        _whole("k_min", k_min, 1)
        _whole("k_max", k_max, 0)
        _whole("every", every, 1)
        _whole("scan", scan, 0)
        _whole("scan_min", scan_min, 1)
        _whole("k", k, k_min)
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
        if list(timings) != [t for t in TIMINGS if t in timings] or timing not in timings:
            raise ValueError(f"timing {timing!r} of {list(timings)}: some of {TIMINGS} in this order, it too")
        if isinstance(step, bool) or not (math.isfinite(step) and step > 0):
            raise ValueError(f"step is {step!r}; allowed: a share above 0, or at least 1 row")
        if not (0 <= epsilon < 1 and 0 < smoothing <= 1):
            raise ValueError(f"epsilon {epsilon!r}, smoothing {smoothing!r}: 0 ≤ epsilon < 1, 0 < smoothing ≤ 1 needed")
        if not 0 < port_shares[0] <= port_shares[1] <= 1:
            raise ValueError(f"port_shares is {port_shares!r}; allowed: two ascending shares above 0 and up to 1")
        self._k_min, self._k_max, self._k = k_min, k_max, k
        self._kind, self._step, self._epsilon, self._smoothing, self._every = kind, step, epsilon, smoothing, every
        self._timings, self._rung = tuple(timings), tuple(timings).index(timing)
        self._scan, self._scan_min, self._shares = scan, scan_min, port_shares
        self._share = min(max(k / max(k_max, 1), port_shares[0]), port_shares[1])
        self._calls = self._samples = 0
        self._gpu = self._host = self._select = 0.0
        self._rest = 0.0
        """The load when it last came to rest; 0 while it moves."""
        self._climbs: list[_Step] = []
        """Steps up of K that led to where it is, one above the other."""
        self._rungs: dict[int, float] = {}
        """By rung that was stepped up to: the load that was predicted there."""
        self._undone: dict[tuple[str, int], float] = {}
        """By ("k", K) or ("timing", rung): load found / load predicted of the last step up that had to be undone."""

    @property
    def setting(self) -> Setting:
        """What holds now."""
        least = min(self._k_min, self._k_max)
        k = min(max(self._k, least), self._k_max)
        # What is scanned holds what is attended.
        scan = max(self._scan, k) if self._scan else 0
        return Setting(k, self._timings[self._rung], scan if scan < self._k_max else 0)

    @property
    def load(self) -> float:
        """Exposed time / GPU time, smoothed; infinite where only the GPU took none, 1 before anything was measured."""
        return self._load(self._host, self._rung)

    def decide(self, times: Times, k_max: int | None = None) -> Setting:
        """Take in what a step took, and say how the next one is to be; `k_max` is the number of host rows by now.

        Raises ValueError for a time that is negative or no number.
        """
        parts = (times.t_gpu_ns, times.t_cpu_ns, times.t_tx_ns, times.t_select_ns)
        if not all(math.isfinite(t) and t >= 0 for t in parts):
            raise ValueError(f"{times}: times are at least 0 and finite")
        if k_max is not None:
            _whole("k_max", k_max, 0)
            self._k_max = k_max
        self._calls += 1
        self._samples += 1
        weight = max(self._smoothing, 1 / self._samples)
        self._gpu += weight * (times.t_gpu_ns - self._gpu)
        self._host += weight * (times.t_cpu_ns + times.t_tx_ns - self._host)
        self._select += weight * (times.t_select_ns - self._select)
        if self._calls % self._every == 0 and self._kind != "fixed":
            if self._kind == "port":
                self._decide_like_the_port()
            else:
                self._decide()
        return self.setting

    def _decide(self) -> None:
        load = self.load
        if abs(load - self._rest) <= self._epsilon / 2 * self._rest:
            return
        before = self._k, self._rung
        if load < 1 - self._epsilon:
            self._step_up()
        elif load > 1 + self._epsilon:
            self._step_down()
        stays = (self._k, self._rung) == before
        # What stood in the way may be the number of rows, which grows without the load.
        self._rest = load if stays and self.setting.k < self._k_max else 0.0

    # -- steps -------------------------------------------------------------------------------------------------------

    def _load(self, host: float, rung: int) -> float:
        exposed = host + (self._select if self._timings[rung] == "current" else 0.0)
        return exposed / self._gpu if self._gpu else math.inf if exposed else 1.0

    def _fits(self, what: str, target: int, predicted: float) -> bool:
        """Whether a step up is to be taken: by its predicted load, corrected where the same step was undone before."""
        if predicted * self._undone.get((what, target), 1.0) > 1:
            return False
        self._undone.pop((what, target), None)
        return True

    def _step_up(self) -> None:
        rung = self._rung + 1
        if self._kind == "full" and rung < len(self._timings):
            predicted = self._load(self._host, rung)
            if self._fits("timing", rung, predicted):
                self._rungs[rung] = predicted
                self._move(self.setting.k, rung)
                return
        k = self.setting.k
        if isinstance(self._step, int):
            larger = min(k + self._step, self._k_max)
        else:
            larger = min(max(k + 1, round(min(k * (1 + self._step), float(self._k_max)))), self._k_max)
        if larger <= k:
            return
        predicted = self._load(self._host * larger / k, self._rung) if k else 1.0
        if self._fits("k", larger, predicted):
            self._climbs.append(_Step(k, larger, predicted))
            self._move(larger, self._rung)

    def _step_down(self) -> None:
        found = self.load
        if self._kind == "full" and self._rung:
            if self._rung in self._rungs:
                self._undone["timing", self._rung] = _ratio(found, self._rungs.pop(self._rung))
            self._move(self.setting.k, self._rung - 1)
            return
        k = self.setting.k
        if self._climbs and self._climbs[-1].above == k:
            step = self._climbs.pop()
            self._undone["k", k] = _ratio(found, step.predicted)
            smaller = step.below
        else:
            self._climbs.clear()
            smaller = k - self._step if isinstance(self._step, int) else round(k / (1 + self._step))
        smaller = max(min(self._k_min, k), min(smaller, k - 1))
        if smaller < k:
            self._move(smaller, self._rung)

    def _move(self, k: int, rung: int) -> None:
        """Change the setting; the host's time is taken to be in proportion to K until it has been measured."""
        before = self.setting.k
        if before:
            self._host *= k / before
        self._k, self._rung = k, rung
        self._samples = min(self._samples, self._every)

    def _decide_like_the_port(self) -> None:
        before, rows = self.setting.k, self._k_max
        if self.load <= 1:
            self._share *= 1.2
            if self._scan:
                self._scan = max(self._scan + 1, int(1.2 * self._scan))
                self._scan = 0 if self._scan >= rows else self._scan
        else:
            self._share *= 0.8
            self._scan = max(self._scan_min, (self._scan or rows) // 2)
        self._share = min(max(self._share, self._shares[0]), self._shares[1])
        # The scheduler's own rule: the port floors, which gives 0 rows of a short list.
        self._k = max(self._k_min, min(math.ceil(self._share * rows), self._scan or rows))
        if before:
            self._host *= self.setting.k / before


def find_k_min(
    score: Callable[[int], float], dense: float, tolerance: float, low: int, high: int, apart: float = 1 / 16
) -> int:
    """The smallest K from `low` to `high` whose score is within `tolerance` of `dense`, the score of all rows.

    Scores are higher where better. Bisection, which would trust that more rows never score worse; so what it finds is
    tried with its neighbours above, K + 1 and K + `apart` · K, and where one of them is out of tolerance the search
    goes on above that. What is returned and every larger K that was tried are within tolerance, K − 1 is not. `score`
    is called once for each K: about log2(high − low) + 4 times where it is monotone.

    Raises LookupError where `high` is not within tolerance: then nothing is, as far as can be told without trying all.
    Raises ValueError for a range or tolerance that cannot be.
    """
    _whole("low", low, 1)
    _whole("high", high, low)
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance!r}; allowed: at least 0")
    tried: dict[int, float] = {}

    def good(k: int) -> bool:
        if k not in tried:
            tried[k] = score(k)
        return tried[k] >= dense - tolerance

    if not good(high):
        raise LookupError(
            f"no K from {low} to {high} is known to score within {tolerance:g} of {dense:g}: {high} rows score "
            f"{tried[high]:g}"
        )
    least = low
    while True:
        bad, best = least - 1, high
        while best - bad > 1:
            middle = (bad + best) // 2
            bad, best = (bad, middle) if good(middle) else (middle, best)
        above = {min(high, best + 1), min(high, best + max(1, round(apart * best)))}
        worse = [k for k in sorted(above | {k for k in tried if k > best}) if not good(k)]
        if not worse:
            return best
        least = worse[-1] + 1


def _ratio(found: float, predicted: float) -> float:
    return found / predicted if predicted else math.inf


def _whole(what: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}; allowed: a whole number of at least {least}")
