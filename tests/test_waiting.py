"""Waiting: always with a deadline, and every error among what was waited for is seen."""

from __future__ import annotations

import numpy as np
import pytest

from tierloop.devices.commands import Read, Traffic, Write
from tierloop.devices.conformance.example import Example
from tierloop.devices.errors import Cancelled, MediaError, OutOfRange, Timeout
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import DEADLINE_NS, read_bytes, wait, write_bytes


def opened() -> tuple[Site, Example, Region]:
    site = Site(checker=HazardChecker())
    device = Example(site, delay_ns=100)
    return site, device, device.alloc(64)


def a_read(region: Region, nbytes: int = 10) -> Read:
    return Read(region.at(0, nbytes), np.zeros(nbytes, dtype=np.uint8))


def test_a_wait_ends_when_the_last_command_has_ended() -> None:
    site, device, region = opened()
    made = [device.submit(a_read(region), queue) for queue in (0, 1, 0)]
    wait(site.clock, made)
    assert site.clock.now() == 220
    assert [c.ended_ns for c in made] == [110, 110, 220]


def test_one_completion_and_any_iterable_can_be_waited_for() -> None:
    site, device, region = opened()
    wait(site.clock, device.submit(a_read(region)))
    wait(site.clock, (device.submit(a_read(region)) for _ in range(2)))
    assert site.clock.now() == 330


def test_waiting_for_nothing_takes_no_time() -> None:
    site, _, _ = opened()
    wait(site.clock, [])
    wait(site.clock, [], deadline_ns=-1)
    assert site.clock.now() == 0


def test_a_deadline_that_passes_names_what_is_open() -> None:
    site, device, region = opened()
    made = [device.submit(a_read(region)) for _ in range(3)]
    with pytest.raises(Timeout) as caught:
        wait(site.clock, made, deadline_ns=150)
    assert str(caught.value) == (
        "emu:example: wait: 2 of 3 commands open at 150 ns: <Read on emu:example queue 0: running>"
    )
    assert site.clock.now() == 150
    wait(site.clock, made)


def test_a_deadline_that_has_passed_is_no_matter_when_all_is_done() -> None:
    site, device, region = opened()
    completion = device.submit(a_read(region))
    site.clock.wait_until(500)
    wait(site.clock, completion, deadline_ns=10)


def test_a_wait_without_a_deadline_has_one() -> None:
    site = Site()
    queues = QueueSet("dead", 1, 8, site, lambda _: None)
    region = Region("dead", "dead", 1, 8)
    command = a_read(region, 8)
    with pytest.raises(Timeout, match="dead"):
        wait(site.clock, queues.submit(command, 0, (), Traffic(command)))
    assert site.clock.now() == DEADLINE_NS


def failing(site: Site) -> tuple[QueueSet, Region]:
    def start(completion: object) -> None:
        raise MediaError("bad", "read", "the medium is worn out")

    return QueueSet("bad", 2, 8, site, start), Region("bad", "bad", 1, 64)


def test_the_first_error_is_raised_and_all_count_as_seen() -> None:
    site, device, region = opened()
    queues, elsewhere = failing(site)
    command = a_read(elsewhere)
    first = queues.submit(command, 0, (), Traffic(command))
    second = queues.submit(a_read(elsewhere), 1, (), Traffic(command))
    follower = device.submit(a_read(region), after=(second,))
    fine = device.submit(Write(region.at(0, 10), np.ones(10, dtype=np.uint8)))
    with pytest.raises(MediaError) as caught:
        wait(site.clock, [first, second, follower, fine])
    assert caught.value is first.error
    assert isinstance(follower.error, Cancelled)
    device.submit(a_read(region), queue=1)
    queues.close()
    device.close()


def test_bytes_written_are_read_back() -> None:
    site, device, region = opened()
    write_bytes(site.clock, device, region.at(3, 5), b"hello")
    assert read_bytes(site.clock, device, region.at(2, 7)).tobytes() == b"\0hello\0"
    write_bytes(site.clock, device, Segment(region, Spans([(40, 2), (30, 1)])), np.array([7, 8, 9], dtype=np.uint8), 1)
    assert read_bytes(site.clock, device, Segment(region, Spans([(30, 1), (40, 2)])), 1).tolist() == [9, 7, 8]


def test_no_bytes_are_written_and_read_back() -> None:
    site, device, region = opened()
    write_bytes(site.clock, device, region.at(64, 0), b"")
    assert read_bytes(site.clock, device, Segment(region, Spans([]))).size == 0


def test_bytes_that_do_not_fit_are_refused() -> None:
    site, device, region = opened()
    with pytest.raises(OutOfRange):
        write_bytes(site.clock, device, region.at(0, 5), b"four")
    with pytest.raises(OutOfRange):
        read_bytes(site.clock, device, region.at(60, 5))


def test_after_is_passed_on() -> None:
    site, device, region = opened()
    slow = device.submit(Write(region.at(0, 50), np.ones(50, dtype=np.uint8)))
    assert read_bytes(site.clock, device, region.at(49, 1), 1, after=(slow,)).tolist() == [1]
    assert site.clock.now() == 150 + 101
