"""Operands on a GPU: spans of regions turned into indices of one slab of bytes.

All regions of a GPU lie in one slab, a torch.uint8 tensor. A place is an operand's spans as offsets in it. What lies in
one piece is used where it is; scattered spans are collected, and spread out again, by an index of *units*: the largest
power of two of bytes that every span begins and ends on, so that rows of 256 bytes on their grid cost one index each.
The index is made on the device from a table of spans, which is all that is uploaded; nothing loops over rows.

Work is done on the current stream of whoever calls, which is the accelerator's business (gpu_runtime.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.commands import Operand
from tierloop.devices.regions import Region

Int64 = NDArray[np.int64]
Upload = Callable[[Int64], Tensor]
"""Brings an int64 array to the device, on the current stream."""

LARGEST_UNIT = 4096
"""Slabs hold a whole number of these."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def spans_of(operand: Operand, offset_of: Mapping[Region, int]) -> Int64:
    """The operand's spans in the slab: int64 (n, 2), offset and bytes. Empty ones stay: rows are counted by span."""
    tables = []
    for region, spans in operand:
        table = spans.array.copy()
        table[:, 0] += offset_of[region]
        tables.append(table)
    if len(tables) == 1:
        return tables[0]
    return np.concatenate(tables) if tables else np.empty((0, 2), dtype=np.int64)


def unit_of(*numbers: Int64 | int) -> int:
    """The largest power of two, at most 4096, that divides all of them."""
    joined = LARGEST_UNIT
    for number in numbers:
        joined |= int(np.bitwise_or.reduce(number, axis=None)) if isinstance(number, np.ndarray) else number
    return joined & -joined


def in_units(slab: Tensor, unit: int) -> Tensor:
    """The slab as rows of one unit each, in the widest words that there are."""
    word = min(unit, 8)
    return slab.view(_WORDS.get(word, torch.int64)).view(-1, unit // word)


class Place:
    """Where the bytes of one operand lie in a slab: (n, 2) spans, none of them outside."""

    def __init__(self, spans: Int64) -> None:
        self.spans = spans = spans[spans[:, 1] > 0]
        self.nbytes = int(spans[:, 1].sum())
        self.start = int(spans[0, 0]) if len(spans) else 0
        self.in_one_piece = bool((spans[:-1].sum(axis=1) == spans[1:, 0]).all())

    def load(self, slab: Tensor, upload: Upload) -> Tensor:
        """The bytes end to end: uint8 (nbytes,), aligned for every type; may be the slab itself where it lies."""
        if self.in_one_piece:
            bytes_ = slab[self.start : self.start + self.nbytes]
            return bytes_ if self.start % 8 == 0 else bytes_.clone()
        unit = unit_of(self.spans)
        return in_units(slab, unit).index_select(0, self._index(unit, upload)).view(-1).view(torch.uint8)

    def store(self, slab: Tensor, data: Tensor, upload: Upload) -> None:
        """Put bytes into the spans, in order; `data` is a tensor of so many, in the slab, beside it or on the host."""
        data = data.contiguous().view(-1).view(torch.uint8)
        inside = data.data_ptr() - slab.data_ptr()
        if self.in_one_piece:
            if -self.nbytes < inside - self.start < self.nbytes:
                data = data.clone()
            slab[self.start : self.start + self.nbytes].copy_(data, non_blocking=True)
            return
        data = data.clone() if 0 <= inside < slab.numel() else data.to(slab.device, non_blocking=True)
        unit = unit_of(self.spans)
        words = in_units(slab, unit)
        words.index_copy_(0, self._index(unit, upload), data.view(words.dtype).view(-1, words.shape[1]))

    def part(self, low: int, high: int) -> Place:
        """The place of bytes [low, high) of the operand."""
        ends = np.cumsum(self.spans[:, 1])
        first, last = int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(ends, high, side="left"))
        spans = self.spans[first : last + 1].copy()
        if len(spans):
            begin = int(ends[first] - self.spans[first, 1])
            spans[-1, 1] -= int(ends[min(last, len(ends) - 1)]) - high
            spans[0, 0] += low - begin
            spans[0, 1] -= low - begin
        return Place(spans)

    def _index(self, unit: int, upload: Upload) -> Tensor:
        """The unit of every unit of the operand: int64 (nbytes / unit,)."""
        units = self.spans // unit
        if (units[:, 1] == units[0, 1]).all():
            each = int(units[0, 1])
            first = upload(np.ascontiguousarray(units[:, 0]))
            return (first[:, None] + torch.arange(each, device=first.device)).view(-1)
        table = np.zeros((2, len(units)), dtype=np.int64)
        table[0] = np.cumsum(units[:, 1])
        table[1] = units[:, 0] - (table[0] - units[:, 1])
        ends, shift = upload(table)
        which = torch.arange(int(table[0, -1]), device=ends.device)
        span = torch.searchsorted(ends, which, right=True)
        index: Tensor = which + shift.index_select(0, span)
        return index


class RowTable:
    """The rows of runs, by number: run i holds rows first_row[i] … first_row[i + 1] − 1, from `offsets[i]` on."""

    def __init__(self, offsets: Int64, row_nbytes: int) -> None:
        self.offsets = np.ascontiguousarray(offsets)
        self.row_nbytes = row_nbytes
        self.unit = unit_of(self.offsets, row_nbytes)

    def load(self, slab: Tensor, offsets: Tensor, run: Tensor, within: Tensor) -> Tensor:
        """Rows as bytes: uint8 (*run.shape, row_nbytes); `run` and `within` say which row of which run.

        `offsets` is the table's own, uploaded.
        """
        each = self.row_nbytes // self.unit
        first = (offsets[run] + within * self.row_nbytes) // self.unit
        index = first[..., None] + torch.arange(each, device=first.device)
        words = in_units(slab, self.unit).index_select(0, index.view(-1))
        return words.view(-1).view(torch.uint8).view(*run.shape, self.row_nbytes)
