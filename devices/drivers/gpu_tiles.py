"""Tiles: consecutive rows cut into pieces of one size, so that one batched product meets all of them.

A *group* is a range of rows of one sequence and KV head that belong together: the rows of a root, or a list. It is cut
into tiles of at most `size` rows; a tile that is not full is padded with its last row, which then counts for nobody.
Tiles are worked on some thousands at a time (`chunks`), as far as there is room for what they need. What is uploaded
are tables of runs and of tiles; the row of every place of a tile is found on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_operands import Upload
from tierloop.devices.kernels.plan import Rows

Int64 = NDArray[np.int64]
LARGEST_TILE = 128
"""Rows: three counts of so many fit a float32 exactly (gpu_states.py), and sums over a tile stay short."""


class Tiles:
    """Groups, int64 (n, 4) with the columns (sequence, kv_head, low, high), cut into tiles of at most `size` rows."""

    def __init__(self, rows: Rows, groups: Int64, most_rows: int = LARGEST_TILE) -> None:
        self._rows = rows
        lengths = groups[:, 3] - groups[:, 2]
        mean = int(lengths.mean()) if len(lengths) else 1
        self.size = min(most_rows, max(1, 1 << (mean - 1).bit_length() if mean > 1 else 1))
        self.counts = -(-lengths // self.size)
        """Tiles of each group."""
        group = np.repeat(np.arange(len(groups)), self.counts)
        nth = np.arange(len(group)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        low = groups[group, 2] + nth * self.size
        self.table = np.stack([*groups[group, :2].T, low, np.minimum(groups[group, 3], low + self.size)])
        """int64 (4, tiles): sequence, KV head, first row, end."""

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def chunks(self, nbytes_per_tile: int, room: int) -> Iterator[tuple[int, int]]:
        """Ranges of tiles that may be worked on at once, where each needs so many of `room` bytes."""
        step = max(1, room // max(1, nbytes_per_tile))
        for low in range(0, len(self), step):
            yield low, min(len(self), low + step)

    def places(self, upload: Upload) -> Places:
        """The tables on the device."""
        return Places(self, self._rows, upload)


class Places:
    """Which row stands where: the tables of `Tiles`, uploaded."""

    def __init__(self, tiles: Tiles, rows: Rows, upload: Upload) -> None:
        self.size = tiles.size
        self.sequence, self.kv_head, self.low, self.end = upload(tiles.table)
        self._first_row = upload(rows.first_row)
        self._position = upload(np.ascontiguousarray(rows.runs[:, 2]))
        self._steps = torch.arange(tiles.size, device=self.low.device)

    def of(self, low: int, high: int) -> Chunk:
        """The rows of tiles [low, high)."""
        end = self.end[low:high, None]
        row = self.low[low:high, None] + self._steps
        inside = row < end
        row = torch.minimum(row, end - 1)
        run = torch.searchsorted(self._first_row[1:], row, right=True)
        within = row - self._first_row[run]
        return Chunk(
            self.sequence[low:high],
            self.kv_head[low:high],
            row,
            run,
            within,
            self._position[run] + within,
            inside,
        )

    def untiled(self, values: Tensor, total: int) -> Tensor:
        """What was made for every place, (tiles, size, …), for every row instead: (total, …). Tiles are in order."""
        row = torch.arange(total, device=values.device)
        tile = torch.searchsorted(self.low, row, right=True) - 1
        place = tile * self.size + row - self.low[tile]
        return values.reshape(-1, *values.shape[2:]).index_select(0, place)


class Chunk:
    """Of each tile its sequence and KV head, (tiles,); of each place its row, run, row within the run, position, and
    whether it holds a row at all, (tiles, size)."""

    __slots__ = ("inside", "kv_head", "position", "row", "run", "sequence", "within")

    def __init__(
        self,
        sequence: Tensor,
        kv_head: Tensor,
        row: Tensor,
        run: Tensor,
        within: Tensor,
        position: Tensor,
        inside: Tensor,
    ) -> None:
        self.sequence = sequence
        self.kv_head = kv_head
        self.row = row
        self.run = run
        self.within = within
        self.position = position
        self.inside = inside


def lists_of(rows: Rows) -> Int64:
    """The rows of each sequence and KV head as groups: int64 (n, 4)."""
    runs, first_row = rows.runs, rows.first_row
    if not len(runs):
        return np.empty((0, 4), dtype=np.int64)
    new = np.ones(len(runs), dtype=bool)
    new[1:] = (runs[1:, :2] != runs[:-1, :2]).any(axis=1)
    low = first_row[:-1][new]
    return np.concatenate([runs[new, :2], low[:, None], np.append(low[1:], rows.total)[:, None]], axis=1)
