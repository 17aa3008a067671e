"""States of roots: plan, share out, work, and merge what was cut, for `attend` and `combine`."""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types
from numpy.typing import NDArray

from tierloop.devices.kernels.compiled import INT64, TABLE, address_of, kernel, move_bytes
from tierloop.devices.kernels.contract import Attend, Combine, value_nbytes
from tierloop.devices.kernels.entries import ENTRIES, MERGE
from tierloop.devices.kernels.lanes import CODES
from tierloop.devices.kernels.merging import fold
from tierloop.devices.kernels.pace import new_counter
from tierloop.devices.kernels.plan import ROOT, SLOT, SPLIT, Rows
from tierloop.devices.kernels.pool import share, worthwhile
from tierloop.devices.kernels.splits import work_on_pieces

_ANY = np.zeros((1, 1), dtype=np.int64)


def states_of_roots(
    args: Attend | Combine,
    rows: Rows,
    values: tuple[int, NDArray[np.int64]],
    states: int,
    threads: int,
    *,
    keys: tuple[int, NDArray[np.int64]] | None = None,
    queries: int = 0,
    logits: int = 0,
    q_positions: NDArray[np.int64] = _ANY,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    scale: float = 1.0,
    window: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
) -> None:
    """Put the states of `args.roots` at address `states`; operands as in splits.work_on_pieces. Raises ValueError."""
    row_nbytes = value_nbytes(args.dtype, args.head_dim_v)
    threads = worthwhile(threads, rows.total * row_nbytes * args.q_len)
    pieces, num_partials = rows.pieces(args.roots, args.split_tokens, threads)
    num_queries = args.q_len * args.group
    partials_nbytes = num_partials * num_queries * (args.head_dim_v + 2) * 4
    scratch = new_counter(partials_nbytes)
    counter = address_of(scratch)
    partials = counter + scratch.nbytes - partials_nbytes
    key_base, key_spans = keys or values
    given = (
        counter, pieces, rows.runs, rows.first_row, key_base, key_spans, *values, queries, logits, q_positions,
        CODES[args.dtype], num_kv_heads, args.group, args.q_len, head_dim, args.head_dim_v, row_nbytes,
        args.split_tokens, scale, window, sink_tokens, softcap, ENTRIES, states, partials,
    )  # fmt: skip
    share(threads, partial(work_on_pieces, *given))
    if num_partials:
        _merge_partials(int(ENTRIES[MERGE]), pieces, partials, states, num_queries, args.head_dim_v)


@kernel(types.void, INT64, TABLE, INT64, INT64, INT64, INT64)
def _merge_partials(merge: int, pieces: NDArray[np.int64], partials: int, states: int, rows: int, dim: int) -> None:
    """Merge the partial results of each root that was cut, and put them into its place."""
    nbytes = rows * (dim + 2) * 4
    splits = pieces[:, SPLIT].copy()
    addresses = partials - (1 + pieces[:, SLOT]) * nbytes
    first = 0
    while first < pieces.shape[0]:
        last = first + 1
        while last < pieces.shape[0] and pieces[last, ROOT] == pieces[first, ROOT]:
            last += 1
        if pieces[first, SLOT] < 0:
            result = fold(merge, addresses, splits, first, last, rows, dim, 0)
            move_bytes(states + pieces[first, ROOT] * nbytes, result, nbytes)
        first = last
