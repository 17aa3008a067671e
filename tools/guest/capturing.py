"""Golden captures: what a real kernel shows of the hardware, as trees that tests replay on any machine.

    guest-numa     nodes, memory tiers, and the firmware's tables (SRAT, SLIT, HMAT, CEDT)
    guest-nvme     controllers and namespaces, with identify pages and logs below /capture
    guest-cxl      ports, decoders, memories and their CDAT, before one became a devdax and after (guest-cxl-devdax),
                   and when the kernel uses it as a node (guest-cxl-node, with that node, its blocks, and a persistent
                   memory as a devdax)

A tree has what stands in files and links; what only this moment knows (counters, times) is left out, so that two
captures of one machine differ little. `python -m tierloop.tools.guest.capturing FOLDER` writes them in a guest, and
says on stderr what it is at: emulated processors take their time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import posixpath
import re
import stat
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tierloop.devices.drivers.nvme_commands import (
    ADMIN_COMMAND,
    IDENTIFY_CONTROLLER,
    IDENTIFY_NAMESPACE,
    LOG_ERRORS,
    LOG_HEALTH,
    PAYLOAD,
    NvmeCommand,
    get_log,
    identify,
    issue,
)
from tierloop.devices.drivers.nvme_drives import nvme_drives
from tierloop.devices.system import HOST, System
from tierloop.emulators.kernel import Tree
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.machine import Machine, load

NAMES = ("guest-numa", "guest-nvme", "guest-cxl", "guest-cxl-devdax", "guest-cxl-node")
LARGEST = 1 << 16
"""Bytes of the largest file that is kept; CDAT, identify pages and tables of the firmware are smaller."""
_NUMA = (
    "/sys/devices/system/node",
    "/sys/devices/virtual/memory_tiering",
    "/sys/firmware/acpi/tables",
    "/sys/kernel/mm/numa",
    "/sys/kernel/mm/mempolicy",
)
_NVME = ("/sys/class/nvme", "/sys/class/nvme-generic", "/sys/class/nvme-subsystem", "/sys/block")
_CXL = ("/sys/bus/cxl/devices", "/sys/bus/dax/devices")
_TABLES = ("SRAT", "SLIT", "HMAT", "CEDT")
_LEFT_OUT = re.compile(
    r"/(power|msi_irqs|msi_bus|irq|statistics|hwmon|vmstat|numastat|meminfo|stat|inflight|uevent|trace|mq|"
    r"integrity|compact|hugepages|memory\d+|cpu\d+|bdi|slaves|holders|firmware_node|waiting_for_supplier|rescan\w*|"
    r"reset\w*|remove|config|rom|resource\d+\w*|vpd|dynamic|data|trigger\w*|security|async|eh_\w+|hwmon\d+|diskseq|aer_\w+|"
    r"broken_parity_status|consistent_dma_mask_bits|dma_mask_bits|d3cold_allowed|ari_enabled|enable|current_link\w+|"
    r"max_link\w+|local_cpu\w+|driver_override|subordinate_bus_number|secondary_bus_number|revision|power_state|pools|"
    r"acpi_index|index|label|sriov\w*|link|doe_features|wakeup\w*|[0-9a-f:.]+:pcie\w+|events\w*|modalias)$"
)
_TABLE_NBYTES = 4096
_IDENTIFY_ACTIVE, _IDENTIFY_DESCRIPTORS, _LOG_FIRMWARE, _LOG_EFFECTS, _GET_FEATURES = 2, 3, 3, 5, 0x0A
_FEATURES = range(0x01, 0x0C)
_MEMORY = "/sys/devices/system/memory"


def tree_of(roots: Iterable[str], keep: Callable[[str], bool] = lambda _: True) -> Tree:
    """What stands below these folders, and where their links lead as far as that lies below /sys/devices."""
    tree, seen, waiting = Tree(), set[str](), list(roots)
    while waiting:
        path = waiting.pop()
        if path in seen or not os.path.lexists(path) or _LEFT_OUT.search(path) or not keep(path):
            continue
        seen.add(path)
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            tree.link(path, os.readlink(path))
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), os.readlink(path)))
            if target.startswith("/sys/devices/") and not path.endswith(
                ("/device", "/subsystem", "/driver", "/of_node")
            ):
                waiting.append(target)
        elif stat.S_ISDIR(mode):
            waiting += [f"{path}/{name}" for name in sorted(os.listdir(path))]
        elif stat.S_ISREG(mode) and mode & 0o444:
            data = _read(path)
            if data is not None:
                tree.put(path, data)
    return tree


def capture(folder: Path, machine: Machine) -> None:
    """Write all captures of this guest. Raises OSError, and DeviceError where a memory does not become a devdax."""
    _say("nodes and tables of the firmware")
    numa = tree_of(_NUMA, keep=lambda path: "/tables/" not in path or posixpath.basename(path) in _TABLES)
    numa.put("/proc/self/status", _lines("/proc/self/status", "Cpus_allowed_list", "Mems_allowed_list"))
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        numa.put(f"{node}/meminfo", _lines(f"{node}/meminfo", "MemTotal"))
    _store(folder / "guest-numa.tree", numa)
    _say("drives")
    nvme = tree_of(_NVME, keep=lambda path: not re.fullmatch(r"/sys/block/(?!nvme).*", path))
    for drive in nvme_drives(HOST):
        for namespace in drive.namespaces:
            if namespace.generic:
                for name, page in pages_of(HOST, namespace.generic).items():
                    nvme.put(f"/capture/{drive.serial}/{name}", page)
                for name, told in features_of(HOST, namespace.generic).items():
                    nvme.put(f"/capture/{drive.serial}/{name}", told)
    _store(folder / "guest-nvme.tree", nvme)
    _say("CXL memories")
    _store(folder / "guest-cxl.tree", tree_of(_CXL))
    volatile = [one for one in machine.cxl if not one.persistent and len(machine.bridges[one.bridge]) == 1]
    for memory in volatile[:1]:
        _say("a volatile memory as a devdax")
        dax = cxl_regions.volatile_region((memory,)).name
        _store(folder / "guest-cxl-devdax.tree", tree_of(_CXL))
        _say("the same as a node, and a persistent one as a devdax")
        for other in (one for one in machine.cxl if one.persistent):
            cxl_regions.persistent_region(other)
        number = cxl_regions.system_ram(dax)
        _store(folder / "guest-cxl-node.tree", _with_node(tree_of((*_CXL, *_NUMA[:2])), number))


def pages_of(system: System, path: str) -> dict[str, bytes]:
    """Identify pages and logs of a namespace's drive, by name."""
    asked: dict[str, Callable[[int], NvmeCommand]] = {
        "identify-controller": partial(identify, IDENTIFY_CONTROLLER, 0),
        "identify-namespace": partial(identify, IDENTIFY_NAMESPACE, 1),
        "identify-active": partial(identify, _IDENTIFY_ACTIVE, 0),
        "identify-descriptors": partial(identify, _IDENTIFY_DESCRIPTORS, 1),
        "log-health": partial(get_log, LOG_HEALTH, 512),
        "log-errors": partial(get_log, LOG_ERRORS, 64),
        "log-firmware": partial(get_log, _LOG_FIRMWARE, 512),
        "log-effects": partial(get_log, _LOG_EFFECTS, 4096),
    }
    return {name: _asked(system, path, command) for name, command in asked.items()}


def features_of(system: System, path: str) -> dict[str, str]:
    """What Get Features answers, by name: `status result`, both hexadecimal; current values."""
    fd = system.open(path, os.O_RDWR)
    try:
        return {f"feature-{number:02x}": _feature(system, fd, number) for number in _FEATURES}
    finally:
        system.close(fd)


def _feature(system: System, fd: int, number: int) -> str:
    argument = bytearray(PAYLOAD.size)
    PAYLOAD.pack_into(argument, 0, *NvmeCommand(_GET_FEATURES, 0, words=(number, 0, 0, 0, 0, 0)).fields())
    status = system.ioctl(fd, ADMIN_COMMAND, argument)
    return f"{status:#x} {int.from_bytes(argument[68:72], 'little'):#x}"


def _asked(system: System, path: str, command_at: Callable[[int], NvmeCommand]) -> bytes:
    with mmap.mmap(-1, _TABLE_NBYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        command = command_at(ctypes.addressof(view))
        fd = system.open(path, os.O_RDWR)
        try:
            issue(system, fd, command, admin=True)
        finally:
            system.close(fd)
            del view
        return bytes(memory[:])


def _read(path: str) -> bytes | None:
    """A file's bytes; None for one that cannot be read or is too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        parts: list[bytes] = []
        while sum(map(len, parts)) <= LARGEST:
            part = os.read(fd, LARGEST)
            if not part:
                return b"".join(parts)
            parts.append(part)
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


def _lines(path: str, *words: str) -> bytes:
    """The lines of a file that have one of these words."""
    lines = [line for line in Path(path).read_text().splitlines() if any(word in line for word in words)]
    return ("\n".join(lines) + "\n").encode()


def _with_node(tree: Tree, node: int) -> Tree:
    """A tree with the blocks of a node, and what all blocks share."""
    for name in ("auto_online_blocks", "block_size_bytes"):
        tree.put(f"{_MEMORY}/{name}", _read(f"{_MEMORY}/{name}") or b"")
    folder = f"/sys/devices/system/node/node{node}"
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"memory\d+", name):
            tree.link(f"{folder}/{name}", os.readlink(f"{folder}/{name}"))
            for fact in ("online", "phys_index", "removable", "state", "valid_zones"):
                tree.put(f"{_MEMORY}/{name}/{fact}", _read(f"{_MEMORY}/{name}/{fact}") or b"")
    tree.put(f"{folder}/meminfo", _lines(f"{folder}/meminfo", "MemTotal"))
    return tree


def _say(what: str) -> None:
    print(f"capture: {what}", file=sys.stderr, flush=True)


def _store(path: Path, tree: Tree) -> None:
    path.write_text(tree.text())


if __name__ == "__main__":
    capture(Path(sys.argv[1]), load(os.environ["TIERLOOP_GUEST_MACHINE"]))
