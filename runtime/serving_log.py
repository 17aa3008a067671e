"""The log of a serving run: what the loop writes down while it runs, and the records that come of it.

Times that are logged are those of the platform's clock; records count from the start of the run, scaled back by the
dilation (served.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tierloop.runtime.served import NEVER, UNFINISHED, Sample, Served, ServedTurn


class Log:
    """Records what happens, in times of the platform's clock; `start_ns` is when the run began, `dilation` its σ.

    What must hold, and is asserted: a request arrives before anything else is said of it, its times never fall, and
    nothing is said of it after `ended` or `failed`.
    """

    def __init__(self, start_ns: int = 0, dilation: int = 1) -> None:
        self._start_ns = start_ns
        self._dilation = dilation
        self._records: dict[str, _Record] = {}
        self._samples: list[Sample] = []

    def arrived(self, name: str, at_ns: int, kind: str = "", prompt_tokens: int = 0) -> None:
        """A request's first turn was due at `at_ns`, which may be before now but not after."""
        assert name not in self._records, f"{name} arrives twice"
        self._records[name] = _Record(kind, prompt_tokens, [_Asked(at_ns)], at_ns)

    def turn_asked(self, name: str, at_ns: int) -> None:
        """The request's next turn was due; the one before ended with its last token."""
        record = self._open(name, at_ns)
        assert record.turns[-1].token_ns, f"{name} asks before it has an answer"
        record.turns.append(_Asked(at_ns))

    def token(self, name: str, at_ns: int, token: int | None = None) -> None:
        """A token is there; a run without numbers does not say which."""
        record = self._open(name, at_ns)
        record.turns[-1].token_ns.append(at_ns)
        if token is not None:
            record.tokens.append(token)

    def preempted(self, name: str, recomputed_tokens: int = 0) -> None:
        """The request was put back into the queue; so many tokens of its cache have to be computed anew."""
        record = self._open(name)
        record.preemptions += 1
        record.recomputed_tokens += recomputed_tokens

    def lost(self, name: str) -> None:
        """The request has lost its rows, and is recomputed for that: it is preempted, too."""
        self._open(name).losses += 1

    def migrated(self, name: str) -> None:
        """The request's cache has moved to another device."""
        self._open(name).migrations += 1

    def ended(self, name: str, at_ns: int) -> None:
        """All turns of the request have their answers."""
        record = self._open(name, at_ns)
        assert record.turns[-1].token_ns, f"{name} ends without an answer"
        record.ended_ns = at_ns

    def failed(self, name: str, why: str, at_ns: int | None = None) -> None:
        """The request ends, and its present turn is not complete; without a time, when it was last heard of."""
        assert why, f"{name} fails without a cause"
        record = self._open(name, at_ns)
        record.ended_ns, record.failure = record.last_ns, why

    def sample(self, at_ns: int, running: int, waiting: int, free_nbytes: Mapping[str, int]) -> None:
        """How things stand from now on, until the next sample: in each step, and when there is nothing left to do."""
        at_ns = self._scaled(at_ns)
        assert not self._samples or self._samples[-1].at_ns <= at_ns, "a sample of the past"
        self._samples.append(Sample(at_ns, running, waiting, dict(free_nbytes)))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples, in the order of their times."""
        return tuple(self._samples)

    def served(self) -> tuple[Served, ...]:
        """What happened to each request, in the order in which they were logged; the log may go on afterwards."""
        return tuple(self._served(name, record) for name, record in self._records.items())

    def _open(self, name: str, at_ns: int | None = None) -> _Record:
        record = self._records[name]
        assert record.ended_ns is None, f"{name} has ended"
        if at_ns is not None:
            assert at_ns >= record.last_ns, f"{name}: {at_ns} ns is before {record.last_ns} ns"
            record.last_ns = at_ns
        return record

    def _served(self, name: str, record: _Record) -> Served:
        failure = record.failure or (UNFINISHED if record.ended_ns is None else "")
        *before, last = record.turns
        turns = [self._turn(turn, turn.token_ns[-1], True) for turn in before]
        turns.append(self._turn(last, record.last_ns, not failure))
        return Served(
            name,
            turns[0].asked_ns,
            tuple(turns),
            record.prompt_tokens,
            record.preemptions,
            record.recomputed_tokens,
            record.migrations,
            record.kind,
            failure,
            tuple(record.tokens),
            record.losses,
        )

    def _turn(self, turn: _Asked, ended_ns: int, complete: bool) -> ServedTurn:
        token_ns = -((self._start_ns - np.array(turn.token_ns, dtype=np.int64)) // self._dilation)
        token_ns.flags.writeable = False
        first_ns = int(token_ns[0]) if len(token_ns) else NEVER
        asked_ns, ended_ns = self._scaled(turn.asked_ns), self._scaled(ended_ns)
        return ServedTurn(asked_ns, first_ns, ended_ns, len(token_ns), token_ns, complete)

    def _scaled(self, at_ns: int) -> int:
        return -((self._start_ns - at_ns) // self._dilation)


@dataclass
class _Asked:
    """A turn as it is logged."""

    asked_ns: int
    token_ns: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class _Record:
    """A request as it is logged; `last_ns` is the latest time of all that was said of it."""

    kind: str
    prompt_tokens: int
    turns: list[_Asked]
    last_ns: int
    ended_ns: int | None = None
    failure: str = ""
    tokens: list[int] = field(default_factory=list)
    preemptions: int = 0
    recomputed_tokens: int = 0
    migrations: int = 0
    losses: int = 0
