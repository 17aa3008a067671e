"""Placements: which member of an interleave set holds which bytes of a region.

Three ways in which an operating system and the hardware spread a region over memories:

- `Striped`: granules by the address, as an HDM decoder does it (firmware_models/hdm.py);
- `Dealt`: pages dealt out in turn, so many to each member; the next region goes on where the last one ended;
- `Filled`: pages on one member until it is full, then on the next.

A placement says what it takes of every member (`shares`, in bytes) and how many bytes of some spans lie on each
(`bytes_on`), exactly, at a cost that does not grow with the length of a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, INTS, TABLE, kernel
from tierloop.firmware_models.hdm import Interleave
from tierloop.firmware_models.media import Ranges

PAGE_NBYTES = 4096


class Placement(Protocol):
    """Where a region's bytes are. `shares` are bytes per member, whole granules or pages."""

    shares: tuple[int, ...]

    def bytes_on(self, spans: Ranges) -> list[int]:
        """Bytes of these spans of the region on each member; int64 (n, 2), inside the region."""


class Striped:
    """A region that begins at `address`, a multiple of the stripe, in the range of an HDM decoder."""

    def __init__(self, decoder: Interleave, address: int, nbytes: int) -> None:
        self._decoder = decoder
        self._address = address if decoder.xormaps else 0  # modulo arithmetic repeats with every stripe
        stripes = -(-nbytes // decoder.stripe_nbytes)
        self.shares = (stripes * decoder.granule_nbytes,) * decoder.ways

    def bytes_on(self, spans: Ranges) -> list[int]:
        """See `Placement`."""
        if self._address:
            spans = spans.copy()
            spans[:, 0] += self._address
        counts: list[int] = self._decoder.bytes_per_way(spans).tolist()
        return counts


class Dealt:
    """Pages dealt by `table`, the members of one round in order; the region's first page is the round's `first`."""

    def __init__(self, table: NDArray[np.int64], members: int, first: int, nbytes: int) -> None:
        self._table = table
        self._members = members
        self._first = first
        pages = -(-nbytes // PAGE_NBYTES)
        self.next = (first + pages) % len(table)
        whole = np.array([[0, pages * PAGE_NBYTES]], dtype=np.int64)
        self.shares = tuple(self.bytes_on(whole))

    def bytes_on(self, spans: Ranges) -> list[int]:
        """See `Placement`."""
        counts: list[int] = _dealt(spans, self._table, self._members, self._first).tolist()
        return counts


class Filled:
    """Pages in order over the members, `pages` of them on each."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.shares = tuple(count * PAGE_NBYTES for count in pages)
        ends = np.cumsum(self.shares)
        self._ranges = [(int(end) - share, int(end)) for end, share in zip(ends, self.shares, strict=True)]

    def bytes_on(self, spans: Ranges) -> list[int]:
        """See `Placement`."""
        starts, ends = spans[:, 0], spans[:, 0] + spans[:, 1]
        return [int((ends.clip(low, high) - starts.clip(low, high)).sum()) for low, high in self._ranges]


@kernel(INT64[::1], TABLE, INTS, INT64, INT64)
def _dealt(spans: Ranges, table: NDArray[np.int64], members: int, first: int) -> NDArray[np.int64]:
    """Bytes per member: whole rounds, and the pages before and after them one by one."""
    made = np.zeros(members, dtype=np.int64)
    page = np.int64(PAGE_NBYTES)
    turns = np.int64(table.shape[0])
    round_nbytes = page * turns
    for row in range(spans.shape[0]):
        at = spans[row, 0] + first * page
        end = at + spans[row, 1]
        whole = end // round_nbytes - -(-at // round_nbytes)
        if whole > 0:
            for turn in range(turns):
                made[table[turn]] += whole * page
        while at < end:
            if whole > 0 and at % round_nbytes == 0:
                at += whole * round_nbytes
                whole = 0
                continue
            upto = min((at // page + 1) * page, end)
            made[table[at // page % turns]] += upto - at
            at = upto
    return made
