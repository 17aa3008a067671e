"""The registers of an NVMe controller: names, offsets and fields, as NVMe 2.0 lays them out in a BAR.

A register is read and written at its own width, or at four bytes where it has eight. Anything else (other widths, odd
offsets) is what a host must not do; it reads as all ones and changes nothing.
"""

from __future__ import annotations

from tierloop.firmware_models.nvme_identify import VERSION, NvmeFigures

CAP, VS, INTMS, INTMC, CC, CSTS, NSSR, AQA, ASQ, ACQ = 0x00, 0x08, 0x0C, 0x10, 0x14, 0x1C, 0x20, 0x24, 0x28, 0x30
BPMBL, CMBMSC, CRTO = 0x48, 0x50, 0x68
DOORBELLS = 0x1000

ENABLE = 1
READY, FATAL = 1, 2
SHUTDOWN_NORMAL, SHUTDOWN_ABRUPT = 1, 2
SHUTDOWN_OCCURRING, SHUTDOWN_COMPLETE = 1, 2
LARGEST_PAGE_SHIFT = 4
"""CAP.MPSMAX: pages of up to 4096 · 2⁴ bytes."""


def capabilities(figures: NvmeFigures) -> int:
    """CAP: queues lie in one piece, weighted round robin is there, and so is the NVM command set.

    A controller that is ready has its media ready, too (CRMS), as every one of revision 2.0 can.
    """
    timeout = min(255, max(1, _half_seconds(max(figures.ready_ns, figures.shutdown_ns))))
    return (
        (figures.queue_entries - 1)
        | 1 << 16
        | 1 << 17
        | timeout << 24
        | figures.doorbell_stride << 32
        | 1 << 37
        | LARGEST_PAGE_SHIFT << 52
        | 1 << 59
    )


def ready_timeouts(figures: NvmeFigures) -> int:
    """CRTO: how long becoming ready with the media takes at most, in units of 500 ms."""
    return min(0xFFFF, max(1, _half_seconds(figures.ready_ns)))


def _half_seconds(ns: int) -> int:
    return -(-ns // 500_000_000)


def bits(word: int, high: int, low: int) -> int:
    """The field of a register."""
    return word >> low & ((1 << (high - low + 1)) - 1)


class Registers:
    """The registers that hold what was written. `cc`, `csts`, `aqa`, `asq`, `acq` and `mask` are their words."""

    def __init__(self, figures: NvmeFigures) -> None:
        self.cap = capabilities(figures)
        self.crto = ready_timeouts(figures)
        self.cc = self.csts = self.aqa = self.asq = self.acq = self.mask = 0

    def read(self, offset: int, nbytes: int) -> int:
        """The word at an offset; all ones where a host must not read."""
        ones = (1 << 8 * max(nbytes, 1)) - 1
        if nbytes not in (4, 8) or offset < 0 or offset % nbytes:
            return ones
        wide = {CAP: self.cap, ASQ: self.asq, ACQ: self.acq, BPMBL: 0, CMBMSC: 0}
        narrow = {VS: VERSION, INTMS: self.mask, INTMC: self.mask, CC: self.cc, CSTS: self.csts, AQA: self.aqa}
        narrow[CRTO] = self.crto
        if nbytes == 8:
            return wide.get(offset, ones)
        if offset & ~7 in wide:
            return wide[offset & ~7] >> 8 * (offset & 4) & 0xFFFFFFFF
        return narrow.get(offset, 0)

    def write(self, offset: int, nbytes: int, value: int) -> None:
        """Store into AQA, ASQ, ACQ (while the controller is disabled) and the interrupt mask; nothing elsewhere."""
        if nbytes == 4 and offset == INTMS:
            self.mask |= value & 0xFFFFFFFF
        elif nbytes == 4 and offset == INTMC:
            self.mask &= ~value
        elif self.cc & ENABLE or offset % nbytes:
            return
        elif nbytes == 4 and offset == AQA:
            self.aqa = value & 0x0FFF0FFF
        elif offset & ~7 == ASQ:
            self.asq = _stored(self.asq, offset, nbytes, value)
        elif offset & ~7 == ACQ:
            self.acq = _stored(self.acq, offset, nbytes, value)


def _stored(old: int, offset: int, nbytes: int, value: int) -> int:
    shift = 8 * (offset & 7)
    mask = ((1 << 8 * nbytes) - 1) << shift
    return (old & ~mask | value << shift & mask) & ~0xFFF
