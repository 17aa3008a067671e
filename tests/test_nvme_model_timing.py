"""The NVMe controller model in time: which command goes first, what the medium did, and latency against load."""

from __future__ import annotations

import numpy as np
import pytest

from tests.nvme_bus import DATA, FLUSH, READ, WRITE, Bus, io_entry, ready
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import WHOLE, MediaWork, Ranges
from tierloop.firmware_models.nvme_engine import MediaOperation
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin
from tierloop.firmware_models.passthrough import Passthrough

SERIAL = NvmeFigures(window=1, command_ns=0, admin_ns=0, flush_ns=0)
"""One command at a time: the order of the ends is the order of fetching."""
WEIGHTED = 1 << 11


class Dies(Passthrough):
    """A medium of `dies` equal parts, one of which serves a command for `ns`."""

    def __init__(self, dies: int, ns: int) -> None:
        super().__init__(1, 1)
        self._work = MediaWork(ns, WHOLE // dies, 0)

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        return self._work


def order(bus: Bus, counts: dict[int, int]) -> list[int]:
    """Fill queues with reads while the controller is busy; the queues in the order in which it served them."""
    bus.controller.hold()
    blocker = bus.start(io_entry(READ), 1)
    for qid, count in counts.items():
        for _ in range(count):
            bus.push(io_entry(READ, qid), qid)
        bus.ring(qid)
    bus.controller.release()
    bus.controller.history.clear()
    bus.settle()
    assert blocker
    return [operation.lba for operation in bus.controller.history if operation.lba]


def with_queues(priorities: dict[int, int], cc: int, arbitration: int) -> Bus:
    bus = Bus(SERIAL).enable(cc)
    for qid, priority in priorities.items():
        bus.with_queue(qid, priority=priority)
    assert bus.admin(Admin.SET_FEATURES, cdw=[Feature.ARBITRATION, arbitration]).status == 0
    return bus


@pytest.mark.parametrize(
    ("burst", "served"),
    [(0, [2, 3, 2, 3, 2, 3, 2, 2]), (1, [2, 2, 3, 3, 2, 2, 3, 2]), (7, [2, 2, 2, 2, 2, 3, 3, 3])],
)
def test_round_robin_takes_a_burst_of_each_queue(burst: int, served: list[int]) -> None:
    bus = with_queues({1: 0, 2: 0, 3: 0}, 0, burst)
    assert order(bus, {2: 5, 3: 3}) == served


def test_urgent_queues_go_first_and_the_others_by_weight() -> None:
    urgent, high, medium, low = range(4)
    bus = with_queues({1: urgent, 2: low, 3: medium, 4: high, 5: urgent}, WEIGHTED, 2 << 24 | 1 << 16)
    assert order(bus, {2: 4, 3: 4, 4: 6, 5: 2}) == [5, 5, 4, 4, 4, 3, 3, 2, 4, 4, 4, 3, 3, 2, 2, 2]


def test_admin_commands_go_before_urgent_ones() -> None:
    bus = with_queues({1: 0, 2: 0}, WEIGHTED, 0)
    bus.controller.hold()
    bus.start(io_entry(READ), 1)
    bus.settle()
    for _ in range(3):
        bus.push(io_entry(READ), 2)
    bus.ring(2)
    bus.start(io_entry(Admin.IDENTIFY)._replace(nsid=0, cdw=(1, 0, 0, 0, 0, 0)))
    bus.controller.hold()
    bus.controller.release()
    due = bus.controller.next_due_ns
    assert due == bus.controller.now_ns
    bus.controller.advance(due)
    assert len(bus.reap(0)) == 1
    assert len(bus.reap(2)) == 0


def test_the_history_says_what_the_medium_did_and_when() -> None:
    bus = ready(NvmeFigures(command_ns=10, admin_ns=0, flush_ns=70))
    start = bus.controller.now_ns
    bus.io(WRITE, 4, 2)
    bus.io(READ, 4, 1)
    bus.io(FLUSH)
    assert list(bus.controller.history) == [
        MediaOperation("write", 1, 4, 2, start + 10, start + 10 + 1024),
        MediaOperation("read", 1, 4, 1, start + 1044, start + 1044 + 512),
        MediaOperation("flush", 0, 0, 0, start + 1556 + 10, start + 1556 + 80),
    ]


def test_a_refused_command_leaves_the_medium_alone() -> None:
    bus = ready()
    bus.io(READ, 1 << 40)
    bus.io(READ, flags=1)
    assert list(bus.controller.history) == []


def latencies(bus: Bus, depth: int) -> list[int]:
    """Submit so many reads at once; when each came back."""
    for i in range(depth):
        bus.push(io_entry(READ, i, prp1=DATA + 4096 * i), 1)
    start = bus.controller.now_ns
    bus.ring(1)
    ends = []
    while (due := bus.controller.next_due_ns) is not None:
        bus.controller.advance(due)
        ends += [due - start] * len(bus.reap(1))
    return ends


@pytest.mark.parametrize("depth", [1, 4, 8, 9, 32])
def test_latency_is_flat_up_to_the_dies_and_grows_with_what_waits_behind_them(depth: int) -> None:
    bus = ready(NvmeFigures(command_ns=100, admin_ns=0), media=Dies(8, 1000))
    assert latencies(bus, depth) == [100 + 1000 * (i // 8 + 1) for i in range(depth)]


def test_throughput_never_exceeds_the_medium() -> None:
    bus = ready()
    assert max(latencies(bus, 60)) == 60 * 512


def test_a_window_of_commands_keeps_the_rest_in_their_queue() -> None:
    bus = ready(NvmeFigures(command_ns=0, admin_ns=0, window=2), media=Dies(8, 1000))
    assert latencies(bus, 6) == [1000, 1000, 2000, 2000, 3000, 3000]


def test_commands_of_two_namespaces_do_not_wait_for_each_other() -> None:
    bus = ready(namespaces=2)
    bus.push(io_entry(READ), 1)
    bus.push(io_entry(READ, nsid=2), 1)
    start = bus.controller.now_ns
    bus.ring(1)
    bus.controller.advance(start + 512)
    assert len(bus.reap(1)) == 2


def test_on_flash_a_read_takes_what_its_dies_and_its_bus_take() -> None:
    geometry = FlashGeometry(
        capacity=1 << 20,
        unit_nbytes=4096,
        page_nbytes=16384,
        planes=1,
        channels=2,
        dies_per_channel=2,
        stripes_per_block=16,
        read_ns=50_000,
        program_ns=500_000,
        erase_ns=3_000_000,
        channel_bytes_per_s=1_000_000_000,
        spare_percent=25,
    )
    figures = NvmeFigures(command_ns=1000, admin_ns=0)
    bus = ready(figures, media=FlashModel(geometry), unit_nbytes=4096)
    expected = FlashModel(geometry)
    for lba, blocks in ((0, 8), (3, 1), (7, 2)):
        start = bus.controller.now_ns
        first, end = lba // 8 * 4096, -(-(lba + blocks) // 8) * 4096
        work = expected.access(np.array([[first, end - first]]), np.empty((0, 2), dtype=np.int64))
        assert bus.io(READ, lba, blocks, DATA, DATA + 4096).status == 0
        assert bus.controller.now_ns - start == 1000 + work.alone_ns
