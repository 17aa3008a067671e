"""attend, logits, combine, merge and score on a GPU, in torch (what they mean is kernels/contract.py).

Each function looks at a launch on the host, raises ValueError for what does not fit, and returns the work, to be done
on a stream: gather tiles of rows, one batched product for all of them, masks, and for states the softmax and the merge
below the roots. Products and sums are float32, whatever the rows are made of; queries stay float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_codes import as_float32, value_rows
from tierloop.devices.drivers.gpu_operands import Place, RowTable, Upload
from tierloop.devices.drivers.gpu_states import identity, merge_groups, states_of
from tierloop.devices.drivers.gpu_states import merge as merge_states
from tierloop.devices.drivers.gpu_tiles import LARGEST_TILE, Chunk, Tiles, lists_of
from tierloop.devices.kernels.contract import (
    ITEMSIZE,
    MOST,
    Attend,
    Combine,
    Logits,
    Merge,
    Score,
    summary_nbytes,
    value_nbytes,
    wrong_score,
)
from tierloop.devices.kernels.plan import HIGH, KV_HEAD, LOW, ROOT, SEQUENCE, Rows, positions_of

Int64 = NDArray[np.int64]
Work = Callable[[Tensor, Upload], None]
"""Carries a launch out on the current stream, given the slab."""


def attend(args: Attend, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """queries × keys × values → states."""
    key_nbytes, row_nbytes = args.head_dim * ITEMSIZE[args.dtype], value_nbytes(args.dtype, args.head_dim_v)
    rows = Rows(args.runs, reads[1], key_nbytes, args.num_sequences, args.num_kv_heads, (reads[2], row_nbytes))
    q_positions = positions_of(args)
    returned = Returned(args, rows, writes[0], min(args.split_tokens, LARGEST_TILE))
    queries, keys, values = Place(reads[0]), RowTable(reads[1][:, 0], key_nbytes), RowTable(reads[2][:, 0], row_nbytes)
    per_tile = returned.tiles.size * 4 * (2 * args.head_dim + 4 * args.head_dim_v + 6 * args.q_len * args.group)

    def work(slab: Tensor, upload: Upload) -> None:
        q, places = by_head(args, queries.load(slab, upload)), returned.tiles.places(upload)
        key_offsets, value_offsets, positions = upload(keys.offsets), upload(values.offsets), upload(q_positions)
        states = []
        for low, high in returned.tiles.chunks(per_tile, room):
            chunk = places.of(low, high)
            k = as_float32(keys.load(slab, key_offsets, chunk.run, chunk.within), args.dtype)
            s = _masked(args, _products(q, k, chunk), chunk, positions)
            v = value_rows(values.load(slab, value_offsets, chunk.run, chunk.within), args.dtype, args.head_dim_v)
            states.append(states_of(s, v, args.dtype == "int8"))
        returned.store(slab, states, upload)

    return work


def logits(args: Logits, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """queries × keys → logits, rows in the order of the runs."""
    key_nbytes = args.head_dim * ITEMSIZE[args.dtype]
    rows = Rows(args.runs, reads[1], key_nbytes, args.num_sequences, args.num_kv_heads)
    q_positions, tiles = positions_of(args), Tiles(rows, lists_of(rows))
    queries, keys, target = Place(reads[0]), RowTable(reads[1][:, 0], key_nbytes), Place(writes[0])
    per_tile = tiles.size * 4 * (2 * args.head_dim + 4 * args.q_len * args.group)

    def work(slab: Tensor, upload: Upload) -> None:
        if not len(tiles):
            return
        q, places = by_head(args, queries.load(slab, upload)), tiles.places(upload)
        key_offsets, positions = upload(keys.offsets), upload(q_positions)
        found = []
        for low, high in tiles.chunks(per_tile, room):
            chunk = places.of(low, high)
            k = as_float32(keys.load(slab, key_offsets, chunk.run, chunk.within), args.dtype)
            found.append(_masked(args, _products(q, k, chunk), chunk, positions).transpose(1, 2))
        target.store(slab, places.untiled(torch.cat(found), rows.total), upload)

    return work


def combine(args: Combine, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """logits × values → states."""
    row_nbytes = value_nbytes(args.dtype, args.head_dim_v)
    rows = Rows(args.runs, reads[1], row_nbytes, MOST, MOST)
    returned = Returned(args, rows, writes[0], min(args.split_tokens, LARGEST_TILE))
    given, values = Place(reads[0]), RowTable(reads[1][:, 0], row_nbytes)
    per_tile = returned.tiles.size * 4 * (4 * args.head_dim_v + 6 * args.q_len * args.group)

    def work(slab: Tensor, upload: Upload) -> None:
        every = given.load(slab, upload).view(torch.float32).view(-1, args.q_len * args.group)
        places, value_offsets = returned.tiles.places(upload), upload(values.offsets)
        states = []
        for low, high in returned.tiles.chunks(per_tile, room):
            chunk = places.of(low, high)
            s = torch.where(chunk.inside[..., None], every[chunk.row], -torch.inf).transpose(1, 2)
            v = value_rows(values.load(slab, value_offsets, chunk.run, chunk.within), args.dtype, args.head_dim_v)
            states.append(states_of(s, v, args.dtype == "int8"))
        returned.store(slab, states, upload)

    return work


def merge(args: Merge, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """states → output."""
    order, heads, counts = _merging_order(args)
    given, target = Place(reads[0]), Place(writes[0])
    sinks = Place(reads[1]) if args.has_sinks else None
    queries, dim = args.q_len * args.group, args.head_dim_v
    num_heads = args.num_sequences * args.num_kv_heads

    def work(slab: Tensor, upload: Upload) -> None:
        every = given.load(slab, upload).view(torch.float32).view(-1, queries, 2 + dim)
        states = identity(num_heads, queries, dim, slab.device)
        if len(heads):
            states[upload(heads)] = merge_groups(every[upload(order)], counts, upload)
        if sinks is not None:
            learned = identity(num_heads, queries, dim, slab.device)
            logit = sinks.load(slab, upload).view(torch.float32).view(1, args.num_kv_heads, 1, args.group)
            shape = (args.num_sequences, args.num_kv_heads, args.q_len, args.group)
            learned[..., 0] = logit.expand(shape).reshape(num_heads, queries)
            learned[..., 1] = torch.where(learned[..., 0] == -torch.inf, 0.0, 1.0)
            states = merge_states(states, learned)
        total = states[..., 1:2]
        output = torch.where(total == 0, 0.0, states[..., 2:] / total)
        output = output.view(args.num_sequences, args.num_kv_heads, args.q_len, args.group, dim)
        target.store(slab, output.transpose(1, 2), upload)

    return work


def score(args: Score, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """queries × summaries → scores. Quest's bound is one product: of the halves of q with minimum and maximum."""
    wrong = wrong_score(args)
    if wrong is not None:
        raise ValueError(wrong)
    nbytes, wide = summary_nbytes(args), args.head_dim * (2 if args.summary == "minmax" else 1)
    rows = Rows(args.runs, reads[1], nbytes, args.num_sequences, args.num_kv_heads)
    groups = lists_of(rows)
    tiles = Tiles(rows, groups)
    queries, summaries, target = Place(reads[0]), RowTable(reads[1][:, 0], nbytes), Place(writes[0])
    lengths = groups[:, 3] - groups[:, 2]

    def work(slab: Tensor, upload: Upload) -> None:
        if not len(tiles):
            return
        q, places = by_head(args, queries.load(slab, upload)), tiles.places(upload)
        if args.summary == "minmax":
            q = torch.cat([q.clamp(max=0), q.clamp(min=0)], dim=-1)
        offsets, found = upload(summaries.offsets), []
        for low, high in tiles.chunks(tiles.size * 4 * (2 * wide + 2 * args.group), room):
            chunk = places.of(low, high)
            x = as_float32(summaries.load(slab, offsets, chunk.run, chunk.within), args.dtype)
            found.append(_products(q, x, chunk).transpose(1, 2))
        each = places.untiled(torch.cat(found), rows.total)
        if args.reduce == "max":
            result = each.amax(dim=1)
        else:
            shares = _shares(args.scale * each, lengths, upload) if args.reduce == "softmax" else each
            result = shares[:, 0]
            for member in range(1, args.group):
                result = result + shares[:, member]
        target.store(slab, result, upload)

    return work


class Returned:
    """The roots of a launch: which rows each one has, and where its states go. Raises ValueError.

    `tiles` are of at most `most_rows` rows each; `borders` are rows that no tile reaches across.
    """

    def __init__(
        self, args: Attend | Combine, rows: Rows, target: Int64, most_rows: int, borders: Int64 | None = None
    ) -> None:
        pieces, _ = rows.pieces(args.roots, args.split_tokens, 1)
        pieces = pieces[pieces[:, LOW] < pieces[:, HIGH]]
        low = pieces[:, LOW] if borders is None else np.union1d(pieces[:, LOW], borders)
        which = np.searchsorted(pieces[:, LOW], low, side="right") - 1
        high = np.append(low, rows.total)[1:]
        self.tiles = Tiles(rows, np.column_stack([pieces[which][:, [SEQUENCE, KV_HEAD]], low, high]), most_rows)
        self._counts = np.bincount(which, self.tiles.counts, len(pieces)).astype(np.int64)
        self._roots = np.ascontiguousarray(pieces[:, ROOT])
        self._shape = (len(args.roots), args.q_len * args.group, args.head_dim_v)
        self._target = Place(target)

    def store(self, slab: Tensor, states: list[Tensor], upload: Upload) -> None:
        """Merge the states of all tiles below their roots, and put them into the target."""
        result = identity(*self._shape, slab.device)
        if states:
            result[upload(self._roots)] = merge_groups(torch.cat(states), self._counts, upload)
        self._target.store(slab, result, upload)


def by_head(args: Attend | Logits | Score, stored: Tensor) -> Tensor:
    """(num_sequences, num_kv_heads, q_len · group, head_dim)."""
    q_len = 1 if isinstance(args, Score) else args.q_len
    q = stored.view(torch.float32).view(args.num_sequences, q_len, args.num_kv_heads, args.group, args.head_dim)
    return q.permute(0, 2, 1, 3, 4).reshape(args.num_sequences, args.num_kv_heads, q_len * args.group, args.head_dim)


def _products(q: Tensor, x: Tensor, chunk: Chunk) -> Tensor:
    """Every query of its head with every row of a tile: (tiles, queries, size)."""
    return torch.bmm(q[chunk.sequence, chunk.kv_head], x.transpose(1, 2))


def _masked(args: Attend | Logits, products: Tensor, chunk: Chunk, q_positions: Tensor) -> Tensor:
    """Logits, −inf where a row does not count: (tiles, queries, size)."""
    s = args.scale * products
    if args.softcap:
        s = args.softcap * torch.tanh(s / args.softcap)
    query, row = q_positions[chunk.sequence][:, :, None], chunk.position[:, None, :]
    counts = (row <= query) & chunk.inside[:, None, :]
    if args.window:
        counts &= (query - row < args.window) | (row < args.sink_tokens)
    return torch.where(counts.repeat_interleave(args.group, dim=1), s, -torch.inf)


def _merging_order(args: Merge) -> tuple[Int64, Int64, Int64]:
    """The roots by head and split; the heads that have any, as sequence · num_kv_heads + head; how many each has.

    Raises ValueError.
    """
    roots = np.ascontiguousarray(args.roots, dtype=np.int64)
    if roots.ndim != 2 or roots.shape[1] != 4:
        raise ValueError(f"roots need shape (r, 4), got {roots.shape}")
    sequence, kv_head, level, index = roots.T
    node = (level >= 0) & (level < 63) & (index >= 0) & (index < np.int64(1) << (62 - np.clip(level, 0, 62)))
    head_there = (sequence >= 0) & (sequence < args.num_sequences) & (kv_head >= 0) & (kv_head < args.num_kv_heads)
    if not (node & head_there).all():
        raise ValueError(f"root {int((node & head_there).argmin())} is no tree node of a sequence and KV head")
    first, head = index << level, sequence * args.num_kv_heads + kv_head
    order = np.lexsort((first, head))
    end = (index + 1) << level
    inside = (head[order][1:] == head[order][:-1]) & (end[order][:-1] > first[order][1:])
    if inside.any():
        raise ValueError(f"root {int(order[1:][inside.argmax()])} lies inside another, or holds one")
    heads, counts = np.unique(head, return_counts=True)
    return order, heads, counts.astype(np.int64)


def _shares(s: Tensor, lengths: Int64, upload: Upload) -> Tensor:
    """Each row's share of the weight of its list, per q head: (rows, group). Lists are padded to the longest."""
    ends = np.cumsum(lengths)
    first = upload((ends - lengths).astype(np.int64))
    size = upload(lengths)
    steps = torch.arange(int(lengths.max()), device=s.device)
    inside = steps < size[:, None]
    row = torch.where(inside, first[:, None] + steps, 0)
    listed = torch.where(inside[..., None], s[row], -torch.inf)
    m = torch.where(torch.isnan(listed), -torch.inf, listed).amax(dim=1, keepdim=True)
    weights = torch.exp(listed - torch.where(m == -torch.inf, 0.0, m))
    total = weights.double().sum(dim=1, keepdim=True).float()
    shares = torch.where(total == 0, 0.0, weights / total)
    which = torch.repeat_interleave(torch.arange(len(lengths), device=s.device), size, output_size=len(s))
    return shares[which, torch.arange(len(s), device=s.device) - first[which]]
