"""The nvme driver on the generic character device of a modelled drive: NVMe passthrough, through a ring and ioctl."""

from __future__ import annotations

import numpy as np
import pytest

from tests.nvme_namespace_rig import WAYS, both_ways, buffer, operations
from tests.nvme_rig import MIB, Rig, filled, host_memory, on_drive, works
from tests.seeded import bytes_of
from tierloop.devices.commands import Copy, Read
from tierloop.devices.drivers.nvme_commands import DATASET, WRITE_ZEROES
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.nvme_identify import NvmeFigures

KIB = 1024
rig = both_ways
region = filled


# Bytes


def test_bytes_come_back_as_written_and_lie_on_the_drive(rig: Rig, region: Region) -> None:
    first = rig.device.offset_of(region) // 512
    assert np.array_equal(rig.read(region.all()), bytes_of(1, 1 * MIB))
    with rig.machine.guard:
        assert rig.machine.controller.peek(1, first, 2048) == bytes_of(1, 1 * MIB).tobytes()


def test_transfers_are_no_larger_than_the_drive_takes(rig: Rig, region: Region) -> None:
    before = len(operations(rig, "read"))
    rig.read(region.all())
    first = rig.device.offset_of(region) // 512
    assert sorted(operations(rig, "read")[before:]) == [(first + 256 * i, 256) for i in range(8)]
    assert rig.device.info.notes["largest_transfer"] == str(128 * KIB)


@pytest.mark.parametrize("figures", [NvmeFigures(mdts=0), NvmeFigures(mdts=1), NvmeFigures(mdts=16)])
@pytest.mark.parametrize("way", WAYS)
def test_a_drive_of_any_transfer_size_is_served(way: str, figures: NvmeFigures) -> None:
    rig = on_drive(nvme_machine(figures=figures), io=way)
    region = rig.device.alloc(1 * MIB)
    assert works(rig, region)
    largest = max(blocks for _, blocks in operations(rig, "write"))
    assert largest == min(figures.largest_transfer or 256 * KIB, 256 * KIB) // 512
    rig.close()


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_4096_bytes_are_the_grid(way: str) -> None:
    rig = on_drive(nvme_machine(lba_nbytes=4096), io=way)
    region = rig.device.alloc(64 * KIB)
    assert rig.device.info.memories[0].alignment == 4096
    assert works(rig, region)
    rig.close()


@pytest.mark.parametrize(("skew", "bounced"), [(0, 0), (4, 0), (512, 0), (1, 1 * MIB), (2, 1 * MIB)])
def test_host_addresses_off_four_bytes_are_bounced(rig: Rig, region: Region, skew: int, bounced: int) -> None:
    into = buffer(skew=skew)
    rig.run(Read(region.all(), into))
    before = rig.device.counts.bounced_nbytes
    rig.run(Read(region.all(), into))
    assert rig.device.counts.bounced_nbytes - before == bounced
    assert np.array_equal(into, bytes_of(1, 1 * MIB))


def test_copies_reach_host_mapped_memory_with_ragged_spans(rig: Rig, region: Region) -> None:
    dram = host_memory(1 * MIB)
    assert dram.view is not None
    rig.run(Copy(region.at(512, 8192), dram.at(3, 8192)))
    assert np.array_equal(dram.view[3 : 3 + 8192], bytes_of(1, 1 * MIB)[512 : 512 + 8192])
    rig.run(Copy(dram.at(3, 8192), region.at(65536, 8192)))
    assert np.array_equal(rig.read(region.at(65536, 8192)), bytes_of(1, 1 * MIB)[512 : 512 + 8192])


def test_all_bytes_are_counted_as_direct_and_useful(rig: Rig, region: Region) -> None:
    rig.read(region.all())
    counts = rig.device.counts
    assert counts.direct_nbytes == counts.useful_nbytes == 2 * MIB
    assert counts.buffered_nbytes == 0


# Space


def test_a_new_region_is_zeroed_by_the_drive(rig: Rig, region: Region) -> None:
    rig.device.free(region)
    before = len(operations(rig, "zero"))
    again = rig.device.alloc(1 * MIB)
    assert operations(rig, "zero")[before:] == [(0, 2048)]
    assert not rig.read(again.all()).any()


@pytest.mark.parametrize("status", [0x4001, 0x4002])
def test_a_drive_that_refuses_to_zero_gets_zeros_written(rig: Rig, region: Region, status: int) -> None:
    rig.device.free(region)
    with rig.machine.guard:
        rig.machine.controller.inject_status(WRITE_ZEROES, status, times=100)
    before = len(operations(rig, "write"))
    again = rig.device.alloc(1 * MIB)
    assert sum(blocks for _, blocks in operations(rig, "write")[before:]) == 2048
    assert not rig.read(again.all()).any()


def test_freed_blocks_are_given_back_to_the_drive(rig: Rig, region: Region) -> None:
    rig.device.free(region)
    assert operations(rig, "trim") == [(0, 2048)]


def test_a_drive_that_refuses_to_take_blocks_back_is_not_asked_again(rig: Rig, region: Region) -> None:
    other = rig.device.alloc(4096)
    with rig.machine.guard:
        rig.machine.controller.inject_status(DATASET, 0x4001)
    rig.device.free(region)
    rig.device.free(other)
    assert operations(rig, "trim") == []


def test_the_capacity_is_the_namespace_unless_less_is_asked_for(rig: Rig) -> None:
    assert rig.device.info.memories[0].capacity == 64 * MIB
    assert on_drive(capacity=1 * MIB).open().info.memories[0].capacity == 1 * MIB
    with pytest.raises(ConfigurationError, match=f"holds {64 * MIB} bytes"):
        on_drive(capacity=128 * MIB).open()


# Durability


@pytest.mark.parametrize("way", WAYS)
def test_what_was_flushed_outlives_a_power_failure_and_the_rest_does_not_have_to(way: str) -> None:
    machine = nvme_machine()
    rig = on_drive(machine, io=way)
    region = rig.device.alloc(256 * KIB)
    rig.write(region.all(), bytes_of(1, 256 * KIB))
    rig.flush(region)
    rig.write(region.at(0, 4096), bytes_of(2, 4096))
    place = rig.device.offset_of(region)
    with machine.guard:
        machine.controller.power_off()
        machine.controller.power_on()
        machine.host.reset()
    rig.device.close()
    rig.opened.clear()
    kept = rig.read(rig.open().adopt(place, 256 * KIB).all())
    assert np.array_equal(kept[4096:], bytes_of(1, 256 * KIB)[4096:])
    assert np.array_equal(kept[:4096], bytes_of(1, 256 * KIB)[:4096])
    rig.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_drive_without_a_write_cache_is_sent_no_flush_and_the_notes_say_why(way: str) -> None:
    rig = on_drive(nvme_machine(figures=NvmeFigures(volatile_cache=False)), io=way)
    region = rig.device.alloc(4096)
    rig.flush(region)
    assert operations(rig, "flush") == []
    assert "no volatile write cache" in rig.device.info.notes["why"]
    rig.close()
