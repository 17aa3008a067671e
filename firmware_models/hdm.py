"""An HDM decoder: which device of an interleave set holds a host address, and where.

What a CXL host bridge, switch and device agree on (CXL 3.x: HDM decoder registers, and the fixed memory window and XOR
interleave math structures of the CEDT). An address is an offset from the decoder's base, `index` = offset // granule:

- Ways are 2ᵏ or 3·2ᵏ, granules 256 B to 16 KiB. The way is index mod ways, the device's granule is index // ways: with
  3·2ᵏ ways the k low bits of the index stay as they are, and what is above them is divided by three.
- With XOR arithmetic each of the k low bits of the index is replaced, before that, by the parity of those bits of the
  offset that its XOR map names. A map's lowest bit is the bit that it replaces. So addresses that are a power of two
  apart do not all fall on one device. With 1 and 3 ways there is nothing to replace.

The maps belong to a platform (firmware hands them to the operating system). Where none are given, a way bit is the
parity of every k-th bit of the offset from itself upwards: the index folded into k bits.

`ways` granules from a multiple of ways · granule on, a *stripe*, lie on every device once, in both arithmetics. So the
bytes per way of a span of any length follow from its whole stripes and its two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, kernel
from tierloop.firmware_models.media import Ranges

WAYS = (1, 2, 3, 4, 6, 8, 12, 16)
GRANULES = tuple(256 << i for i in range(7))
"""Granules in bytes, 256 B to 16 KiB."""
ARITHMETICS = ("modulo", "xor")
ADDRESS_BITS = 52
"""Addresses of a host are below 2⁵²."""
_LAST = 1 << 62
"""What offsets and their sums stay below, as in `Spans`."""


class Interleave:
    """The set that one decoder describes. Raises ValueError for what no decoder can be programmed to.

    `xormaps` (XOR arithmetic only) are k masks of offset bits, k = log2 of the power of two in `ways`.
    """

    def __init__(
        self,
        ways: int,
        granule_nbytes: int = 256,
        arithmetic: Literal["modulo", "xor"] = "modulo",
        xormaps: Sequence[int] | None = None,
    ) -> None:
        if isinstance(ways, (bool, float)) or ways not in WAYS:
            raise ValueError(f"{ways!r} ways; an HDM decoder has {', '.join(map(str, WAYS))}")
        if isinstance(granule_nbytes, (bool, float)) or granule_nbytes not in GRANULES:
            raise ValueError(f"a granule of {granule_nbytes!r} bytes; allowed: {', '.join(map(str, GRANULES))}")
        if arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic {arithmetic!r}; allowed: {' or '.join(ARITHMETICS)}")
        self.ways = int(ways)
        self.granule_nbytes = int(granule_nbytes)
        self.arithmetic = arithmetic
        self._shift = self.granule_nbytes.bit_length() - 1
        self._bits = (self.ways & -self.ways).bit_length() - 1
        if xormaps is None:
            xormaps = self._folded() if arithmetic == "xor" else ()
        elif arithmetic != "xor":
            raise ValueError("xormaps were given, but the arithmetic is modulo")
        self.xormaps = tuple(self._checked(number, mask) for number, mask in enumerate(xormaps))
        if arithmetic == "xor" and len(self.xormaps) != self._bits:
            raise ValueError(f"{len(self.xormaps)} xormaps; {self.ways} ways need {self._bits}")
        self._masks = np.array(self.xormaps, dtype=np.int64)

    @property
    def stripe_nbytes(self) -> int:
        """Bytes that lie on all devices equally: ways · granule."""
        return self.ways * self.granule_nbytes

    def decode(self, offset: int) -> tuple[int, int]:
        """(way, offset on that device) of an offset from the decoder's base. Raises ValueError."""
        if not 0 <= offset < 1 << ADDRESS_BITS:
            raise ValueError(f"offset {offset}; allowed: 0 to below 2**{ADDRESS_BITS}")
        granule, way = divmod(self._exclusive(offset >> self._shift, offset), self.ways)
        return way, granule * self.granule_nbytes + offset % self.granule_nbytes

    def encode(self, way: int, device_offset: int) -> int:
        """The offset from the decoder's base that decodes to this way and offset. Raises ValueError."""
        if not 0 <= way < self.ways:
            raise ValueError(f"way {way}; allowed: 0 to {self.ways - 1}")
        limit = (1 << ADDRESS_BITS) // self.stripe_nbytes * self.granule_nbytes  # of whole stripes
        if not 0 <= device_offset < limit:
            raise ValueError(f"offset {device_offset} on a device; allowed: 0 to below {limit}")
        granule, rest = divmod(device_offset, self.granule_nbytes)
        index = granule * self.ways + way
        for bit in reversed(range(len(self.xormaps))):  # a map names no bit below its own: the highest is known first
            others = (index << self._shift) & self.xormaps[bit] & ~(1 << self._shift + bit)
            index ^= (others.bit_count() & 1) << bit
        return index * self.granule_nbytes + rest

    def bytes_per_way(self, spans: Ranges) -> NDArray[np.int64]:
        """How many bytes of these spans lie on each device: int64 (ways,).

        `spans` is int64 (n, 2), (offset, nbytes) from the decoder's base. The cost does not depend on their length.
        Raises ValueError for another shape or type, and for offsets, sizes, ends and sums outside 0 to below 2⁶².
        """
        if not isinstance(spans, np.ndarray) or spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2:
            given = f"{spans.dtype} {spans.shape}" if isinstance(spans, np.ndarray) else type(spans).__name__
            raise ValueError(f"spans need to be int64 (n, 2), got {given}")
        made = _bytes_per_way(spans, self.ways, self._shift, self._masks)
        if made[0] < 0:
            raise ValueError("spans need offsets and sizes of at least 0, and ends and sums below 2**62")
        return made

    def _exclusive(self, index: int, offset: int) -> int:
        """The index with its low bits replaced as the maps say."""
        for bit, mask in enumerate(self.xormaps):
            index = index & ~(1 << bit) | ((offset & mask).bit_count() & 1) << bit
        return index

    def _folded(self) -> list[int]:
        return [
            sum(1 << bit for bit in range(self._shift + low, ADDRESS_BITS, self._bits)) for low in range(self._bits)
        ]

    def _checked(self, number: int, mask: int) -> int:
        lowest = 1 << self._shift + number
        if isinstance(mask, bool) or not isinstance(mask, int) or not 0 < mask < 1 << ADDRESS_BITS:
            raise ValueError(f"xormap {number} is {mask!r}; allowed: a mask of bits below {ADDRESS_BITS}")
        if mask & -mask != lowest:
            raise ValueError(f"the lowest bit of xormap {number} is {mask & -mask:#x}; it has to be {lowest:#x}")
        return mask


@kernel(INT64[::1], TABLE, INT64, INT64, INTS)
def _bytes_per_way(spans: Ranges, ways: int, shift: int, masks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes per way; [0] is -1 if the spans are wrong."""
    made = np.zeros(ways, dtype=np.int64)
    granule = np.int64(1) << shift
    stripe = granule * ways
    total = np.int64(0)
    for row in range(spans.shape[0]):
        at = spans[row, 0]
        nbytes = spans[row, 1]
        if at < 0 or nbytes < 0 or at >= _LAST - nbytes or total >= _LAST - nbytes:
            made[0] = -1
            return made
        total += nbytes
        end = at + nbytes
        whole = end // stripe - -(-at // stripe)
        if whole > 0:
            for way in range(ways):
                made[way] += whole * granule
        while at < end:
            if whole > 0 and at % stripe == 0:
                at += whole * stripe
                whole = 0
                continue
            index = at >> shift
            upto = min((index + 1) << shift, end)
            for bit in range(masks.shape[0]):
                parity = at & masks[bit]
                for fold in (32, 16, 8, 4, 2, 1):
                    parity ^= parity >> fold
                index = (index & ~(np.int64(1) << bit)) | ((parity & 1) << bit)
            made[index % ways] += upto - at
            at = upto
    return made
