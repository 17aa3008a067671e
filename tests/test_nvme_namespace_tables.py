"""What an NVMe drive says of itself, in Identify and in its health, and what the driver makes of it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.nvme_namespace_rig import buffer, operations
from tests.nvme_rig import MIB, Rig, on_drive, on_fake
from tests.nvme_tables import controller_table, namespace_table
from tests.seeded import bytes_of
from tierloop.devices.commands import Write
from tierloop.devices.drivers.nvme import probe
from tierloop.devices.drivers.nvme_commands import ADMIN_COMMAND, IDENTIFY, IO_COMMAND, PAYLOAD, WRITE_ZEROES
from tierloop.devices.errors import ConfigurationError, ProtocolError, Unsupported
from tierloop.emulators.kernel import Absent
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.emulators.kernel_nvme_nodes import GenericNode

KIB = 1024
READ_ONLY = 1 << 3


class Lying(Absent):
    """A node whose drive answers Identify with other tables."""

    def __init__(self, node: GenericNode, controller: bytes, namespace: bytes) -> None:
        self.number = node.number
        self._node = node
        self._tables = {1: controller, 0: namespace}
        self.zeroed: list[int] = []

    def ioctl(self, request: int, argument: bytearray) -> int:
        fields = PAYLOAD.unpack_from(argument) if len(argument) >= PAYLOAD.size else ()
        if request == IO_COMMAND and fields[0] == WRITE_ZEROES:
            self.zeroed.append(fields[12])
        status = self._node.ioctl(request, argument)
        if request == ADMIN_COMMAND:
            opcode, address, what = fields[0], fields[7], fields[10]
            if opcode == IDENTIFY:
                ctypes.memmove(address, self._tables[what], 4096)
        return status


def lying(rig: Rig, controller: bytes, namespace: bytes) -> Rig:
    """The rig with other tables on the generic device."""
    node = rig.machine.nodes["/dev/ng0n1"]
    assert isinstance(node, GenericNode)
    rig.machine.nodes["/dev/ng0n1"] = Lying(node, controller, namespace)
    return rig


@pytest.mark.parametrize(
    ("tables", "kind", "text"),
    [
        ((controller_table(), namespace_table(blocks=0)), ProtocolError, "0 blocks"),
        ((controller_table(), namespace_table(shift=3)), ProtocolError, r"2\^3 bytes"),
        ((controller_table(), namespace_table(shift=20)), Unsupported, r"2\^20 bytes"),
        ((controller_table(), namespace_table(metadata=8)), Unsupported, "metadata"),
        ((controller_table(mdts=99), namespace_table()), ProtocolError, "MDTS"),
        ((controller_table(), namespace_table(blocks=1 << 63)), ProtocolError, r"2\^62"),
        ((controller_table(), namespace_table(blocks=1)), ConfigurationError, "less than one block of 4096"),
        ((controller_table(mdts=1), namespace_table(shift=16)), Unsupported, "larger than the largest transfer"),
    ],
)
def test_a_drive_whose_tables_cannot_be_is_refused(
    tables: tuple[bytes, bytes], kind: type[Exception], text: str
) -> None:
    rig = lying(on_drive(), *tables)
    with pytest.raises(kind, match=text):
        rig.open()
    assert rig.machine.open_fds == 0


def test_blocks_of_another_size_than_the_kernel_says_are_refused() -> None:
    rig = on_drive(nvme_machine(lba_nbytes=4096), io="ioctl")
    rig.machine.tree.put("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/queue/logical_block_size", "512")
    with pytest.raises(ProtocolError, match="blocks of 4096 bytes, and the kernel says 512"):
        rig.open()


def test_a_drive_that_offers_nothing_is_zeroed_by_writing_and_never_trimmed() -> None:
    rig = lying(on_drive(io="ioctl"), controller_table(), namespace_table(blocks=2048))
    region = rig.device.alloc(1 * MIB)
    rig.flush(region)
    rig.device.free(region)
    assert {op for op in ("zero", "trim", "flush") if operations(rig, op)} == set()
    assert sum(blocks for _, blocks in operations(rig, "write")) == 2048
    rig.close()


@pytest.mark.parametrize(("features", "flags"), [(0, 1 << 25), (1, 0)])
def test_zeroing_gives_blocks_back_unless_they_would_have_to_be_found_again(features: int, flags: int) -> None:
    tables = controller_table(optional=1 << 3), namespace_table(blocks=2048, features=features, deallocated=1 | 1 << 3)
    rig = lying(on_drive(io="ioctl"), *tables)
    node = rig.machine.nodes["/dev/ng0n1"]
    assert isinstance(node, Lying)
    rig.device.alloc(4096)
    assert node.zeroed == [flags | 7]
    rig.close()


def test_a_write_protected_namespace_is_read_and_never_written() -> None:
    rig = lying(on_drive(io="ioctl"), controller_table(), namespace_table(blocks=2048, protected=True))
    region = rig.device.adopt(0, 4096)
    assert not rig.read(region.all()).any()
    assert "write protected" in rig.device.info.notes["why"]
    with pytest.raises(Unsupported, match="write protected"):
        rig.device.submit(Write(region.all(), buffer(4096)))
    rig.close()


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_identity_and_health_are_the_drives_own(path: str) -> None:
    rig = on_drive(path=path)
    who, before = rig.device.identity, rig.device.health()
    assert who is not None
    assert before is not None
    assert (who.model, who.serial, who.nsid) == ("tierloop NVMe model", "TL0000000001", 1)
    assert (who.lba_nbytes, who.capacity, who.mdts_nbytes) == (512, 64 * MIB, 128 * KIB)
    assert (rig.device.info.bus_address, rig.device.info.numa_node) == ("0000:00:04.0", 0)
    region = rig.device.alloc(8 * MIB)
    rig.write(region.all(), bytes_of(1, 8 * MIB))
    after = rig.device.health()
    assert after is not None
    assert 8 * MIB - 512_000 <= after.written_nbytes - before.written_nbytes <= 8 * MIB + 512_000
    rig.close()


def test_a_file_has_neither_identity_nor_health() -> None:
    rig = on_fake()
    assert rig.device.identity is None
    assert rig.device.health() is None
    rig.close()


def test_a_warning_of_the_drive_stands_in_the_notes_and_is_a_reason() -> None:
    rig = on_drive()
    with rig.machine.guard:
        rig.machine.controller.warn(0b101)
    assert "the spare capacity has fallen below its threshold" in rig.device.info.notes["why"]
    assert "the reliability is degraded" in rig.device.info.notes["why"]
    rig.close()
    assert any("reliability" in reason and not reason.fatal for reason in probe("/dev/ng0n1", rig.machine))


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_drive_that_takes_no_writes_is_read_and_never_written(path: str) -> None:
    rig = on_drive(path=path)
    with rig.machine.guard:
        rig.machine.controller.poke(1, 0, bytes_of(4, 4096).tobytes())
        rig.machine.controller.warn(READ_ONLY)
    region = rig.device.adopt(0, 4096)
    assert np.array_equal(rig.read(region.all()), bytes_of(4, 4096))
    with pytest.raises(Unsupported, match="media are read-only"):
        rig.device.submit(Write(region.all(), buffer(4096)))
    with pytest.raises(Unsupported, match="media are read-only"):
        rig.device.alloc(4096)
    assert operations(rig, "write") == []
    rig.close()


def test_a_health_that_may_not_be_read_is_noted_and_no_error() -> None:
    rig = on_drive()
    with rig.machine.guard:
        rig.machine.controller.inject_status(2, 0x4001, admin=True)
    assert "the drive's health is not known" in rig.device.info.notes["why"]
    rig.close()


def test_probing_a_namespace_changes_nothing() -> None:
    rig = on_drive()
    assert not any(reason.fatal for reason in probe("/dev/ng0n1", rig.machine))
    assert rig.machine.open_fds == 0
    with rig.machine.guard:
        assert {each.op for each in rig.machine.controller.history} == {"read"}
