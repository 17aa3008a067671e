"""NVMe drives as sysfs shows them: controllers, their namespaces, and who uses them.

Nothing is opened here. Names are no identity: a drive may be nvme0 today and nvme1 tomorrow, so a drive is looked up by
its serial number. `in_use` is what stands between a driver and somebody else's file system.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierloop.devices.drivers.kernel_texts import names_in, number_in, text_in
from tierloop.devices.system import FileStatus, System, resolved

_GENERIC = re.compile(r"ng(\d+)n(\d+)")
_ESCAPED = re.compile(r"\\([0-3][0-7]{2})")
"""How /proc writes spaces in paths."""
_FACTS = ("model", "serial", "firmware_rev", "state", "transport", "address")
_STATES = {
    "resetting": "it is being reset; try again when it is live",
    "connecting": "it is connecting; try again when it is live",
    "new": "it has not been set up yet",
    "deleting": "it is being removed",
    "dead": "it does not answer any more; the kernel's log says why, and a reset or a new slot may help",
}


@dataclass(frozen=True)
class NvmeNamespace:
    """A namespace: its nodes (None where there is none), size in bytes, and why nobody may overwrite it ("": free)."""

    name: str
    generic: str | None
    block: str | None
    nbytes: int
    in_use: str


@dataclass(frozen=True)
class NvmeController:
    """A controller; `state` live, resetting, connecting, deleting, dead …, `numa_node` None if it is not known."""

    controller: str
    model: str
    serial: str
    firmware: str
    state: str
    transport: str
    bus_address: str
    numa_node: int | None
    namespaces: tuple[NvmeNamespace, ...]


def nvme_drives(system: System) -> list[NvmeController]:
    """All controllers that the kernel has, in the order of their names."""
    return [_drive(system, name) for name in names_in(system, "/sys/class/nvme")]


def state_advice(controller: str, state: str) -> str:
    """What a controller's state means for whoever wants to use it; empty if it is live or unsaid."""
    if state in ("", "live"):
        return ""
    return f"{controller} is {state}: {_STATES.get(state, 'it cannot be used now')}"


def block_name(generic: str) -> str | None:
    """The block device that stands for the same namespace as ngXnY; None if that is no such name."""
    found = _GENERIC.fullmatch(generic)
    return f"nvme{found[1]}n{found[2]}" if found else None


def controllers_of(system: System, folder: str) -> list[str]:
    """The controllers that a node of a namespace (its folder in sysfs) is reached through; several under multipath."""
    folder = _where(system, folder)
    parent = _linked(system, f"{folder}/device") or posixpath.dirname(folder)
    name = posixpath.basename(parent)
    if re.fullmatch(r"nvme\d+", name):
        return [name]
    return [each for each in names_in(system, parent) if re.fullmatch(r"nvme\d+", each)]


def in_use(system: System, folder: str) -> str:
    """Why nobody may overwrite the disk or partition that a folder of sysfs describes; empty if nothing is known."""
    folder = _where(system, folder)
    name = posixpath.basename(folder)
    parts = _partitions(system, folder)
    numbers = {text_in(system, f"{place}/dev"): posixpath.basename(place) for place in [folder, *_in(folder, parts)]}
    numbers.pop("", None)
    nodes = {f"/dev/{each}" for each in (name, *parts)}
    for line in text_in(system, "/proc/self/mountinfo").splitlines():
        words = line.split()
        source = words[words.index("-") + 2] if "-" in words and len(words) > words.index("-") + 2 else ""
        if len(words) > 4 and (words[2] in numbers or source in nodes):
            return f"{numbers.get(words[2], posixpath.basename(source))} is mounted at {words[4]}"
    for line in text_in(system, "/proc/swaps").splitlines():
        if line.split(" ", 1)[0] in nodes:
            return f"{posixpath.basename(line.split(' ', 1)[0])} is swapped to"
    for place in [folder, *_in(folder, parts)]:
        holders = names_in(system, f"{place}/holders")
        if holders:
            return f"{posixpath.basename(place)} is held by {', '.join(holders)}"
    for loop, backing in _loops(system):
        number = f"{os.major(backing.device)}:{os.minor(backing.device)}"
        if backing.kind == "block device" and number in numbers:
            return f"{numbers[number]} is what {loop} is made of"
    return ""


def overwritten(system: System, folder: str) -> list[str]:
    """What an owner of the disk that a folder of sysfs describes should know: partitions that nobody uses."""
    folder = _where(system, folder)
    parts = _partitions(system, folder)
    name = posixpath.basename(folder)
    return [f"{name} has partitions ({', '.join(parts)}), and allocating overwrites them"] if parts else []


def is_read_only(system: System, folder: str) -> str:
    """Why the kernel takes no writes to the disk or partition that a folder of sysfs describes; empty if it does."""
    if number_in(system, f"{folder}/ro") != 1:
        return ""
    name = posixpath.basename(_where(system, folder))
    return f"the kernel has {name} set to read-only; `blockdev --setrw /dev/{name}` may change that"


def zones(system: System, folder: str) -> str:
    """Why the disk that a folder of sysfs describes cannot be written at any place; empty if it can."""
    said = text_in(system, f"{folder}/queue/zoned") or text_in(system, f"{folder}/../queue/zoned")
    if said.strip() != "host-managed":
        return ""
    return "the disk has zones that are written from their beginning (zoned = host-managed); every block must be free"


def file_in_use(system: System, status: FileStatus) -> str:
    """Why nobody may overwrite a file: it is the disk behind a loop device, or swapped to. Empty if nothing is known.

    Neither keeps anybody from opening the file and writing into somebody's file system.
    """
    for name, backing in _loops(system):
        if backing == status:
            used = in_use(system, f"/sys/block/{name}")
            return f"{name} is a disk made of this file" + (f", and {used}" if used else "")
    for line in text_in(system, "/proc/swaps").splitlines():
        path = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), line.split(" ", 1)[0].split("\t", 1)[0])
        if path.startswith("/") and _at(system, path) == status:
            return "this file is swapped to"
    return ""


def place_of(system: System, controllers: Sequence[str]) -> tuple[str | None, int | None]:
    """(bus address, NUMA node) of the first of some controllers; None where sysfs does not say."""
    if not controllers:
        return None, None
    folder = f"/sys/class/nvme/{controllers[0]}"
    return text_in(system, f"{folder}/address") or None, number_in(system, f"{folder}/numa_node")


def _drive(system: System, controller: str) -> NvmeController:
    folder = f"/sys/class/nvme/{controller}"
    names = set()
    for generic in names_in(system, "/sys/class/nvme-generic"):
        block = block_name(generic)
        if block and controller in controllers_of(system, f"/sys/class/nvme-generic/{generic}"):
            names.add(block)
    for block in names_in(system, "/sys/block"):
        if re.fullmatch(rf"{controller}n\d+", block):
            names.add(block)
    fact = {name: text_in(system, f"{folder}/{name}").strip() for name in _FACTS}
    return NvmeController(
        controller=controller,
        model=fact["model"],
        serial=fact["serial"],
        firmware=fact["firmware_rev"],
        state=fact["state"],
        transport=fact["transport"],
        bus_address=fact["address"],
        numa_node=number_in(system, f"{folder}/numa_node"),
        namespaces=tuple(_namespace(system, name) for name in sorted(names)),
    )


def _namespace(system: System, name: str) -> NvmeNamespace:
    generic = name.replace("nvme", "ng", 1)
    there = generic in names_in(system, "/sys/class/nvme-generic")
    has_block = name in names_in(system, "/sys/block")
    return NvmeNamespace(
        name,
        f"/dev/{generic}" if there else None,
        f"/dev/{name}" if has_block else None,
        512 * (number_in(system, f"/sys/block/{name}/size") or 0),
        in_use(system, f"/sys/block/{name}") if has_block else "",
    )


def _partitions(system: System, folder: str) -> list[str]:
    return [part for part in names_in(system, folder) if text_in(system, f"{folder}/{part}/partition")]


def _loops(system: System) -> Iterator[tuple[str, FileStatus]]:
    """Loop devices, and what each is a disk of: a file, or another disk, which it does not claim."""
    for name in names_in(system, "/sys/block"):
        backing = text_in(system, f"/sys/block/{name}/loop/backing_file")
        status = _at(system, backing) if backing else None
        if status is not None:
            yield name, status


def _at(system: System, path: str) -> FileStatus | None:
    try:
        return system.stat(path)
    except (OSError, ValueError):
        return None


def _in(folder: str, names: list[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


def _linked(system: System, path: str) -> str | None:
    """Where a link leads, or None if it is none."""
    try:
        system.readlink(path)
    except OSError:
        return None
    return _where(system, path)


def _where(system: System, path: str) -> str:
    """Where a path leads; the path itself if its links lead round in a circle."""
    try:
        return resolved(system, path)
    except OSError:
        return path
