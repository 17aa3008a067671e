"""What a drive says of itself: its identity, and its health as the SMART log has it.

Both are read from tables of the drive (Identify, Get Log Page) and checked before anything is computed from them: a
size that cannot be is a ProtocolError, a format that the driver does not serve is Unsupported, both with what was
found. Numbers that are only shown are passed on as they stand.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tierloop.devices.errors import ProtocolError, Unsupported

_PAGE = 4096
"""The smallest memory page that the largest transfer is counted in; the register that says so is out of reach of a
process, and every controller that Linux drives has 4 KiB."""
_LARGEST_MDTS = 18
_SMALLEST_SHIFT, _LARGEST_SHIFT = 9, 16
_LARGEST_MEDIUM = 1 << 62
HEALTH_NBYTES = 512

_WARNINGS = (
    "the spare capacity has fallen below its threshold",
    "a temperature is outside its thresholds",
    "the reliability is degraded",
    "the media are read-only",
    "the backup of the volatile memory has failed",
    "the persistent memory region is read-only or unreliable",
)
_READ_ONLY = 1 << 3


@dataclass(frozen=True)
class Identity:
    """One namespace and the controller before it. Sizes in bytes; `mdts_nbytes` and `write_unit_nbytes` 0: unsaid.

    `deallocated_reads_zeros`: what was given back reads as zeros. `zeroes_may_deallocate`: Write Zeroes may give the
    blocks back. `thin`: the namespace may promise more blocks than there are.
    """

    model: str
    serial: str
    firmware: str
    nsid: int
    lba_nbytes: int
    capacity: int
    mdts_nbytes: int
    volatile_write_cache: bool
    write_zeroes: bool
    deallocate: bool
    deallocated_reads_zeros: bool
    zeroes_may_deallocate: bool
    thin: bool
    write_protected: bool
    write_unit_nbytes: int


@dataclass(frozen=True)
class Health:
    """The SMART log. Temperatures in K, bytes as the drive counts them (in steps of 512,000), times as named."""

    critical_warning: int
    temperature_k: int
    spare_percent: int
    spare_threshold_percent: int
    used_percent: int
    read_nbytes: int
    written_nbytes: int
    read_commands: int
    write_commands: int
    busy_minutes: int
    power_cycles: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int
    error_log_entries: int
    warm_minutes: int
    hot_minutes: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """The critical warnings in words."""
        return tuple(text for bit, text in enumerate(_WARNINGS) if self.critical_warning & 1 << bit)

    @property
    def read_only(self) -> bool:
        """Whether the drive takes no more writes."""
        return bool(self.critical_warning & _READ_ONLY)

    @classmethod
    def of(cls, log: bytes) -> Health:
        """Read the 512 bytes of the log."""
        warning, kelvin, spare, threshold, used = struct.unpack_from("<BHBBB", log)
        large = [int.from_bytes(log[at : at + 16], "little") for at in range(32, 192, 16)]
        read, written, reads, writes, busy, cycles, hours, unsafe, media, entries = large
        warm, hot = struct.unpack_from("<II", log, 192)
        return cls(
            *(warning, kelvin, spare, threshold, used, read * 512_000, written * 512_000, reads, writes),
            *(busy, cycles, hours, unsafe, media, entries, warm, hot),
        )


def identity_of(device: str, nsid: int, controller: bytes, namespace: bytes) -> Identity:
    """Read and check the two tables. Raises ProtocolError or Unsupported with what was found."""
    (optional,) = struct.unpack_from("<H", controller, 520)
    blocks, _, _ = struct.unpack_from("<QQQ", namespace)
    features = namespace[24]
    shift = _block_shift(device, namespace)
    if blocks == 0:
        raise ProtocolError(device, "identify", f"namespace {nsid} has 0 blocks: it is not active, or not formatted")
    if blocks << shift > _LARGEST_MEDIUM:
        raise ProtocolError(device, "identify", f"{blocks} blocks of {1 << shift} bytes are more than 2^62 bytes")
    mdts = controller[77]
    if mdts > _LARGEST_MDTS:
        raise ProtocolError(
            device, "identify", f"the largest transfer is 2^{mdts} pages (MDTS); up to 2^{_LARGEST_MDTS} can be"
        )
    unit = int.from_bytes(namespace[64:66], "little") + 1 if features & 0x10 else 0
    return Identity(
        model=_text(controller[24:64]),
        serial=_text(controller[4:24]),
        firmware=_text(controller[64:72]),
        nsid=nsid,
        lba_nbytes=1 << shift,
        capacity=blocks << shift,
        mdts_nbytes=_PAGE << mdts if mdts else 0,
        volatile_write_cache=bool(controller[525] & 1),
        write_zeroes=bool(optional & 1 << 3),
        deallocate=bool(optional & 1 << 2),
        deallocated_reads_zeros=namespace[33] & 7 == 1,
        zeroes_may_deallocate=bool(namespace[33] & 1 << 3),
        thin=bool(features & 1),
        write_protected=bool(namespace[99] & 1),
        write_unit_nbytes=unit << shift,
    )


def _block_shift(device: str, namespace: bytes) -> int:
    """The power of two of the block size, from the format in use."""
    last, layout = namespace[25], namespace[26]
    index = layout & 0x0F
    if last >= 16:  # the upper bits mean something only where there are more formats than the lower ones can name
        index |= (layout & 0x60) >> 1
    if index > max(last, 0) or index >= 64:
        raise ProtocolError(device, "identify", f"block format {index} is in use, and the last one is {last}")
    metadata, shift, _ = struct.unpack_from("<HBB", namespace, 128 + 4 * index)
    if metadata:
        where = ", at the end of each" if layout & 0x10 else ""
        detail = f"{metadata} bytes of metadata per block{where}; a format without is needed"
        raise Unsupported(device, "identify", detail)
    if not _SMALLEST_SHIFT <= shift <= _LARGEST_SHIFT:
        kind = ProtocolError if shift < _SMALLEST_SHIFT else Unsupported
        raise kind(
            device, "identify", f"blocks of 2^{shift} bytes; 2^{_SMALLEST_SHIFT} to 2^{_LARGEST_SHIFT} are served"
        )
    return int(shift)


def _text(raw: bytes) -> str:
    return raw.decode("ascii", "replace").strip(" \0")
