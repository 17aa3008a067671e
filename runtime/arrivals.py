"""Requests as they arrive: who asks when, for how many tokens, in how many turns.

Who calls this: whoever serves (runtime/serving.py), and the command line, which makes the streams. An arrival says when
a request is due and how long its turns are; where there is a real model it holds the tokens of its first prompt, too.
A later turn's prompt is what is new in it: the cache still holds the turns before.

Streams are seeded: the same arguments give the same requests on every machine. A time and a length each come from
uniform numbers of their own, by inversion, so other lengths leave the times as they are, and more requests leave the
first ones as they are. Logarithms of times are decimal, since those of C libraries differ in their last bits.

What must hold of arrivals that are served is what `check` says. Times are those of the modelled world, from the start
of the run: a dilated platform waits σ times as long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from statistics import NormalDist
from typing import Protocol

import numpy as np

from tierloop.devices.errors import ConfigurationError

MOST_REQUESTS = 1 << 20
"""Requests of one run."""
MOST_TOKENS = 1 << 24
"""Tokens of one request, prompts and outputs of all turns together: 16 times a million."""
MOST_TURNS = 1024
LONGEST_NAME = 200
LATEST_NS = 1 << 60
"""The latest time of an arrival, and the longest pause between turns: 36 years."""

_DECIMAL = Context(prec=24)


@dataclass(frozen=True)
class Turn:
    """One prompt and its answer; asked `after_ns` after the last token of the turn before."""

    prompt_tokens: int
    output_tokens: int
    after_ns: int = 0


@dataclass(frozen=True)
class Arrival:
    """One request; `tokens` are the first turn's prompt where there is a real model, `kind` is for the report."""

    name: str
    at_ns: int
    turns: tuple[Turn, ...]
    tokens: tuple[int, ...] | None = None
    kind: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first turn's prompt."""
        return self.turns[0].prompt_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of all turns, prompts and outputs: what the cache holds at the end, or one more."""
        return sum(turn.prompt_tokens + turn.output_tokens for turn in self.turns)


class Length(Protocol):
    """How long something is, in tokens: a number for each u in [0, 1), that never falls as u grows."""

    def at(self, u: float) -> int:
        """The length that a share u of all lengths lies below."""


@dataclass(frozen=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens("a fixed length", self.tokens)

    def at(self, u: float) -> int:
        return self.tokens


@dataclass(frozen=True)
class Uniform:
    """Each length from `least` to `most`, both included, equally often."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check_bounds("uniform lengths", self.least, self.most)

    def at(self, u: float) -> int:
        return min(self.most, self.least + int(u * (self.most - self.least + 1)))


@dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithm is normal: half of them below `median`, `sigma` the deviation of the natural logarithm.

    What is outside `least` to `most` becomes the nearer of them.
    """

    median: float
    sigma: float
    least: int = 1
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        _check_bounds("lognormal lengths", self.least, self.most)
        if not self.least <= self.median <= self.most:
            raise ConfigurationError(
                f"the median of lognormal lengths is {self.median}; it must be from {self.least:,} to {self.most:,}"
            )
        if not 0 <= self.sigma <= 10:
            raise ConfigurationError(f"sigma of lognormal lengths is {self.sigma}; it must be from 0 to 10")

    def at(self, u: float) -> int:
        drawn = self.median * math.exp(self.sigma * NormalDist().inv_cdf(max(u, 2.0**-54)))
        return max(self.least, min(self.most, round(drawn)))


@dataclass(frozen=True)
class Lengths:
    """How long prompts and outputs of one kind of request are; each of its turns is drawn anew."""

    prompt: Length
    output: Length
    kind: str = ""
    turns: int = 1
    after_ns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.turns <= MOST_TURNS:
            raise ConfigurationError(f"turns are {self.turns}; they must be from 1 to {MOST_TURNS:,}")
        _check_time("the pause between turns", self.after_ns)


@dataclass(frozen=True)
class Mixture:
    """Kinds of requests and how often each comes: (share, lengths) pairs; shares are relative to their sum."""

    parts: tuple[tuple[float, Lengths], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.parts]
        if not all(0 <= share < math.inf for share in shares) or not 0 < math.fsum(shares) < math.inf:
            raise ConfigurationError(f"the shares of a mixture are {shares}; each must be at least 0, and one above 0")

    def at(self, u: float) -> Lengths:
        """The kind that u in [0, 1) falls on."""
        aim = u * math.fsum(share for share, _ in self.parts)
        parts = [(share, lengths) for share, lengths in self.parts if share > 0]
        for share, lengths in parts:
            if aim < share:
                return lengths
            aim -= share
        return parts[-1][1]  # the sum of the shares was rounded


def poisson(
    lengths: Lengths | Mixture,
    *,
    per_s: float,
    requests: int | None = None,
    until_ns: int | None = None,
    seed: int = 0,
    name: str = "request",
    start_ns: int = 0,
) -> tuple[Arrival, ...]:
    """Requests that arrive independently of each other, `per_s` of them a second on average, from `start_ns` on.

    There are `requests` of them, or those that come before `until_ns`, or the fewer of both. Raises ConfigurationError.
    """
    if not 0 < per_s <= 1e9:
        raise ConfigurationError(f"the rate is {per_s} requests/s; it must be above 0 and at most 1e9")
    if requests is None and until_ns is None:
        raise ConfigurationError("a Poisson stream without an end: give a number of requests or a time")
    _check_time("the start of a stream", start_ns)
    if until_ns is not None:
        _check_time("the end of a stream", until_ns)
    if requests is not None:
        _check_count("requests of a stream", requests)
    mean_ns = _DECIMAL.divide(Decimal(10**9), Decimal(per_s))
    gaps, shapes = _generators(seed)
    arrivals: list[Arrival] = []
    due = Decimal(start_ns)
    while requests is None or len(arrivals) < requests:
        due = _DECIMAL.subtract(due, _DECIMAL.multiply(mean_ns, _DECIMAL.ln(Decimal(1 - gaps.random()))))
        if until_ns is not None and due >= until_ns:
            break
        if len(arrivals) == MOST_REQUESTS:
            raise ConfigurationError(f"{per_s} requests/s are more than {MOST_REQUESTS:,} until {until_ns} ns")
        _check_time(f"the arrival of {name}-{len(arrivals)}", int(due))
        arrivals.append(_drawn(lengths, shapes, f"{name}-{len(arrivals)}", int(due)))
    check(arrivals)
    return tuple(arrivals)


def bursts(
    lengths: Lengths | Mixture,
    *,
    every_ns: int,
    bursts: int,
    size: int = 1,
    seed: int = 0,
    name: str = "request",
    start_ns: int = 0,
) -> tuple[Arrival, ...]:
    """`size` requests at once, `bursts` times, `every_ns` apart; with a size of 1, a steady stream.

    Raises ConfigurationError.
    """
    _check_time("the time between bursts", every_ns)
    _check_count("bursts", bursts)
    _check_count("requests of a burst", size)
    _check_count("requests of a stream", bursts * size)
    _check_time("the last burst", start_ns + (bursts - 1) * every_ns)
    _, shapes = _generators(seed)
    arrivals = tuple(
        _drawn(lengths, shapes, f"{name}-{i}", start_ns + i // size * every_ns) for i in range(bursts * size)
    )
    check(arrivals)
    return arrivals


def together(*streams: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Several streams as one, by time, and within one time in the order given.

    Names stay as they are where they differ; of equal ones the later get a number: `short-0`, `short-0.2`, …. Raises
    ConfigurationError where the streams together are not what `check` allows.
    """
    merged = sorted((arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.at_ns)
    taken = {arrival.name for arrival in merged}
    seen: Counter[str] = Counter()
    named = []
    for arrival in merged:
        name = arrival.name
        seen[name] += 1
        if seen[name] > 1:
            while (numbered := f"{name}.{seen[name]}") in taken:
                seen[name] += 1
            taken.add(numbered)
            arrival = replace(arrival, name=numbered)
        named.append(arrival)
    check(named)
    return tuple(named)


def check(arrivals: Sequence[Arrival]) -> None:
    """Raise ConfigurationError unless these can be served.

    Times are from 0 to 2**60 and never fall; each request has a name of its own and 1 to 1,024 turns, each turn a
    prompt and an output of at least one token and a pause that is not negative (0 for the first), a request at most
    2**24 tokens together; the tokens of the first prompt, where there are any, are as many as it says; there are 1 to
    2**20 requests.
    """
    if not 1 <= len(arrivals) <= MOST_REQUESTS:
        raise ConfigurationError(f"there are {len(arrivals):,} requests; there must be from 1 to {MOST_REQUESTS:,}")
    names: set[str] = set()
    before = 0
    for arrival in arrivals:
        check_one(arrival)
        if arrival.name in names:
            raise ConfigurationError(f"two requests are named {arrival.name!r}; names must differ")
        if arrival.at_ns < before:
            raise ConfigurationError(
                f"{arrival.name} arrives at {arrival.at_ns} ns, after one at {before} ns; arrivals must be in the "
                "order of their times"
            )
        names.add(arrival.name)
        before = arrival.at_ns


def check_one(arrival: Arrival) -> None:
    """`check`, for one request by itself."""
    if not 1 <= len(arrival.name) <= LONGEST_NAME or len(arrival.kind) > LONGEST_NAME:
        raise ConfigurationError(
            f"a request at {arrival.at_ns} ns has a name of {len(arrival.name)} characters and a kind of "
            f"{len(arrival.kind)}; a name must have from 1 to {LONGEST_NAME}, a kind at most as many"
        )
    if not (arrival.name + arrival.kind).isprintable():
        raise ConfigurationError(f"name and kind {arrival.name!r}, {arrival.kind!r} must be printable")
    _check_time(f"the arrival of {arrival.name}", arrival.at_ns)
    if not 1 <= len(arrival.turns) <= MOST_TURNS:
        raise ConfigurationError(
            f"{arrival.name} has {len(arrival.turns):,} turns; it must have from 1 to {MOST_TURNS:,}"
        )
    for i, turn in enumerate(arrival.turns):
        _check_tokens(f"{arrival.name}: the prompt of turn {i}", turn.prompt_tokens)
        _check_tokens(f"{arrival.name}: the output of turn {i}", turn.output_tokens)
        _check_time(f"{arrival.name}: the pause before turn {i}", turn.after_ns)
    if arrival.turns[0].after_ns:
        raise ConfigurationError(
            f"{arrival.name}: the first turn comes after {arrival.turns[0].after_ns} ns; only later ones pause"
        )
    if arrival.total_tokens > MOST_TOKENS:
        raise ConfigurationError(
            f"{arrival.name} has {arrival.total_tokens:,} tokens in all turns; at most {MOST_TOKENS:,} are allowed"
        )
    if arrival.tokens is not None and len(arrival.tokens) != arrival.prompt_tokens:
        raise ConfigurationError(
            f"{arrival.name} brings {len(arrival.tokens):,} tokens for a prompt of {arrival.prompt_tokens:,}; they "
            "must be as many"
        )


def _generators(seed: int) -> list[np.random.Generator]:
    """One for times and one for lengths."""
    if seed < 0:
        raise ConfigurationError(f"the seed is {seed}; it must be at least 0")
    return [np.random.Generator(np.random.PCG64(part)) for part in np.random.SeedSequence(seed).spawn(2)]


def _drawn(lengths: Lengths | Mixture, shapes: np.random.Generator, name: str, at_ns: int) -> Arrival:
    uniform = _uniforms(shapes, lengths)
    if isinstance(lengths, Mixture):
        lengths = lengths.at(next(uniform))
    turns = tuple(
        Turn(lengths.prompt.at(next(uniform)), lengths.output.at(next(uniform)), lengths.after_ns if i else 0)
        for i in range(lengths.turns)
    )
    return Arrival(name, at_ns, turns, kind=lengths.kind)


def _uniforms(shapes: np.random.Generator, lengths: Lengths | Mixture) -> Iterator[float]:
    """The numbers of one request: as many for each one, whatever its kind, so that no request depends on another."""
    kinds = [part for _, part in lengths.parts] if isinstance(lengths, Mixture) else [lengths]
    return iter(shapes.random(1 + 2 * max(kind.turns for kind in kinds)).tolist())


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_time(what: str, time_ns: int) -> None:
    if not _is_whole(time_ns) or not 0 <= time_ns <= LATEST_NS:
        raise ConfigurationError(f"{what} is {time_ns!r} ns; it must be a whole number from 0 to {LATEST_NS:,}")


def _check_tokens(what: str, tokens: int) -> None:
    if not _is_whole(tokens) or not 1 <= tokens <= MOST_TOKENS:
        raise ConfigurationError(f"{what} is {tokens!r} tokens; it must be a whole number from 1 to {MOST_TOKENS:,}")


def _check_bounds(what: str, least: int, most: int) -> None:
    _check_tokens(f"the least of {what}", least)
    _check_tokens(f"the most of {what}", most)
    if least > most:
        raise ConfigurationError(f"{what} are from {least:,} to {most:,}; the least must not be above the most")


def _check_count(what: str, count: int) -> None:
    if not _is_whole(count) or not 1 <= count <= MOST_REQUESTS:
        raise ConfigurationError(f"{what} are {count!r}; they must be a whole number from 1 to {MOST_REQUESTS:,}")
