"""NVMe commands as Linux takes them from a process: through ioctl, and in the wide entries of an io_uring.

A command names a namespace, one run of host memory and six words. The kernel answers with the NVMe status of the
completion as a positive number (nvme_status.py), or with an errno if the command never reached the drive. Layouts and
numbers are those of linux/nvme_ioctl.h; opcodes and fields those of the NVMe 2.0 base and NVM command set.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tierloop.devices.system import System

NVME_ID, ADMIN_COMMAND, IO_COMMAND = 0x4E40, 0xC0484E41, 0xC0504E48
"""Requests: the namespace's number, an administrative command (72 bytes), a command of the namespace (80 bytes)."""
URING_IO = 0xC0484E80
"""The request that a ring's entry makes for a command of the namespace."""

FLUSH, WRITE, READ, WRITE_ZEROES, DATASET = 0x00, 0x01, 0x02, 0x08, 0x09
GET_LOG, IDENTIFY = 0x02, 0x06
IDENTIFY_NAMESPACE, IDENTIFY_CONTROLLER = 0, 1
LOG_ERRORS, LOG_HEALTH = 1, 2
ALL_NAMESPACES = 0xFFFFFFFF
DEALLOCATE = 1 << 25
"""In the third word of Write Zeroes: the blocks may be given back."""
DATASET_DEALLOCATE = 1 << 2
MOST_BLOCKS = 1 << 16
"""Blocks that one command names at most: its count has 16 bits and begins with 0 for one."""

PAYLOAD = struct.Struct("=BBHIIIQQII6III")
"""opcode, flags, reserved, namespace, cdw2, cdw3, metadata, address, metadata size, nbytes, cdw10 … cdw15, timeout in
ms (0: the kernel's), reserved. The administrative form has its result in place of the last word."""
RESULT = struct.Struct("=Q")
RANGE = struct.Struct("=IIQ")
"""One range of Dataset Management: attributes, blocks, first block."""
assert (PAYLOAD.size, RANGE.size) == (72, 16)


class NvmeCommand(NamedTuple):
    """One command; `address` and `nbytes` are its host memory, `words` cdw10 to cdw15."""

    opcode: int
    nsid: int
    address: int = 0
    nbytes: int = 0
    words: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)

    def fields(self) -> tuple[int, ...]:
        """What PAYLOAD packs."""
        return (self.opcode, 0, 0, self.nsid, 0, 0, 0, self.address, 0, self.nbytes, *self.words, 0, 0)


def on_blocks(opcode: int, nsid: int, first: int, blocks: int, address: int = 0, nbytes: int = 0) -> NvmeCommand:
    """Read, Write or Write Zeroes of `blocks` blocks from the block `first` on."""
    return NvmeCommand(opcode, nsid, address, nbytes, (first & 0xFFFFFFFF, first >> 32, blocks - 1, 0, 0, 0))


def identify(what: int, nsid: int, address: int) -> NvmeCommand:
    """Identify into 4096 bytes at the address."""
    return NvmeCommand(IDENTIFY, nsid, address, 4096, (what, 0, 0, 0, 0, 0))


def get_log(page: int, nbytes: int, address: int) -> NvmeCommand:
    """Get Log Page of the controller, from its beginning; nbytes is a multiple of 4."""
    count = nbytes // 4 - 1
    return NvmeCommand(
        GET_LOG, ALL_NAMESPACES, address, nbytes, (page | (count & 0xFFFF) << 16, count >> 16, 0, 0, 0, 0)
    )


def issue(system: System, fd: int, command: NvmeCommand, admin: bool = False) -> int:
    """Hand a command over and wait for its status, 0 for success; the memory stays the caller's. Raises OSError."""
    argument = bytearray(PAYLOAD.size if admin else PAYLOAD.size + RESULT.size)
    PAYLOAD.pack_into(argument, 0, *command.fields())
    return system.ioctl(fd, ADMIN_COMMAND if admin else IO_COMMAND, argument)
