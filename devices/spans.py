"""Spans: where bytes lie inside a region, as one immutable value for any number of pieces.

A decode step touches 10⁴ to 10⁵ blocks, so a list of spans is one read-only int64 array of shape (n, 2) with the
columns (offset, nbytes), in bytes. The order of the rows matters: the bytes of a command are the rows end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LIMIT = 1 << 62


class Spans:
    """An immutable list of (offset, nbytes) pairs, in bytes.

    `array` is read-only int64 of shape (n, 2), `nbytes` the sum of the sizes, `end` the first byte that no span
    reaches: the smallest region that would hold them all. Raises ValueError for another shape, for numbers that are
    negative or not integers, and where an end or the sum reaches 2**62, so that none can overflow.
    """

    __slots__ = ("_count", "_hash", "array", "end", "nbytes")

    _count: int
    array: NDArray[np.int64]
    nbytes: int
    end: int

    def __init__(self, pairs: NDArray[np.int64] | Iterable[tuple[int, int]]) -> None:
        given = pairs if isinstance(pairs, np.ndarray) else np.array(list(pairs) or np.empty((0, 2), dtype=np.int64))
        self._fill(np.array(self._integers(given), dtype=np.int64, order="C"))

    def _fill(self, array: NDArray[np.int64]) -> None:
        if array.ndim != 2 or array.shape[1] != 2:
            raise ValueError(f"spans need shape (n, 2), got {array.shape}")
        n = array.shape[0]
        low = high = total = end = 0
        if n == 1:
            offset, total = array.tolist()[0]
            low, high, end = min(offset, total), max(offset, total), offset + total
        elif n:
            low, high = int(array.min()), int(array.max())
            if high < _LIMIT // (n + 1):
                total, end = int(array[:, 1].sum()), int((array[:, 0] + array[:, 1]).max())
            else:
                total, end = sum(array[:, 1].tolist()), max(o + n for o, n in array.tolist())
        if low < 0:
            raise ValueError("spans need offsets and sizes of at least 0")
        if end >= _LIMIT or total >= _LIMIT:
            raise ValueError(f"spans end at {end} and hold {total} bytes: both must be below 2**62")
        array.setflags(write=False)
        self.array = array
        self.nbytes = total
        self.end = end
        self._count = n
        self._hash: int | None = None

    @classmethod
    def one(cls, offset: int, nbytes: int) -> Spans:
        """A single span."""
        offset, nbytes = index(offset), index(nbytes)
        if not (0 <= offset < _LIMIT and 0 <= nbytes < _LIMIT):
            raise ValueError(f"a span needs an offset and a size from 0 to below 2**62, got {offset} and {nbytes}")
        return cls._of(np.array([[offset, nbytes]], dtype=np.int64))

    @classmethod
    def equal(cls, offsets: NDArray[np.int64], nbytes: int) -> Spans:
        """Spans of one size at the given int64 offsets (n,)."""
        array = np.empty((len(offsets), 2), dtype=np.int64)
        array[:, 0] = cls._integers(offsets)
        array[:, 1] = index(nbytes)
        return cls._of(array)

    @classmethod
    def _of(cls, array: NDArray[np.int64]) -> Spans:
        """Spans over an array that nobody else holds, without a copy."""
        made = cls.__new__(cls)
        made._fill(array)
        return made

    @staticmethod
    def _integers(given: NDArray[Any]) -> NDArray[Any]:
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(f"spans need integers, got {given.dtype}")
        return given

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.array.tobytes())
        return self._hash

    def __repr__(self) -> str:
        shown = ", ".join(f"[{o}, {o + n})" for o, n in self.array[:4].tolist())
        more = f", … {len(self) - 4} more" if len(self) > 4 else ""
        return f"Spans({shown}{more})"

    def __reduce__(self) -> tuple[type[Spans], tuple[Any]]:
        return Spans, (np.array(self.array),)
