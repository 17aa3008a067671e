"""io_uring on the machine with an NVMe drive: reads and writes of the block device, and passthrough in wide entries."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.kernel_nvme_rig import Host, Ring, a_host, refused
from tests.nvme_rig import MIB
from tests.seeded import bytes_of
from tierloop.devices.drivers import ring as uring
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.emulators.kernel_nvme_rings import URING_ADMIN, URING_IO
from tierloop.emulators.kernel_uring import CQE32, READ_FIXED, SQE128, SYS_IO_URING_REGISTER, URING_CMD, WRITE_FIXED
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Io, Status

host = a_host


@pytest.fixture
def ring(host: Host) -> Ring:
    return Ring(host.machine)


@pytest.fixture
def wide(host: Host) -> Iterator[Ring]:
    made = Ring(host.machine, flags=SQE128 | CQE32)
    yield made
    host.machine.close(made.fd)


def test_a_ring_reads_and_writes_the_block_device(host: Host, ring: Ring) -> None:
    data = bytes_of(5, MIB).tobytes()
    host.buffer[:MIB] = data
    ring.put(uring.WRITE, host.block_fd, 1, 0, host.at, MIB)
    assert ring.one() == MIB
    ring.put(uring.FSYNC, host.block_fd, 2, op_flags=uring.DATASYNC)
    assert ring.one() == 0
    ring.put(uring.READ, host.block_fd, 3, 0, host.at + 2 * MIB, MIB)
    assert ring.one() == MIB
    assert host.buffer[2 * MIB : 3 * MIB] == data


@pytest.mark.parametrize(
    ("entry", "result"),
    [
        ({"address": 1}, -errno.EINVAL),
        ({"nbytes": 100}, -errno.EINVAL),
        ({"offset": 1}, -errno.EINVAL),
        ({"flags": 4}, -errno.EINVAL),
        ({"opcode": 99}, -errno.EINVAL),
        ({"opcode": READ_FIXED}, -errno.EFAULT),
        ({"opcode": URING_CMD}, -errno.EOPNOTSUPP),
        ({"fd": 99}, -errno.EBADF),
    ],
)
def test_an_entry_that_cannot_be_is_answered_with_its_errno(
    host: Host, ring: Ring, entry: dict[str, int], result: int
) -> None:
    fields = {"opcode": uring.READ, "fd": host.block_fd, "offset": 0, "address": 0, "nbytes": 512, **entry}
    fields["address"] += host.at
    ring.put(name=7, **fields)
    assert ring.one() == result


def test_a_bad_block_is_enodata_through_a_ring(host: Host, ring: Ring) -> None:
    host.machine.controller.inject_read_error(1, 3)
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 4096)
    assert ring.one() == -errno.ENODATA


def test_registered_buffers_bound_what_an_entry_may_name(host: Host, ring: Ring) -> None:
    ring.register((host.at, 4096), (host.at + 8192, 512))
    host.buffer[8192:8704] = b"z" * 512
    for name, opcode, buffer, address, nbytes in (
        (1, WRITE_FIXED, 1, host.at + 8192, 512),
        (2, READ_FIXED, 0, host.at + 3584, 512),
        (3, READ_FIXED, 0, host.at + 3584, 1024),
        (4, READ_FIXED, 1, host.at, 512),
        (5, READ_FIXED, 2, host.at, 512),
    ):
        ring.put(opcode, host.block_fd, name, 0, address, nbytes, buffer=buffer)
        assert ring.one() == (nbytes if name < 3 else -errno.EFAULT)
    assert host.machine.controller.peek(1, 0) == b"z" * 512
    with refused(errno.EBUSY):
        ring.register((host.at, 4096))
    host.machine.syscall(SYS_IO_URING_REGISTER, ring.fd, 1, 0, 0)
    with refused(errno.ENXIO):
        host.machine.syscall(SYS_IO_URING_REGISTER, ring.fd, 1, 0, 0)
    with refused(errno.EFAULT):
        ring.register((8, 4096))


def test_a_passthrough_command_gives_its_status_and_its_result(host: Host, wide: Ring) -> None:
    host.machine.controller.poke(1, 9, b"q" * 512)
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512, 9)
    wide.command(host.generic_fd, 2, URING_IO, Io.READ, 1, host.at + 4096, 512, 1 << 31, 1)
    wide.command(host.admin_fd, 3, URING_ADMIN, Admin.GET_FEATURES, 0, 0, 0, 1)
    wide.enter(3)
    answers = wide.taken()
    assert answers[1] == (0, 0)
    assert answers[2][0] & 0x7FF == Status.LBA_OUT_OF_RANGE
    assert answers[3] == (0, 3)
    assert host.buffer[:512] == b"q" * 512


@pytest.mark.parametrize(
    ("node", "kind", "nsid", "result"),
    [
        ("generic_fd", URING_IO, 2, -errno.EINVAL),
        ("generic_fd", URING_ADMIN, 1, -errno.ENOTTY),
        ("admin_fd", URING_IO, 1, -errno.ENOTTY),
        ("block_fd", URING_IO, 1, -errno.EOPNOTSUPP),
    ],
)
def test_a_command_that_a_node_does_not_take_is_refused(
    host: Host, wide: Ring, node: str, kind: int, nsid: int, result: int
) -> None:
    wide.command(getattr(host, node), 1, kind, Io.READ, nsid, host.at, 512)
    assert wide.one() == result


@pytest.mark.parametrize("flags", [0, SQE128, CQE32])
def test_commands_need_wide_entries_and_wide_completions(host: Host, flags: int) -> None:
    ring = Ring(host.machine, flags=flags)
    ring.command(host.generic_fd, 1, URING_IO, Io.FLUSH, 1, 0, 0)
    assert ring.one() == -errno.EOPNOTSUPP


def test_what_is_held_is_a_timeout_and_comes_back_when_released(host: Host, wide: Ring) -> None:
    host.machine.hold()
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512)
    wide.enter(1)
    with refused(errno.ETIME):
        wide.enter(1)
    wide.put(uring.ASYNC_CANCEL, -1, 2, address=1)
    wide.enter(1)
    assert wide.taken() == {2: (-errno.EALREADY, 0)}
    host.machine.release()
    wide.enter(1)
    assert wide.taken() == {1: (0, 0)}


def test_completions_come_back_in_a_shuffled_order_that_the_seed_gives() -> None:
    def order(seed: int) -> list[int]:
        host = Host(nvme_machine(seed=seed))
        ring = Ring(host.machine, entries=16)
        for name in range(12):
            ring.put(uring.READ, host.block_fd, name, 4096 * name, host.at + 4096 * name, 4096)
        ring.enter(12)
        return list(ring.taken())

    assert order(1) == order(1)
    assert sorted(order(1)) == list(range(12))
    assert len({tuple(order(seed)) for seed in range(4)}) > 1


def test_a_closed_ring_lets_nobody_write_into_its_memory(host: Host) -> None:
    ring = Ring(host.machine)
    host.machine.controller.poke(1, 0, b"w" * 512)
    host.machine.hold()
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 512)
    ring.enter(0)
    host.machine.close(ring.fd)
    host.machine.release()
    for _ in range(8):
        assert host.io(Io.FLUSH) == 0
    assert host.buffer[:512] == bytes(512)
    assert host.machine.controller.health.reads == 0


def test_more_entries_than_the_queues_hold_wait_for_room() -> None:
    host = Host(nvme_machine(figures=NvmeFigures(queue_entries=4)))
    ring = Ring(host.machine, entries=32)
    host.machine.hold()
    for name in range(32):
        ring.put(uring.READ, host.block_fd, name, 512 * name, host.at + 512 * name, 512)
    ring.enter(1)
    host.machine.release()
    ring.enter(32)
    assert {result for result, _ in ring.taken().values()} == {512}


def test_entries_that_wait_for_room_are_aborted_in_their_turn() -> None:
    host = Host(nvme_machine(figures=NvmeFigures(queue_entries=2, io_queues=2)))
    ring = Ring(host.machine, flags=SQE128 | CQE32)
    host.machine.hold()
    for name in range(6):
        ring.command(host.generic_fd, name, URING_IO, Io.READ, 1, host.at, 512)
    ring.enter(6, timeout_s=1000.0)
    assert {status & 0x7FF for status, _ in ring.taken().values()} == {Status.ABORT_REQUESTED}


def test_a_drive_that_is_pulled_out_cancels_what_is_in_flight(host: Host, wide: Ring) -> None:
    host.machine.hold()
    wide.command(host.generic_fd, 1, URING_IO, Io.READ, 1, host.at, 512)
    wide.put(uring.READ, host.block_fd, 2, 0, host.at, 512)
    wide.enter(0)
    host.machine.unplug()
    wide.enter(2)
    assert wide.taken() == {1: (-errno.EINTR, 0), 2: (-errno.EIO, 0)}


def test_a_wait_takes_the_time_of_the_medium(host: Host, ring: Ring) -> None:
    before = host.machine.controller.now_ns
    ring.put(uring.READ, host.block_fd, 1, 0, host.at, 4096)
    ring.enter(1)
    took = host.machine.controller.now_ns - before
    assert 3_000 + 4096 // 3 <= took < 3_000 + 4096 // 3 + 2_000
