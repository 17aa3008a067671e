"""Spans: where bytes lie inside a region, as one immutable value for any number of pieces.

A decode step touches 10⁴ to 10⁵ blocks, so a list of spans is one read-only int64 array of shape (n, 2) with the
columns (offset, nbytes), in bytes. The order of the rows matters: the bytes of a command are the rows end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Spans:
    """An immutable list of (offset, nbytes) pairs, in bytes.

    `array` is read-only int64 of shape (n, 2). Raises ValueError for negative numbers or another shape.
    """

    __slots__ = ("_end", "_hash", "array", "nbytes")

    array: NDArray[np.int64]
    nbytes: int
    _end: int

    def __init__(self, pairs: NDArray[np.int64] | Iterable[tuple[int, int]]) -> None:
        if isinstance(pairs, np.ndarray):
            array = np.array(pairs, dtype=np.int64, order="C")
        else:
            array = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        if array.ndim != 2 or array.shape[1] != 2:
            raise ValueError(f"spans need shape (n, 2), got {array.shape}")
        if array.size and int(array.min()) < 0:
            raise ValueError("spans need offsets and sizes of at least 0")
        array.setflags(write=False)
        self._fill(array)

    def _fill(self, array: NDArray[np.int64]) -> None:
        self.array = array
        n = array.shape[0]
        if n == 1:
            offset, nbytes = array.tolist()[0]
            self.nbytes = int(nbytes)
            self._end = int(offset + nbytes)
        elif n:
            self.nbytes = int(array[:, 1].sum())
            self._end = int((array[:, 0] + array[:, 1]).max())
        else:
            self.nbytes = 0
            self._end = 0
        self._hash: int | None = None

    @classmethod
    def one(cls, offset: int, nbytes: int) -> Spans:
        """A single span."""
        return cls(np.array([[offset, nbytes]], dtype=np.int64))

    @classmethod
    def equal(cls, offsets: NDArray[np.int64], nbytes: int) -> Spans:
        """Spans of one size at the given int64 offsets (n,)."""
        array = np.empty((len(offsets), 2), dtype=np.int64)
        array[:, 0] = offsets
        array[:, 1] = nbytes
        return cls(array)

    @property
    def end(self) -> int:
        """The first byte that no span reaches: the smallest region that would hold them all."""
        return self._end

    def __len__(self) -> int:
        return int(self.array.shape[0])

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
