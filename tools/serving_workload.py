"""The requests of `tierloop serve-bench`: drawn from streams that options describe, or read from a recorded trace."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.arrival_trace import read
from tierloop.runtime.arrivals import (
    Arrival,
    Fixed,
    Length,
    Lengths,
    Lognormal,
    Mixture,
    Uniform,
    bursts,
    poisson,
    together,
)

T = TypeVar("T")
_LENGTH = re.compile(r"(?P<first>\d+)(?:-(?P<most>\d+)|~(?P<sigma>\d+(?:\.\d+)?))?", re.ASCII)
_DIGITS = 9
LONGEST_S = 1e9


@dataclass(frozen=True)
class Defaults:
    """What is served where no option says otherwise."""

    requests: int
    short: str
    long: str
    long_share: float
    rate: float = 2.0
    turns: int = 1
    burst_size: int = 1
    long_requests: int = 3


PHANTOM = Defaults(64, "500:50", "96000:200", 0.05)
"""The lengths of short and long requests are those of the benchmark in NELSSA's repository."""
REAL = Defaults(8, "200:16", "800:16", 0.0)
"""What a small model takes seconds for."""


@dataclass(frozen=True)
class Traffic:
    """What options say of the requests; None where one was not given."""

    requests: int | None = None
    rate: float | None = None
    bursts: float | None = None
    burst_size: int | None = None
    short: str | None = None
    long: str | None = None
    long_share: float | None = None
    long_every: float | None = None
    long_requests: int | None = None
    turns: int | None = None
    think: float | None = None
    trace: Path | None = None
    trace_scale: float | None = None
    limit: int | None = None
    sort: bool = False

    def check(self) -> None:
        """Raise ConfigurationError for options that contradict each other."""
        of_traces = ("trace_scale", "limit")
        if self.trace is not None:
            for option in _NAMES:
                if option not in ("trace", *of_traces) and getattr(self, option) is not None:
                    raise ConfigurationError(f"{_shown(option)} and --trace: requests come from one of them")
            return
        for option in of_traces:
            if getattr(self, option) is not None:
                raise ConfigurationError(f"{_shown(option)}: is of a recorded trace, and none is named; give --trace")
        if self.sort:
            raise ConfigurationError("--sort: is of a recorded trace, and none is named; give --trace")
        for option, other in (
            ("rate", "bursts"),
            ("long_share", "long_every"),
        ):
            if getattr(self, option) is not None and getattr(self, other) is not None:
                raise ConfigurationError(f"{_shown(option)} and {_shown(other)}: requests come by one of them")
        for option, needed in (("burst_size", "bursts"), ("long_requests", "long_every")):
            if getattr(self, option) is not None and getattr(self, needed) is None:
                raise ConfigurationError(f"{_shown(option)}: needs {_shown(needed)}")

    def arrivals(self, default: Defaults, seed: int) -> tuple[Arrival, ...]:
        """The requests. Raises ConfigurationError."""
        self.check()
        if self.trace is not None:
            return read(self.trace, limit=self.limit, scale=_or(self.trace_scale, 1.0), sort=self.sort)
        turns, think_ns = _or(self.turns, default.turns), _ns("--think", _or(self.think, 0.0))
        short = lengths("--short", _or(self.short, default.short), "short", turns, think_ns)
        long = lengths("--long", _or(self.long, default.long), "long", turns, think_ns)
        requests = _or(self.requests, default.requests)
        if self.long_every is not None:
            own = bursts(
                long,
                every_ns=_ns("--long-every", self.long_every),
                bursts=_or(self.long_requests, default.long_requests),
                seed=seed + 1,
                name="long",
            )
            return together(self._stream(short, requests, default, seed, "short"), own)
        share = _or(self.long_share, default.long_share)
        if not 0 <= share <= 1:
            raise ConfigurationError(f"--long-share {share}: must be from 0 to 1")
        mixed = Mixture(((1 - share, short), (share, long))) if 0 < share < 1 else long if share else short
        return self._stream(mixed, requests, default, seed, "request")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a manifest, which has no paths: of a trace it names the file alone."""
        return asdict(self) | {"trace": None if self.trace is None else self.trace.name}

    def _stream(
        self, mixed: Lengths | Mixture, requests: int, default: Defaults, seed: int, name: str
    ) -> tuple[Arrival, ...]:
        if self.bursts is None:
            rate = _or(self.rate, default.rate)
            return poisson(mixed, per_s=rate, requests=requests, seed=seed, name=name)
        size = _or(self.burst_size, default.burst_size)
        every_ns = _ns("--bursts", self.bursts)
        count = -(-requests // size)
        return bursts(mixed, every_ns=every_ns, bursts=count, size=size, seed=seed, name=name)[:requests]


_NAMES = tuple(field.name for field in fields(Traffic) if field.name != "sort")


def lengths(option: str, text: str, kind: str, turns: int = 1, after_ns: int = 0) -> Lengths:
    """What `PROMPT:OUTPUT` says: each a number, FROM-TO, or MEDIAN~SIGMA. Raises ConfigurationError."""
    prompt, colon, output = text.partition(":")
    if not colon:
        raise ConfigurationError(f"{option} {text!r}: PROMPT:OUTPUT is needed, 500:50")
    return Lengths(_length(option, prompt), _length(option, output), kind, turns, after_ns)


def described(arrivals: tuple[Arrival, ...]) -> dict[str, int]:
    """What the requests come to, for the report."""
    return {
        "requests": len(arrivals),
        "turns": sum(len(arrival.turns) for arrival in arrivals),
        "prompt_tokens": sum(turn.prompt_tokens for arrival in arrivals for turn in arrival.turns),
        "output_tokens": sum(turn.output_tokens for arrival in arrivals for turn in arrival.turns),
        "longest_tokens": max(arrival.total_tokens for arrival in arrivals),
        "last_arrival_ns": arrivals[-1].at_ns,
    }


def _length(option: str, text: str) -> Length:
    found = _LENGTH.fullmatch(text.strip())
    if found is None or max(len(found["first"]), len(found["most"] or "")) > _DIGITS:
        raise ConfigurationError(
            f"{option}: a length is a number of tokens (500), FROM-TO (200-800) or MEDIAN~SIGMA (500~0.6), not {text!r}"
        )
    first = int(found["first"])
    if found["most"] is not None:
        return Uniform(first, int(found["most"]))
    if found["sigma"] is not None:
        return Lognormal(first, float(found["sigma"]))
    return Fixed(first)


def _ns(option: str, seconds: float) -> int:
    if not 0 <= seconds <= LONGEST_S or math.isnan(seconds):
        raise ConfigurationError(f"{option} {seconds}: must be from 0 to {LONGEST_S:,.0f} seconds")
    return round(seconds * 1e9)


def _or(given: T | None, default: T) -> T:
    return default if given is None else given


def _shown(option: str) -> str:
    return f"--{option.replace('_', '-')}"
