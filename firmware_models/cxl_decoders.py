"""The HDM decoders of a CXL card: registers that say which host addresses it answers, and with which of its bytes.

The component registers are those of CXL 3.x (8.2.4): a capability array at 1000h that leads to the HDM decoder
capability. What must hold:

- Registers are 32 bits wide and aligned. A read elsewhere gives zeros, a write elsewhere changes nothing.
- A decoder is committed if the one below it is; if its base is not below that one's end; if base and size per way are
  multiples of 256 MiB and not zero; if ways, granule and target type are ones that the card has; and if the bytes that
  it takes (after its skip) are there, all of one partition. Otherwise it says *error not committed*.
- A committed decoder's registers do not change. It is given up by taking COMMIT back, unless it is locked or one above
  it is committed.
- Nothing is decoded until the decoders are enabled as a whole.

A card does not know which way of an interleave set it is: whatever is routed to it, it answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tierloop.firmware_models.cxl_part import GRAIN, CxlPart
from tierloop.firmware_models.hdm import ADDRESS_BITS, GRANULES, Interleave

CM = 0x1000
HDM = CM + 0x100
GLOBAL = HDM + 4
ENABLE = 1 << 1
LOCK, COMMIT, COMMITTED, NOT_COMMITTED, HOST_ONLY = (1 << bit for bit in range(8, 13))
ENCODED_WAYS = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 8: 3, 9: 6, 10: 12}
"""Ways by the value of the IW field."""
_GRID = 0xF0000000
_CONTROL = 0xFF | LOCK | COMMIT | HOST_ONLY
BASE, SIZE, CONTROL, SKIP = 0x10, 0x18, 0x20, 0x24
"""Where the registers of decoder 0 are, from HDM on; base, size and skip have a low and a high half."""
STRIDE = 0x20


class Decoder(NamedTuple):
    """A committed decoder: host addresses [base, base + nbytes), device addresses [dpa, dpa + nbytes // ways)."""

    number: int
    base: int
    nbytes: int
    ways: int
    granule_nbytes: int
    dpa: int
    skip: int
    locked: bool


class CxlDecoders:
    """The component registers of one card. `partitions` says where its partitions end, ascending."""

    def __init__(self, part: CxlPart, partitions: Callable[[], tuple[int, ...]]) -> None:
        self._part = part
        self._partitions = partitions
        self.reset()

    def reset(self) -> None:
        """Nothing is decoded; locks are gone."""
        count = self._part.decoders
        self._registers = [{BASE: 0, SIZE: 0, SKIP: 0, CONTROL: 0} for _ in range(count)]
        self._enabled = False
        self.committed: list[Decoder] = []
        self._sets: list[Interleave] = []

    def read(self, offset: int) -> int:
        """A register."""
        fixed = {
            CM: 1 | 1 << 16 | 1 << 20 | 1 << 24,
            CM + 4: 5 | 1 << 16 | (HDM - CM) << 20,
            HDM: self._capability(),
            GLOBAL: ENABLE if self._enabled else 0,
        }
        if offset in fixed:
            return fixed[offset]
        number, register, high = self._named(offset)
        return 0 if register is None else self._registers[number][register] >> 32 * high & 0xFFFFFFFF

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        value &= 0xFFFFFFFF
        if offset == GLOBAL:
            self._enabled = bool(value & ENABLE)
            return
        number, register, high = self._named(offset)
        if register is None:
            return
        kept = self._registers[number]
        if register == CONTROL:
            self._control(number, value)
        elif number >= len(self.committed):
            half = value if high else value & _GRID
            other = kept[register] & (0xFFFFFFFF if high else 0xFFFFFFFF << 32)
            kept[register] = other | half << 32 * high

    def translate(self, hpa: int) -> int | None:
        """The device address that a host address means here; None where nothing is decoded."""
        if not self._enabled:
            return None
        for decoder, interleave in zip(self.committed, self._sets, strict=True):
            if decoder.base <= hpa < decoder.base + decoder.nbytes:
                return decoder.dpa + interleave.decode(hpa - decoder.base)[1]
        return None

    @property
    def enabled(self) -> bool:
        """Whether anything is decoded at all."""
        return self._enabled

    def _capability(self) -> int:
        bits = self._part.decoders // 2 | 1 << 4 | 1 << 8 | 1 << 9
        return bits | self._part.ways_3_6_12 << 11 | self._part.ways_16 << 12

    def _named(self, offset: int) -> tuple[int, int | None, int]:
        """(decoder, register, upper half) of an offset; no register where there is none."""
        number, inside = divmod(offset - HDM - BASE, STRIDE)
        inside += BASE
        if not 0 <= number < self._part.decoders or offset % 4:
            return 0, None, 0
        if inside == CONTROL:
            return number, CONTROL, 0
        for register in (BASE, SIZE, SKIP):
            if inside in (register, register + 4):
                return number, register, (inside - register) // 4
        return 0, None, 0

    def _control(self, number: int, value: int) -> None:
        kept = self._registers[number]
        if number < len(self.committed):
            if not value & COMMIT and not self.committed[number].locked and number == len(self.committed) - 1:
                self.committed.pop()
                self._sets.pop()
                kept[CONTROL] = value & _CONTROL
            return
        kept[CONTROL] = value & _CONTROL
        if value & COMMIT:
            decoder = self._checked(number)
            kept[CONTROL] |= COMMITTED if decoder is not None else NOT_COMMITTED
            if decoder is not None:
                self.committed.append(decoder)
                self._sets.append(Interleave(decoder.ways, decoder.granule_nbytes))

    def _checked(self, number: int) -> Decoder | None:
        """What a decoder's registers describe, if it may be committed."""
        kept = self._registers[number]
        control, base, nbytes, skip = kept[CONTROL], kept[BASE], kept[SIZE], kept[SKIP]
        ways = ENCODED_WAYS.get(control >> 4 & 15)
        if number != len(self.committed) or not control & HOST_ONLY or ways is None or control & 15 >= len(GRANULES):
            return None
        if (ways % 3 == 0 and not self._part.ways_3_6_12) or (ways == 16 and not self._part.ways_16):
            return None
        below = self.committed[-1] if self.committed else None
        if nbytes == 0 or nbytes % (GRAIN * ways) or base + nbytes > 1 << ADDRESS_BITS:
            return None
        if below is not None and base < below.base + below.nbytes:
            return None
        dpa = skip if below is None else below.dpa + below.nbytes // below.ways + skip
        first = 0
        for end in self._partitions():
            if first <= dpa and dpa + nbytes // ways <= end:
                return Decoder(number, base, nbytes, ways, GRANULES[control & 15], dpa, skip, bool(control & LOCK))
            first = end
        return None
