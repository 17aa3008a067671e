"""What happened to the requests of a serving run: records, and the metrics of the whole.

Who calls this: a serving run gives a `ServingResult`, of the records that its log has made (serving_log.py), and the
command line shows it.

Times in records are ns from the start of the run, scaled back by the platform's dilation (divided by σ, rounded up), so
they compare with those of arrivals. A turn counts from when it was *due*, whether or not the loop was looking then:
otherwise a loop that stalls would hide how long it lets requests wait.

Metrics are in ms and over turns that are complete, a turn of a conversation counting like a request of its own:

- TTFT: from when a turn was asked to its first token. Latency: to its end.
- TPOT: the mean time between tokens of a turn, (last − first) / (tokens − 1); a turn of one token has none.
- ITL: the times between neighbouring tokens of a turn, all of them alike.

Their percentiles, and those of queue and batch over time, are spread.py's: None where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.results import DeviceUse, LinkUse
from tierloop.runtime.spread import Spread, spread, spread_over_time
from tierloop.runtime.tier_writes import TierUse

Int64 = NDArray[np.int64]

UNFINISHED = "not finished when the run ended"
NEVER = -1
"""The time of what did not happen."""


@dataclass(frozen=True, eq=False)
class ServedTurn:
    """One prompt and its answer: when it was asked, had its first token, and ended; `token_ns` are those of its tokens.

    A turn that is not complete was cut off by a failure, or by the end of the run.
    """

    asked_ns: int
    first_ns: int
    ended_ns: int
    num_tokens: int
    token_ns: Int64
    complete: bool = True

    def __post_init__(self) -> None:
        assert self.num_tokens == len(self.token_ns)
        assert self.first_ns == (self.token_ns[0] if self.num_tokens else NEVER)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ServedTurn)
            and (self.asked_ns, self.first_ns, self.ended_ns, self.num_tokens, self.complete)
            == (other.asked_ns, other.first_ns, other.ended_ns, other.num_tokens, other.complete)
            and np.array_equal(self.token_ns, other.token_ns)
        )

    def __hash__(self) -> int:
        return hash((self.asked_ns, self.ended_ns, self.token_ns.tobytes()))

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token; None without one."""
        return None if self.first_ns == NEVER else (self.first_ns - self.asked_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between tokens; None with fewer than two."""
        if self.num_tokens < 2:
            return None
        return int(self.token_ns[-1] - self.token_ns[0]) / (self.num_tokens - 1) / 1e6


@dataclass(frozen=True)
class Served:
    """One request; `prompt_tokens` are those of its first turn, `tokens` what was generated, where there is a model.

    `losses` says how often its rows were lost to a failure and it was recomputed for that; each is a preemption, too.
    """

    name: str
    arrived_ns: int
    turns: tuple[ServedTurn, ...]
    prompt_tokens: int
    preemptions: int = 0
    recomputed_tokens: int = 0
    migrations: int = 0
    kind: str = ""
    failure: str = ""
    tokens: tuple[int, ...] = ()
    losses: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, in all turns."""
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True)
class Sample:
    """How things stood from `at_ns` until the next sample: requests that run and that wait, free bytes by memory."""

    at_ns: int
    running: int
    waiting: int
    free_nbytes: dict[str, int]


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good, in every turn; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for what, limit in asdict(self).items():
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigurationError(f"the limit of {what} is {limit}; it must be above 0 and finite")

    def kept_by(self, request: Served) -> bool:
        """Whether a request was served, and fast enough."""
        return not request.failure and all(
            _within(turn.ttft_ms, self.ttft_ms) and _within(turn.tpot_ms, self.tpot_ms) for turn in request.turns
        )


@dataclass(frozen=True)
class ServingResult:
    """One policy that served one workload. `refused` says why it did not run; then there are no requests."""

    policy: str
    platform: str = ""
    clock: str = ""
    provenance: str = ""
    requests: tuple[Served, ...] = ()
    samples: tuple[Sample, ...] = ()
    steps: int = 0
    elapsed_ns: int = 0
    dilation: int = 1
    devices: dict[str, DeviceUse] = field(default_factory=dict)
    links: dict[str, LinkUse] = field(default_factory=dict)
    tiers: dict[str, TierUse] = field(default_factory=dict)
    """Blocks placed on each memory, and what was written to it."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the policy itself reports (`Policy.report`)."""
    notes: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    refused: str | None = None
    wall_s: float = 0.0
    """Seconds that the run took on the host's clock, whatever the platform's says."""

    def of(self, kind: str) -> ServingResult:
        """The same run, with the requests of one kind only; steps, samples and use of devices stay those of all."""
        return replace(self, requests=tuple(request for request in self.requests if request.kind == kind))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that requests have, in the order of their arrival."""
        return tuple(dict.fromkeys(request.kind for request in self.requests))

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated, those of requests that failed later included."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole run, its idle times included."""
        return self.num_tokens * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    @property
    def ttft_ms(self) -> Spread:
        """Times to the first token."""
        return spread(turn.ttft_ms for turn in self._complete())

    @property
    def tpot_ms(self) -> Spread:
        """Mean times between tokens, one for each turn."""
        return spread(turn.tpot_ms for turn in self._complete())

    @property
    def itl_ms(self) -> Spread:
        """Times between neighbouring tokens, of all turns together."""
        return spread(np.concatenate([[], *(np.diff(turn.token_ns) / 1e6 for turn in self._complete())]).tolist())

    @property
    def latency_ms(self) -> Spread:
        """Times from when a turn was asked to its end."""
        return spread((turn.ended_ns - turn.asked_ns) / 1e6 for turn in self._complete())

    @property
    def waiting(self) -> Spread:
        """Requests in the queue, weighted by time."""
        return self._over_time([sample.waiting for sample in self.samples])

    @property
    def running(self) -> Spread:
        """Requests in the batch, weighted by time."""
        return self._over_time([sample.running for sample in self.samples])

    @property
    def least_free_nbytes(self) -> dict[str, int]:
        """The fewest bytes that were free in each memory at any sample."""
        least: dict[str, int] = {}
        for sample in self.samples:
            for memory, nbytes in sample.free_nbytes.items():
                least[memory] = min(nbytes, least.get(memory, nbytes))
        return least

    @property
    def preemptions(self) -> int:
        return sum(request.preemptions for request in self.requests)

    @property
    def recomputed_tokens(self) -> int:
        return sum(request.recomputed_tokens for request in self.requests)

    @property
    def losses(self) -> int:
        return sum(request.losses for request in self.requests)

    @property
    def migrations(self) -> int:
        return sum(request.migrations for request in self.requests)

    @property
    def failures(self) -> dict[str, str]:
        """Why requests failed, by name."""
        return {request.name: request.failure for request in self.requests if request.failure}

    def goodput(self, limits: Limits) -> dict[str, float | int | None]:
        """Requests that kept the limits: how many, their share of all, and per second of the run."""
        good = sum(map(limits.kept_by, self.requests))
        return {
            "ttft_limit_ms": limits.ttft_ms,
            "tpot_limit_ms": limits.tpot_ms,
            "requests": good,
            "share": good / len(self.requests) if self.requests else None,
            "requests_per_s": good * 1e9 / self.elapsed_ns if self.elapsed_ns else None,
        }

    def as_dict(self, limits: Limits | None = None) -> dict[str, Any]:
        """Plain data for JSON: `requests` is how many there were, `served` what happened to each."""
        table = {"policy": self.policy} | self._metrics(limits)
        if any(self.kinds):
            table["kinds"] = {kind: self.of(kind)._metrics(limits) for kind in self.kinds}
        return table | {
            "provenance": self.provenance,
            "platform": self.platform,
            "clock": self.clock,
            "dilation": self.dilation,
            "steps": self.steps,
            "elapsed_ns": self.elapsed_ns,
            "wall_s": self.wall_s,
            "waiting": self.waiting,
            "running": self.running,
            "least_free_nbytes": self.least_free_nbytes,
            "devices": {name: asdict(use) for name, use in self.devices.items()},
            "links": {name: asdict(use) for name, use in self.links.items()},
            "tiers": {name: asdict(use) for name, use in self.tiers.items()},
            "details": self.details,
            "notes": list(self.notes),
            "guesses": list(self.guesses),
            "invalid": list(self.invalid),
            "refused": self.refused,
            "served": [_plain(request) for request in self.requests],
        }

    def _metrics(self, limits: Limits | None) -> dict[str, Any]:
        """What can be said of all requests, or of those of one kind."""
        table = {
            "requests": len(self.requests),
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "itl_ms": self.itl_ms,
            "latency_ms": self.latency_ms,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "losses": self.losses,
            "migrations": self.migrations,
            "failures": self.failures,
        }
        return table if limits is None else table | {"goodput": self.goodput(limits)}

    def _complete(self) -> Iterator[ServedTurn]:
        return (turn for request in self.requests for turn in request.turns if turn.complete)

    def _over_time(self, values: Sequence[int]) -> Spread:
        """Of what holds from each sample to the next, and from the last one to the end of the run."""
        times = [sample.at_ns for sample in self.samples]
        return spread_over_time(values, [max(0, until - at) for at, until in pairwise([*times, self.elapsed_ns])])


def _within(value: float | None, limit: float | None) -> bool:
    """Whether a limit is kept; what does not exist keeps any."""
    return value is None or limit is None or value <= limit


def _plain(request: Served) -> dict[str, Any]:
    """A request as plain data, without the times of its tokens."""
    turns = [
        {
            "asked_ns": turn.asked_ns,
            "first_ns": None if turn.first_ns == NEVER else turn.first_ns,
            "ended_ns": turn.ended_ns,
            "num_tokens": turn.num_tokens,
            "ttft_ms": turn.ttft_ms,
            "tpot_ms": turn.tpot_ms,
            "complete": turn.complete,
        }
        for turn in request.turns
    ]
    return {
        "name": request.name,
        "kind": request.kind,
        "arrived_ns": request.arrived_ns,
        "prompt_tokens": request.prompt_tokens,
        "turns": turns,
        "preemptions": request.preemptions,
        "recomputed_tokens": request.recomputed_tokens,
        "losses": request.losses,
        "migrations": request.migrations,
        "failure": request.failure,
        "tokens": list(request.tokens),
    }
