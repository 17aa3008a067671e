"""How much memory this process may still use: what the system has left, and what its control groups allow.

In a container the machine's figure says nothing; the kernel ends the process that passes its group's limit. Every
group from the process's own up to the root may have one (version 2: memory.max; version 1: memory.limit_in_bytes).
Pages of files that the kernel can drop at once (inactive_file) do not count as used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from tierloop.devices.drivers.kernel_texts import number_of, text_in
from tierloop.devices.drivers.numa_topology import free_nbytes, shown
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.system import HOST, System

_FILES = {2: ("/sys/fs/cgroup", "memory.max", "memory.current"),
          1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")}  # fmt: skip


def available_nbytes(system: System = HOST) -> int:
    """Bytes that may be allocated now; 0 if nothing can be learned."""
    return min(_limits(system), default=0)


def require_room(system: System, device: str, nbytes: int, nodes: Sequence[int] = ()) -> None:
    """Raises OutOfMemory for what cannot all be touched, on these nodes if any are named; unknown is no reason.

    To be asked before pages are touched: a kernel that finds no room while they are may end the process.
    """
    left = [(limit, "in what the machine and this process's control groups allow") for limit in _limits(system)]
    if nodes:
        left.append((sum(free_nbytes(system, node) for node in nodes), f"on nodes {shown(nodes)}"))
    least, where = min(left, default=(nbytes, ""))
    if nbytes > least:
        raise OutOfMemory(device, "alloc", f"{nbytes} bytes; {least} are free {where}")


def _limits(system: System) -> list[int]:
    """What may be allocated by each that sets a limit: the machine, and control groups."""
    found = [_of_machine(system)]
    for line in text_in(system, "/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        version = 2 if not controllers else 1
        if colon and (version == 2 or "memory" in controllers.split(",")):
            found += [
                _of_group(system, version, str(group)) for group in (PurePosixPath(path), *PurePosixPath(path).parents)
            ]
    return [nbytes for nbytes in found if nbytes is not None]


def _of_machine(system: System) -> int | None:
    for line in text_in(system, "/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable" and (kib := number_of(value.removesuffix("kB"))) is not None:
            return kib * 1024
    return None


def _of_group(system: System, version: int, group: str) -> int | None:
    root, limit_file, used_file = _FILES[version]
    folder = root + group.rstrip("/")
    limit, used = (number_of(text_in(system, f"{folder}/{file}")) for file in (limit_file, used_file))
    if limit is None or used is None:  # "max", or not there
        return None
    droppable = 0
    for line in text_in(system, f"{folder}/memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            droppable = number_of(value) or 0
    return max(0, limit - max(0, used - droppable))
