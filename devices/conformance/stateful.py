"""A stateful machine: any sequence of commands on a device against a dict of bytes.

Hypothesis draws what is allocated, freed, written, read, copied and flushed, on which queues, how far time passes in
between, and when the host waits. Commands are ordered by `after` as little as they have to be: a reader comes after the
last writer of its region, a writer after everything that used it. The dict is what a device without queues would hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule, run_state_machine_as_test

from tierloop.devices.commands import Copy, Flush, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.subject import Bytes, Lane, Opener, Subject, copies, expect, refused
from tierloop.devices.errors import OutOfRange
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

UNITS = 16
"""Regions are 1 to 16 units; a unit is the memory's grid, or 8 bytes where it has none."""
_HELD = 12
PIECES = st.lists(st.tuples(st.integers(0, UNITS * 8), st.integers(0, UNITS * 4)), max_size=6)
QUEUES = st.integers(0, 7)
SEEDS = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Held:
    """A region, the bytes that it should hold, and who used it last."""

    region: Region
    content: Bytes
    written: list[Completion] = field(default_factory=list)
    used: list[Completion] = field(default_factory=list)


def machine(opener: Opener, virtual: bool, device: str | None) -> type[RuleBasedStateMachine]:
    """The machine's class for one device."""

    class DeviceMachine(RuleBasedStateMachine):
        regions: Bundle[Any] = Bundle("regions")

        def __init__(self) -> None:
            super().__init__()
            self.subject = Subject(opener, virtual, device)
            self.memory = self.subject.memory()
            self.unit = self.memory.alignment if self.memory.alignment > 1 else 8
            self.lanes = self.subject.lanes(self.memory.name, "read", "write")
            self.held: list[Held] = []
            self.reads: list[tuple[Completion, Bytes, Bytes]] = []

        def lane(self, number: int) -> Lane:
            return self.lanes[number % len(self.lanes)]

        def spans(self, held: Held, pieces: list[tuple[int, int]]) -> Spans:
            """Spans within a region from drawn numbers; on the grid where there is one, else cut anywhere."""
            grid = self.memory.alignment
            units = held.region.nbytes // grid
            made = []
            for start, length in pieces:
                first = start % (units + 1)
                made.append((first * grid, min(length, units - first) * grid))
            return Spans(made)

        @rule(target=regions, units=st.integers(1, UNITS))
        def alloc(self, units: int) -> Held:
            if len(self.held) >= _HELD:
                self.free(self.held[0])
            region = self.subject.alloc(units * self.unit, self.memory)
            made = Held(region, np.zeros(region.nbytes, dtype=np.uint8))
            self.held.append(made)
            return made

        @rule(held=consumes(regions))
        def free(self, held: Held) -> None:
            if held.region.freed:
                with refused("freeing a region twice", OutOfRange):
                    self.subject.platform.free(held.region)
                return
            self.subject.wait(*held.used, *held.written)
            self.subject.platform.free(held.region)
            self.held.remove(held)

        @rule(held=regions, pieces=PIECES, queue=QUEUES, seed=SEEDS)
        def write(self, held: Held, pieces: list[tuple[int, int]], queue: int, seed: int) -> None:
            if held.region.freed:
                return
            spans = _disjoint(self.spans(held, pieces))
            data = np.random.default_rng(seed).integers(0, 256, spans.nbytes, dtype=np.uint8)
            lane = self.lane(queue)
            made = lane.submit(Write(Segment(held.region, spans), data), after=[*held.written, *held.used])
            held.written, held.used = [made], []
            _put(held.content, spans, data)

        @rule(held=regions, pieces=PIECES, queue=QUEUES)
        def read(self, held: Held, pieces: list[tuple[int, int]], queue: int) -> None:
            if held.region.freed:
                return
            spans = self.spans(held, pieces)
            into = np.full(spans.nbytes, 0xA5, dtype=np.uint8)
            made = self.lane(queue).submit(Read(Segment(held.region, spans), into), after=held.written)
            held.used.append(made)
            self.reads.append((made, into, _cut(held.content, spans)))

        @rule(source=regions, sink=regions, start=st.integers(0, UNITS), to=st.integers(0, UNITS), queue=QUEUES)
        def copy(self, source: Held, sink: Held, start: int, to: int, queue: int) -> None:
            lanes = copies(self.subject, self.memory.name, self.memory.name)
            if not lanes or source is sink or source.region.freed or sink.region.freed:
                return
            a, b = start % (source.region.nbytes // self.unit), to % (sink.region.nbytes // self.unit)
            nbytes = min(source.region.nbytes - a * self.unit, sink.region.nbytes - b * self.unit)
            command = Copy(source.region.at(a * self.unit, nbytes), sink.region.at(b * self.unit, nbytes))
            made = lanes[queue % len(lanes)].submit(command, after=[*source.written, *sink.written, *sink.used])
            source.used.append(made)
            sink.written, sink.used = [made], []
            _put(sink.content, command.target.spans, _cut(source.content, command.source.spans))

        @rule(held=regions, queue=QUEUES)
        def flush(self, held: Held, queue: int) -> None:
            lanes = self.subject.lanes(self.memory.name, "flush")
            if lanes and not held.region.freed:
                held.used.append(lanes[queue % len(lanes)].submit(Flush(held.region.all()), after=held.written))

        @rule(ns=st.integers(0, 20_000))
        def let_time_pass(self, ns: int) -> None:
            self.subject.pass_time(ns)
            self.look()

        @rule()
        def wait(self) -> None:
            self.subject.wait(*(c for held in self.held for c in (*held.written, *held.used)))
            self.look()

        @rule(held=regions)
        def a_mistake(self, held: Held) -> None:
            if not held.region.freed:
                beyond = held.region.at(held.region.nbytes, self.memory.alignment)
                with refused("reading beyond a region", OutOfRange):
                    self.lane(0).submit(Read(beyond, np.empty(self.memory.alignment, dtype=np.uint8)))

        def look(self) -> None:
            """Every read that has ended has the bytes that were there for it."""
            open_reads = []
            for made, into, want in self.reads:
                if not made.done:
                    open_reads.append((made, into, want))
                    continue
                made.result()
                wrong = np.flatnonzero(into != want)
                if wrong.size:
                    expect(False, f"{made}: {wrong.size} of {want.size} bytes are not what was written last")
            self.reads = open_reads

        def teardown(self) -> None:
            try:
                self.wait()
                for held in self.held:
                    now = self.subject.read(held.region.all(), self.lanes[0])
                    expect(np.array_equal(now, held.content), f"{held.region} does not hold what was written to it")
            finally:
                self.subject.close()

    return DeviceMachine


def check_any_sequence(opener: Opener, virtual: bool, device: str | None, examples: int, shrink: bool) -> None:
    """Run the machine; raises Failure for the first sequence that goes wrong, or the shortest if `shrink`."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.normal,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine(opener, virtual, device), settings=chosen)


def _cut(content: Bytes, spans: Spans) -> Bytes:
    pieces = [content[o : o + n] for o, n in spans.array.tolist()]
    return np.concatenate([*pieces, np.empty(0, dtype=np.uint8)])


def _put(content: Bytes, spans: Spans, data: Bytes) -> None:
    at = 0
    for offset, nbytes in spans.array.tolist():
        content[offset : offset + nbytes] = data[at : at + nbytes]
        at += nbytes


def _disjoint(spans: Spans) -> Spans:
    """The spans that do not overlap an earlier one: which of two overlapping spans of a write wins is not settled."""
    taken: list[tuple[int, int]] = []
    for offset, nbytes in spans.array.tolist():
        if all(offset + nbytes <= o or o + n <= offset for o, n in taken):
            taken.append((offset, nbytes))
    return Spans(taken)
