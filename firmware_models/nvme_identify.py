"""Identify data structures of the NVMe controller, 4096 bytes each, and what it supports in figures.

Offsets are those of the NVMe 2.0 base and NVM command set specifications.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_wire import Admin, Io

VERSION = 0x00020000
PAGE = 4096
IDENTIFY_NBYTES = 4096
_VENDOR = 0xFFFE
_LBA_FORMATS = (9, 12)


@dataclass(frozen=True)
class NvmeFigures:
    """What a controller is. Times in ns; `mdts` is a power of two of 4096-byte pages, 0 for no limit.

    `window` commands are worked on at a time; `command_ns` passes before a command reaches the medium; an error that
    the medium cannot correct takes `recovery` times as long as a good read, unless the host asks for limited retry.
    """

    serial: str = "TL0000000001"
    model: str = "tierloop NVMe model"
    firmware: str = "1.0"
    queue_entries: int = 1024
    io_queues: int = 8
    vectors: int = 9
    mdts: int = 5
    doorbell_stride: int = 0
    volatile_cache: bool = True
    sgl: bool = True
    event_requests: int = 4
    aborts: int = 4
    error_entries: int = 64
    power_states: int = 2
    window: int = 64
    command_ns: int = 3_000
    admin_ns: int = 10_000
    flush_ns: int = 50_000
    ready_ns: int = 1_000_000
    shutdown_ns: int = 2_000_000
    recovery: int = 8
    warning_k: int = 343
    critical_k: int = 358

    def __post_init__(self) -> None:
        ranges = {
            "queue_entries": (2, 65536),
            "io_queues": (1, 65534),
            "vectors": (1, 2048),
            "mdts": (0, 16),
            "doorbell_stride": (0, 10),
            "event_requests": (1, 256),
            "aborts": (1, 256),
            "error_entries": (1, 256),
            "power_states": (1, 32),
            "window": (1, 65536),
            "recovery": (1, 1000),
            "warning_k": (1, 65535),
            "critical_k": (1, 65535),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)!r} is not in {low} … {high}")
        for name in ("command_ns", "admin_ns", "flush_ns", "ready_ns", "shutdown_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} is negative")
        for name, room in (("serial", 20), ("model", 40), ("firmware", 8)):
            text = getattr(self, name)
            if not (text.isascii() and text.isprintable() and 0 < len(text) <= room):
                raise ValueError(f"{name} = {text!r} is not 1 to {room} printable ASCII characters")

    @property
    def largest_transfer(self) -> int:
        """Bytes that one command may move; 0 for no limit."""
        return PAGE << self.mdts if self.mdts else 0


def controller_page(figures: NvmeFigures, namespaces: Sequence[Namespace]) -> bytes:
    """CNS 01h."""
    page = bytearray(IDENTIFY_NBYTES)
    struct.pack_into("<HH", page, 0, _VENDOR, _VENDOR)
    for at, text, room in ((4, figures.serial, 20), (24, figures.model, 40), (64, figures.firmware, 8)):
        page[at : at + room] = text.encode().ljust(room)
    struct.pack_into("<B3sBBHIII", page, 72, 3, b"\x00\x00\x00", 0, figures.mdts, 0, VERSION, 1_000_000, 2_000_000)
    page[111] = 1  # an I/O controller
    frmw, lpa = 0x03, 0x06  # one read-only slot; effects log, extended data of Get Log Page
    struct.pack_into("<HBBBBBB", page, 256, 0, figures.aborts - 1, figures.event_requests - 1, frmw, lpa,
                     figures.error_entries - 1, figures.power_states - 1)  # fmt: skip
    struct.pack_into("<HH", page, 266, figures.warning_k, figures.critical_k)
    page[280:296] = sum(ns.capacity for ns in namespaces).to_bytes(16, "little")
    page[512], page[513] = 0x66, 0x44
    struct.pack_into("<HIH", page, 514, min(figures.queue_entries, 0xFFFF), len(namespaces), _ONCS)
    page[525] = 0b110 | figures.volatile_cache  # Flush takes all namespaces at once
    struct.pack_into("<HH", page, 526, 255, 0)
    struct.pack_into("<I", page, 536, (1 | 1 << 16) if figures.sgl else 0)
    page[768:1024] = f"nqn.2024-01.org.tierloop:{figures.serial}".encode().ljust(256, b"\0")
    for state in range(figures.power_states):
        struct.pack_into("<HBBIIBBBB", page, 2048 + 32 * state, 1000 >> state, 0, 0, 0, 0, state, state, state, state)
    return bytes(page)


_ONCS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4
"""Compare, Write Uncorrectable, Dataset Management, Write Zeroes, the save and select fields of features."""


def namespace_page(figures: NvmeFigures, nsid: int, ns: Namespace) -> bytes:
    """CNS 00h."""
    page = bytearray(IDENTIFY_NBYTES)
    struct.pack_into("<QQQ", page, 0, ns.blocks, ns.blocks, ns.used_blocks)
    page[24] = 1 << 0 | 1 << 2  # the use says what is allocated; deallocated blocks can be made errors
    page[25] = len(_LBA_FORMATS) - 1
    page[26] = _LBA_FORMATS.index(ns.lba_nbytes.bit_length() - 1)
    page[33] = 0b1001  # deallocated blocks read as zeros; Write Zeroes may deallocate
    page[99] = ns.worn_out  # write protected, for whatever reason
    page[48:64] = ns.capacity.to_bytes(16, "little")
    identity = ns.identity(figures.serial, nsid)
    page[104:120], page[120:128] = identity, identity[8:]
    for i, shift in enumerate(_LBA_FORMATS):
        struct.pack_into("<HBB", page, 128 + 4 * i, 0, shift, 0)
    return bytes(page)


def independent_page(ns: Namespace) -> bytes:
    """CNS 08h: what holds of a namespace whatever its command set. It is ready as soon as the controller is."""
    page = bytearray(IDENTIFY_NBYTES)
    page[8] = ns.worn_out
    page[14] = 1
    return bytes(page)


def command_set_page() -> bytes:
    """CNS 05h and 06h of the NVM command set: protection of 16 bits, and no limit for commands without data."""
    return bytes(IDENTIFY_NBYTES)


def namespaces_page(after: int, namespaces: Sequence[Namespace]) -> bytes:
    """CNS 02h: the identifiers above `after`, rising, at most 1024."""
    ids = list(range(after + 1, len(namespaces) + 1))[:1024]
    return struct.pack(f"<{len(ids)}I", *ids).ljust(IDENTIFY_NBYTES, b"\0")


def descriptors_page(figures: NvmeFigures, nsid: int, ns: Namespace) -> bytes:
    """CNS 03h: EUI64, NGUID, and the command set."""
    identity = ns.identity(figures.serial, nsid)
    listed = ((1, identity[8:]), (2, identity), (4, b"\0"))
    raw = b"".join(struct.pack("<BBH", kind, len(value), 0) + value for kind, value in listed)
    return raw.ljust(IDENTIFY_NBYTES, b"\0")


def effects_page() -> bytes:
    """The log page of commands that are supported; those that change blocks say so."""
    page = bytearray(4096)
    for admin in Admin:
        struct.pack_into("<I", page, 4 * admin, 1)
    changing = (Io.WRITE, Io.WRITE_UNCORRECTABLE, Io.WRITE_ZEROES, Io.DATASET_MANAGEMENT)
    for io in Io:
        struct.pack_into("<I", page, 1024 + 4 * io, 1 | (2 if io in changing else 0))
    return bytes(page)


def firmware_page(figures: NvmeFigures) -> bytes:
    """The log page of firmware slots: one."""
    return (b"\x01".ljust(8, b"\0") + figures.firmware.encode().ljust(8)).ljust(512, b"\0")
