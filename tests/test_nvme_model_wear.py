"""An NVMe drive whose medium is flash: its health log, its warnings and its timing are those of the flash."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.nvme_bus import DATA, READ, WRITE, Bus, code, io_entry, ready
from tests.nvme_rig import on_drive
from tests.seeded import bytes_of
from tests.test_flash import SMALL, UNIT
from tests.test_flash_legality import WORN
from tierloop.devices.errors import MediaError, Unsupported
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.flash import FlashGeometry, FlashModel
from tierloop.firmware_models.media import NOTHING, Ranges
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_health import READ_ONLY, SPARE, SPARE_LOW
from tierloop.firmware_models.nvme_health import WORN as WORN_EVENT
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Entry, Io, Status

QUICK = NvmeFigures(command_ns=0, admin_ns=0, flush_ns=0)


def drive(geometry: FlashGeometry, figures: NvmeFigures = QUICK) -> tuple[Bus, FlashModel]:
    model = FlashModel(geometry)
    return ready(figures, media=model, capacity=geometry.capacity, lba_nbytes=4096, unit_nbytes=4096), model


def worn(bus: Bus, model: FlashModel) -> None:
    """Write blocks in random order until the medium is read-only."""
    order = np.random.default_rng(2)
    for lba in range(model.geometry.units):
        assert bus.io(WRITE, lba).status == 0
    while not model.read_only:
        assert bus.io(WRITE, int(order.integers(model.geometry.units))).status == 0


def test_the_health_log_has_the_wear_and_the_spare_of_the_flash() -> None:
    bus, model = drive(WORN)
    order = np.random.default_rng(2)
    for _ in range(4_000):
        bus.io(WRITE, int(order.integers(model.geometry.units)))
    health, log = model.health, bus.log(2)
    assert health.percentage_used > 0
    assert (log[3], log[5]) == (health.spare_percent, health.percentage_used)


def test_what_a_back_door_says_counts_where_it_is_worse_than_the_flash() -> None:
    bus, model = drive(WORN)
    bus.controller.age(40, spare_percent=60)
    assert (bus.log(2)[3], bus.log(2)[5]) == (60, 40)
    model.wear(WORN.rated_cycles)
    assert bus.log(2)[5] == 100


def test_a_worn_out_drive_says_so_refuses_whatever_changes_it_and_can_be_read() -> None:
    bus, model = drive(WORN)
    worn(bus, model)
    assert bus.log(2)[0] == READ_ONLY | SPARE
    written = model.health.host_written
    ranges = DATA + 0x8000
    bus.put(bytes(4) + (1).to_bytes(4, "little") + bytes(8), ranges)
    answers = [
        bus.io(WRITE, 3),
        bus.io(Io.WRITE_ZEROES, 3),
        bus.io(Io.WRITE_UNCORRECTABLE, 3),
        bus.run(Entry(Io.DATASET_MANAGEMENT, nsid=1, data=ranges.to_bytes(16, "little"), cdw=(0, 4, 0, 0, 0, 0)), 1),
    ]
    assert [code(answer.status) for answer in answers] == [Status.WRITE_FAULT] * 4
    assert model.health.host_written == written
    assert all(bus.io(READ, lba).status == 0 for lba in range(model.geometry.units))


def test_the_write_that_takes_the_last_spare_block_is_reported_without_being_asked_for() -> None:
    bus, model = drive(WORN)
    assert bus.admin(Admin.SET_FEATURES, cdw=[Feature.ASYNC_EVENTS, READ_ONLY | SPARE]).status == 0
    bus.start(Entry(Admin.ASYNC_EVENT))
    worn(bus, model)
    (first,) = bus.reap(0)
    assert first.result == SPARE_LOW.word
    bus.log(2)
    bus.pairs[0].answers.clear()
    bus.start(Entry(Admin.ASYNC_EVENT))
    bus.settle()
    assert [answer.result for answer in bus.reap(0)] == [WORN_EVENT.word]


def test_the_driver_reads_a_worn_out_namespace_and_writes_to_the_one_beside_it() -> None:
    media: list[FlashModel] = []

    def flash(capacity: int) -> FlashModel:
        media.append(FlashModel(replace(WORN, capacity=capacity)))
        return media[-1]

    machine = nvme_machine(WORN.capacity, 4096, media=flash, unit_nbytes=UNIT, namespaces=2)
    rig = on_drive(machine, io="ioctl")
    region = rig.open().alloc(WORN.capacity)
    order, data = np.random.default_rng(2), bytes_of(1, UNIT)
    while not media[0].read_only:
        rig.write(region.at(int(order.integers(96)) * UNIT, UNIT), data)
    with pytest.raises(MediaError, match="Write Fault"):
        rig.write(region.at(0, UNIT), data)
    rig.close()
    rig.open()
    with pytest.raises(Unsupported, match="write protected"):
        rig.device.alloc(UNIT)
    kept = rig.read(rig.device.adopt(0, WORN.capacity).all()).reshape(-1, UNIT)
    assert all(np.array_equal(block, data) for block in kept if block.any())
    rig.close()
    rig.path = "/dev/ng0n2"
    other = rig.open().alloc(UNIT)
    rig.write(other.all(), data)
    assert np.array_equal(rig.read(other.all()), data)
    rig.close()


def test_blocks_smaller_than_a_unit_of_the_flash_are_written_in_whole_units() -> None:
    model = FlashModel(SMALL)
    bus = ready(QUICK, media=model, capacity=SMALL.capacity)
    assert [bus.io(WRITE, lba).status for lba in (0, 1, 8)] == [0, 0, 0]
    assert model.health.host_written == 3 * UNIT
    with pytest.raises(ValueError, match="units of 512 bytes; those of the medium have 4096"):
        Bus(media=model, capacity=SMALL.capacity, unit_nbytes=512)


TIMED = replace(SMALL, suspends=1, suspend_ns=1_000)
BUFFERED = replace(SMALL, buffer_nbytes=4 * SMALL.page_nbytes * SMALL.planes)


def ends(bus: Bus, entries: list[Entry]) -> list[int]:
    """Submit at once; when each came back, in the order of their ends."""
    for entry in entries:
        bus.push(entry, 1)
    start = bus.controller.now_ns
    bus.ring(1)
    made: list[int] = []
    while (due := bus.controller.next_due_ns) is not None:
        bus.controller.advance(due)
        made += [due - start] * len(bus.reap(1))
    return made


def test_reads_that_meet_on_a_die_of_timed_flash_wait_for_each_other() -> None:
    bus, _ = drive(TIMED)
    alone = ends(bus, [io_entry(READ, 0)])
    together = ends(bus, [io_entry(READ, 0, prp1=DATA + 4096 * i) for i in range(16)])
    assert together[-1] - alone[0] == 15 * TIMED.read_ns


def test_a_write_buffer_takes_in_what_it_holds_and_then_what_the_dies_program() -> None:
    bus, _ = drive(BUFFERED)
    stripe = BUFFERED.page_nbytes * BUFFERED.planes // UNIT
    made = ends(bus, [io_entry(WRITE, i) for i in range(12 * stripe)])
    flash = FlashModel(BUFFERED)
    expected = []
    for i in range(12 * stripe):
        flash.advance(0)
        expected.append(flash.access(NOTHING, one(i)).alone_ns)
    assert made == sorted(expected)


def one(unit: int) -> Ranges:
    return np.array([[unit * UNIT, UNIT]], dtype=np.int64)
