"""A process's memory as the kernel and a device reach it: what is mapped, as it is mapped, and nothing else."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

from tests.kernel_nvme_rig import refused
from tierloop.devices.system import address_of
from tierloop.emulators.kernel_memory import DeviceMemory, ProcessMemory


def test_process_memory_moves_bytes_and_refuses_bad_addresses() -> None:
    memory = ProcessMemory()
    buffer = bytearray(b"0123456789")
    at = address_of(buffer)
    assert memory.read(at + 2, 3) == b"234"
    memory.write(at, b"ab")
    assert buffer[:3] == b"ab2"
    calls: list[Callable[[], object]] = [
        lambda: memory.read(16, 4),
        lambda: memory.write(16, b"x"),
        lambda: memory.check(16, 1 << 20),
        lambda: memory.check(-5, 8),
        lambda: memory.read(1 << 70, 1),
    ]
    for call in calls:
        with refused(errno.EFAULT):
            call()


def test_a_device_reaches_what_is_mapped_and_as_it_is_mapped() -> None:
    reachable = DeviceMemory(ProcessMemory())
    buffer = mmap.mmap(-1, 4 * 4096)
    at = address_of(buffer)
    reachable.map(at + 100, 5000, writable=False)
    reachable.map(at + 5100, 50, writable=True)
    assert reachable.read(at + 100, 5050) == bytes(5050)
    reachable.write(at + 5100, b"x" * 50)
    calls: list[Callable[[], object]] = [
        lambda: reachable.write(at + 5099, b"xx"),
        lambda: reachable.write(at + 5149, b"xx"),
        lambda: reachable.read(at + 99, 2),
        lambda: reachable.read(at + 5149, 2),
    ]
    for call in calls:
        with refused(errno.EFAULT):
            call()
    reachable.unmap(at + 5100, 50, writable=True)
    with refused(errno.EFAULT):
        reachable.read(at + 5100, 1)
    assert buffer[5000:5200] == bytes(100) + b"x" * 50 + bytes(50)
