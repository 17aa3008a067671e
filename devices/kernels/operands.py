"""Operands: segments turned into addresses, for kernels that load by address.

The rows of an operand are a base address and a table of spans; several regions become one table of addresses. An
operand that must be in one piece (queries, states, logits) is used where it lies if it is one span, and is collected
or spread out otherwise. Every span is checked against the bytes of its region: nothing outside is ever touched.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, TABLE, address_of, kernel, move_bytes
from tierloop.devices.regions import Region

BytesOf = Callable[[Region], NDArray[np.uint8]]
"""Gives the whole array of a region: C-contiguous uint8 (nbytes,)."""

_NO_SPANS = np.empty((0, 2), dtype=np.int64)


class Operands:
    """Turns the operands of one launch into addresses, and keeps their arrays alive meanwhile."""

    __slots__ = ("_bytes_of", "_held", "_spread")

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._held: list[NDArray[np.uint8]] = []
        self._spread: list[tuple[NDArray[np.uint8], Operand]] = []

    def _address(self, region: Region, end: int) -> int:
        array = self._bytes_of(region)
        if end > array.nbytes:
            raise ValueError(f"a span ends at byte {end} of {region}, which has {array.nbytes}")
        self._held.append(array)
        return address_of(array)

    def rows(self, operand: Operand) -> tuple[int, NDArray[np.int64]]:
        """A base address and int64 (n, 2) spans from it: (offset, nbytes)."""
        if len(operand) == 1:
            region, spans = operand[0]
            return self._address(region, spans.end), spans.array
        tables = []
        for region, spans in operand:
            table = spans.array.copy()
            table[:, 0] += self._address(region, spans.end)
            tables.append(table)
        return 0, np.concatenate(tables) if tables else _NO_SPANS

    def source(self, operand: Operand) -> int:
        """The address of the operand's bytes in one piece, to read."""
        if len(operand) == 1 and len(operand[0].spans) == 1:
            region, spans = operand[0]
            return self._address(region, spans.end) + spans.end - spans.nbytes
        base, table = self.rows(operand)
        whole = np.empty(sum(segment.spans.nbytes for segment in operand), dtype=np.uint8)
        self._held.append(whole)
        move_spans(address_of(whole), np.array([[0, whole.nbytes]]), base, table)
        return address_of(whole)

    def target(self, operand: Operand) -> int:
        """The address of the operand's bytes in one piece, to write; `finish` brings them where they belong."""
        if len(operand) == 1 and len(operand[0].spans) == 1:
            return self.source(operand)
        whole = np.empty(sum(segment.spans.nbytes for segment in operand), dtype=np.uint8)
        self._held.append(whole)
        self._spread.append((whole, operand))
        return address_of(whole)

    def finish(self) -> None:
        """Store what was written in one piece for operands that lie in several."""
        for whole, operand in self._spread:
            base, table = self.rows(operand)
            move_spans(base, table, address_of(whole), np.array([[0, whole.nbytes]]))


@kernel(types.void, INT64, TABLE, INT64, TABLE)
def move_spans(
    target_base: int, target_spans: NDArray[np.int64], source_base: int, source_spans: NDArray[np.int64]
) -> None:
    """Copy bytes between two lists of spans that may be cut differently; stops where the shorter one ends."""
    i, j = 0, 0
    written, taken = 0, 0
    while i < target_spans.shape[0] and j < source_spans.shape[0]:
        room, left = target_spans[i, 1] - written, source_spans[j, 1] - taken
        count = min(room, left)
        move_bytes(target_base + target_spans[i, 0] + written, source_base + source_spans[j, 0] + taken, count)
        written += count
        taken += count
        if count == room:
            i, written = i + 1, 0
        if count == left:
            j, taken = j + 1, 0
