"""The happens-before checker: its verdict is that of a brute-force oracle, and its messages say what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Traffic, Write
from tierloop.devices.completion import Completion
from tierloop.devices.hazards import HazardChecker, HazardError, meet
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans

REGION_NBYTES = 12


class Watched:
    """Two devices of two queues, regions on both, and a host buffer, with the checker on; commands end at once."""

    def __init__(self) -> None:
        self.checker = HazardChecker()
        self.site = Site(checker=self.checker)
        self.queues = [QueueSet(name, 2, 64, self.site, self._start) for name in ("a", "b")]
        self.regions = [Region("a", "a", 1, REGION_NBYTES), Region("b", "b", 1, REGION_NBYTES)]
        self.host = np.zeros(REGION_NBYTES, dtype=np.uint8)

    def submit(
        self, command: Command, device: int = 0, queue: int = 0, after: tuple[Completion, ...] = ()
    ) -> Completion:
        return self.queues[device].submit(command, queue, after, Traffic(command))

    def at(self, offset: int, nbytes: int, region: int = 0) -> Segment:
        return self.regions[region].at(offset, nbytes)

    def write(self, offset: int, nbytes: int, **where: Any) -> Completion:
        return self.submit(Write(self.at(offset, nbytes), np.zeros(nbytes, dtype=np.uint8)), **where)

    def read(self, offset: int, nbytes: int, **where: Any) -> Completion:
        return self.submit(Read(self.at(offset, nbytes), np.zeros(nbytes, dtype=np.uint8)), **where)

    def _start(self, completion: Completion) -> None:
        self.queues["ab".index(completion.device)].finish(completion)


def test_the_same_queue_orders() -> None:
    watched = Watched()
    watched.write(0, 8)
    watched.read(0, 8)
    watched.write(0, 8)
    assert watched.checker.checked == 3


def test_after_orders_also_over_several_steps_and_devices() -> None:
    watched = Watched()
    a = watched.write(0, 8)
    b = watched.read(8, 4, device=1, after=(a,))
    c = watched.read(8, 4, device=1, queue=1, after=(b,))
    watched.write(0, 8, queue=1, after=(c,))


def test_the_host_orders_by_looking() -> None:
    watched = Watched()
    watched.write(0, 8).result()
    watched.read(0, 8, queue=1)


def test_looking_at_a_command_orders_what_it_came_after() -> None:
    watched = Watched()
    a = watched.write(0, 8)
    watched.read(8, 1, device=1, after=(a,)).result()
    watched.write(0, 8, queue=1)


def test_being_done_is_not_enough() -> None:
    watched = Watched()
    assert watched.write(0, 8).done
    with pytest.raises(HazardError):
        watched.read(0, 8, queue=1)


def test_a_look_orders_only_what_is_submitted_later() -> None:
    watched = Watched()
    early = watched.write(0, 8)
    other = watched.read(8, 2, queue=1)
    early.result()
    watched.read(0, 8, queue=1)
    with pytest.raises(HazardError):
        watched.write(8, 2, device=1, after=(early,))
    other.result()
    watched.write(8, 2, device=1, after=(early,))


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("write", "read", "read-after-write"),
        ("read", "write", "write-after-read"),
        ("write", "write", "write-after-write"),
    ],
)
def test_a_hazard_names_its_kind_its_byte_and_both_commands(first: str, then: str, kind: str) -> None:
    watched = Watched()
    getattr(watched, first)(0, 6)
    with pytest.raises(HazardError) as caught:
        getattr(watched, then)(4, 4, device=1, queue=1)
    assert str(caught.value) == (
        f"{kind} hazard at byte 4 of ('a', 1): {then} on b queue 1 is not ordered after {first} on a queue 0; "
        "name its completion in `after`, or wait for it first"
    )


def test_two_readers_are_no_hazard() -> None:
    watched = Watched()
    watched.read(0, 8)
    watched.read(0, 8, queue=1)
    watched.read(0, 8, device=1)


def test_regions_of_the_same_number_on_two_memories_are_different() -> None:
    watched = Watched()
    watched.write(0, 8)
    watched.submit(Write(watched.at(0, 8, region=1), np.zeros(8, dtype=np.uint8)), device=1)


def test_host_buffers_are_watched_too() -> None:
    watched = Watched()
    watched.submit(Read(watched.at(0, 8), watched.host[:8]))
    watched.submit(Write(watched.at(8, 2), watched.host[8:10]), queue=1)
    with pytest.raises(HazardError, match=r"read-after-write hazard at byte \d+ of host buffers"):
        watched.submit(Write(watched.at(8, 2, region=1), watched.host[7:9]), device=1)


def test_a_buffer_that_lies_where_a_forgotten_one_lay_is_no_hazard() -> None:
    watched = Watched()
    for queue in (0, 1):
        for device in (0, 1):
            assert watched.read(0, 8, device=device, queue=queue).done


def test_a_flush_must_come_after_the_writes_that_it_is_meant_for() -> None:
    watched = Watched()
    a = watched.write(0, 8)
    with pytest.raises(HazardError, match="flush on a queue 1"):
        watched.submit(Flush(watched.at(4, 1)), queue=1)
    watched.submit(Flush(watched.at(4, 1)), queue=1, after=(a,))
    watched.read(0, 8, device=1, after=(a,))


def test_operands_of_a_launch_are_watched() -> None:
    watched = Watched()
    a = watched.write(0, 4)
    launch = Launch(Gather(), ((watched.at(0, 4),),), ((watched.at(8, 4),),))
    with pytest.raises(HazardError, match="gather on b queue 0 is not ordered after write"):
        watched.submit(launch, device=1)
    watched.submit(launch, device=1, after=(a,))
    with pytest.raises(HazardError, match="read-after-write hazard at byte 8"):
        watched.read(8, 1, queue=1)


def test_empty_spans_touch_nothing() -> None:
    watched = Watched()
    watched.write(0, 12)
    watched.read(6, 0, queue=1)
    watched.submit(Write(Segment(watched.regions[0], Spans([])), watched.host[:0]), queue=1)
    watched.submit(Copy(watched.at(3, 0), watched.at(5, 0)), device=1)


def test_empty_spans_meet_nothing() -> None:
    some, nothing = Spans([(0, 8)]), Spans([(4, 0), (5, 0)])
    assert meet(some, Spans([(100, 4), (4, 2)]))
    assert not meet(some, nothing)
    assert not meet(nothing, some)


def test_a_command_that_was_refused_leaves_no_trace() -> None:
    watched = Watched()
    a = watched.write(0, 4)
    with pytest.raises(HazardError):
        watched.write(0, 12, queue=1)
    watched.read(4, 8, device=1)
    watched.write(0, 4, queue=1, after=(a,))


def test_what_the_host_has_seen_is_forgotten() -> None:
    watched = Watched()
    for i in range(200):
        watched.write(0, 8, queue=i % 2).result()
    assert sum(len(held) for held in watched.checker._accesses.values()) <= 4


def test_no_checker_means_no_hazards() -> None:
    watched = Watched()
    watched.site.checker = None
    watched.write(0, 8)
    assert watched.read(0, 8, queue=1).order is None


SPANS = st.lists(st.tuples(st.integers(0, REGION_NBYTES - 1), st.integers(0, 3)), max_size=4).map(
    lambda pairs: Spans([(o, min(n, REGION_NBYTES - o)) for o, n in pairs])
)


@st.composite
def steps(draw: st.DrawFn, index: int) -> tuple[Any, ...]:
    """('look', which) or (verb, device, queue, region, spans, second region, second spans, buffer start, after)."""
    if index and draw(st.integers(0, 4)) == 0:
        return ("look", draw(st.integers(0, index - 1)))
    verb = draw(st.sampled_from(["read", "write", "copy", "flush"]))
    after = draw(st.lists(st.integers(0, index - 1), max_size=2)) if index else []
    where = (draw(st.integers(0, 1)), draw(st.integers(0, 1)))
    return (verb, *where, draw(st.integers(0, 1)), draw(SPANS), draw(st.integers(0, 1)), draw(SPANS), after)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    program: list[tuple[Any, ...]] = []
    submitted = 0
    for _ in range(draw(st.integers(2, 10))):
        step = draw(steps(submitted))
        submitted += step[0] != "look"
        program.append(step)
    return program


Touched = set[tuple[object, int]]


def bytes_of(place: object, spans: Spans) -> Touched:
    return {(place, byte) for offset, nbytes in spans.array.tolist() for byte in range(offset, offset + nbytes)}


def first_hazard(program: list[tuple[Any, ...]], buffers: list[tuple[int, int]]) -> int | None:
    """The index among the submits of the first that conflicts with an earlier one it is not ordered after."""
    before: list[set[int]] = []
    lanes: list[tuple[int, int]] = []
    touched: list[tuple[Touched, Touched]] = []
    host: set[int] = set()
    for step in program:
        if step[0] == "look":
            host |= before[step[1]] | {step[1]}
            continue
        verb, device, queue, region, spans, region2, spans2, after = step
        me = len(before)
        known = set(host)
        for i in [*after, *(i for i in range(me) if lanes[i] == (device, queue))]:
            known |= before[i] | {i}
        start, nbytes = buffers[me]
        buffer = bytes_of("host", Spans.one(start, nbytes))
        here, there = bytes_of(region, spans), bytes_of(region2, spans2)
        sides: dict[str, tuple[Touched, Touched]] = {
            "read": (here, buffer),
            "write": (buffer, here),
            "copy": (here, there),
            "flush": (here, set()),
        }
        reads, writes = sides[verb]
        for i in range(me):
            if i not in known and (writes & (touched[i][0] | touched[i][1]) or reads & touched[i][1]):
                return me
        before.append(known)
        lanes.append((device, queue))
        touched.append((reads, writes))
    return None


@given(programs(), st.lists(st.integers(0, 60), min_size=10, max_size=10))
def test_the_verdict_is_that_of_brute_force(program: list[tuple[Any, ...]], starts: list[int]) -> None:
    watched = Watched()
    host: NDArray[np.uint8] = np.zeros(200, dtype=np.uint8)
    made: list[Completion] = []
    got: int | None = None
    sizes = [step[4].nbytes for step in program if step[0] != "look"]
    buffers = list(zip(starts, sizes, strict=False))
    expected = first_hazard(program, buffers)
    for step in program:
        if step[0] == "look":
            made[step[1]].result()
            continue
        verb, device, queue, region, spans, region2, spans2, after = step
        start, nbytes = buffers[len(made)]
        source, buffer = Segment(watched.regions[region], spans), host[start : start + nbytes]
        commands: dict[str, Command] = {
            "read": Read(source, buffer),
            "write": Write(source, buffer),
            "copy": Copy(source, Segment(watched.regions[region2], spans2)),
            "flush": Flush(source),
        }
        try:
            made.append(watched.submit(commands[verb], device, queue, tuple(made[i] for i in after)))
        except HazardError:
            got = len(made)
            break
    assert got == expected
