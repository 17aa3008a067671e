"""What revision 2.0 of the specification demands of a controller beyond its predecessors, and a host that looks for it.

And texts of a kernel that are no texts: the driver takes them for nothing said.
"""

from __future__ import annotations

import struct

import pytest

from tests.nvme_bus import DATA, RATE, Bus, code
from tests.nvme_rig import on_drive
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Status
from tierloop.firmware_models.passthrough import Passthrough


@pytest.mark.parametrize(("ready_ns", "units"), [(0, 1), (1_000_000, 1), (500_000_001, 2), (60_000_000_000, 120)])
def test_a_host_is_told_how_long_becoming_ready_with_the_media_takes(ready_ns: int, units: int) -> None:
    bus = Bus(NvmeFigures(ready_ns=ready_ns, shutdown_ns=0))
    assert bus.register(regs.CAP, 8) >> 59 & 3 == 1
    assert bus.register(0x68) == units
    assert bus.register(regs.CAP, 8) >> 24 & 0xFF == units


def test_a_time_that_the_capabilities_cannot_say_stands_in_the_register_of_its_own() -> None:
    bus = Bus(NvmeFigures(ready_ns=200_000_000_000, shutdown_ns=0))
    assert bus.register(regs.CAP, 8) >> 24 & 0xFF == 255
    assert bus.register(0x68) == 400


@pytest.mark.parametrize("offset", [0x48, 0x50])
def test_wide_registers_of_what_is_not_there_read_as_zero(offset: int) -> None:
    bus = Bus()
    assert bus.register(offset, 8) == bus.register(offset) == bus.register(offset + 4) == 0
    bus.controller.write(offset, 8, (1 << 64) - 1)
    assert bus.register(offset, 8) == 0
    assert not bus.controller.bad_accesses


def test_a_namespace_is_described_whatever_its_command_set() -> None:
    bus = Bus(namespaces=2).enable()
    bus.put(b"\xff" * 4096)
    assert bus.admin(Admin.IDENTIFY, DATA, 2, [0x08]).status == 0
    table = bus.got(4096)
    assert table[14] == 1  # ready
    assert table[8] == 0  # not write protected
    assert not any(table[:8] + table[9:14] + table[15:])


def test_a_namespace_whose_medium_is_worn_out_says_so_in_both_tables() -> None:
    class WornOut(Passthrough):
        percentage_used, spare_percent, read_only = 100, 0, True

    bus = Bus(media=WornOut(RATE, RATE)).enable()
    for cns, at in ((0x00, 99), (0x08, 8)):
        assert bus.admin(Admin.IDENTIFY, DATA, 1, [cns]).status == 0
        assert bus.got(4096)[at] & 1


@pytest.mark.parametrize(("cns", "nsid"), [(0x05, 1), (0x06, 0)])
def test_the_tables_of_the_nvm_command_set_set_no_limits(cns: int, nsid: int) -> None:
    bus = Bus().enable()
    bus.put(b"\xff" * 4096)
    assert bus.admin(Admin.IDENTIFY, DATA, nsid, [cns, 0]).status == 0
    assert bus.got(4096) == bytes(4096)


@pytest.mark.parametrize("cns", [0x05, 0x06])
@pytest.mark.parametrize("command_set", [1, 2, 255])
def test_a_command_set_that_is_not_there_has_no_tables(cns: int, command_set: int) -> None:
    bus = Bus().enable()
    assert code(bus.admin(Admin.IDENTIFY, DATA, 1, [cns, command_set << 24]).status) == Status.INVALID_FIELD
    (byte,) = struct.unpack_from("<H", bus.log(1, 64), 14)
    assert byte == 47


@pytest.mark.parametrize("cns", [0x05, 0x08])
@pytest.mark.parametrize("nsid", [0, 2, 0xFFFFFFFF])
def test_a_namespace_that_is_not_there_has_none_of_the_new_tables_either(cns: int, nsid: int) -> None:
    assert code(Bus().enable().admin(Admin.IDENTIFY, DATA, nsid, [cns]).status) == Status.INVALID_NAMESPACE


@pytest.mark.parametrize("namespaces", [1, 2])
def test_a_feature_of_all_namespaces_at_once_cannot_be_read(namespaces: int) -> None:
    bus = Bus(namespaces=namespaces).enable()
    assert bus.admin(Admin.SET_FEATURES, nsid=0xFFFFFFFF, cdw=[Feature.ERROR_RECOVERY, 1 << 16]).status == 0
    asked = bus.admin(Admin.GET_FEATURES, nsid=0xFFFFFFFF, cdw=[Feature.ERROR_RECOVERY])
    assert code(asked.status) == Status.INVALID_NAMESPACE
    for nsid in range(1, namespaces + 1):
        assert bus.admin(Admin.GET_FEATURES, nsid=nsid, cdw=[Feature.ERROR_RECOVERY]).result == 1 << 16


@pytest.mark.parametrize("cache", [True, False])
def test_the_log_of_features_lists_those_that_can_be_read_and_where_they_hold(cache: bool) -> None:
    bus = Bus(NvmeFigures(volatile_cache=cache)).enable()
    listed = struct.unpack("<256I", bus.log(0x12, 1024))
    assert bus.log(0x00, 1024)[4 * 0x12] & 1
    for feature, said in enumerate(listed):
        per_namespace = bool(said >> 20 & 1)
        answer = bus.admin(Admin.GET_FEATURES, nsid=int(per_namespace), cdw=[feature])
        assert (answer.status == 0) == bool(said & 1)
        if said:
            allowed = bus.admin(Admin.GET_FEATURES, nsid=int(per_namespace), cdw=[feature | 3 << 8]).result
            assert bool(allowed & 2) == per_namespace != bool(said >> 21 & 1)


# the back door


def test_power_is_lost_once() -> None:
    controller = Bus().enable().controller
    controller.power_off()
    controller.power_off()
    controller.power_off(unsafe=False)
    controller.power_on()
    assert (controller.health.unsafe_shutdowns, controller.health.power_cycles) == (1, 2)


@pytest.mark.parametrize("nsid", [-1, 0, 2])
def test_bytes_of_a_namespace_that_is_not_there_are_refused_by_name(nsid: int) -> None:
    controller = Bus().controller
    with pytest.raises(ValueError, match=rf"namespace {nsid} is not 1 … 1"):
        controller.poke(nsid, 0, bytes(512))
    with pytest.raises(ValueError, match=rf"namespace {nsid} is not 1 … 1"):
        controller.peek(nsid, 0)


# a kernel whose files are no texts


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_files_that_are_no_texts_say_nothing_and_break_nothing(path: str) -> None:
    for name in [name for name in nvme_machine().tree.files if not name.endswith("/dev")]:
        machine = nvme_machine()
        machine.tree.put(name, b"\xff\xfe")
        rig = on_drive(machine, queues=1)
        rig.path = path
        rig.device.alloc(4096)
        rig.close()
