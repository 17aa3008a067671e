"""merge: states → attention output, by the fixed tree (contract.py). The states themselves stay as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.compiled import INT64, INTS, PAIR, TABLE, address_of, kernel, store_float
from tierloop.devices.kernels.contract import Merge
from tierloop.devices.kernels.entries import ENTRIES, MERGE
from tierloop.devices.kernels.merging import fold, fold_nbytes, put_output
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import check_sizes

_OUT_OF_ORDER = 2
_FAULTS = ("", "root {0} is no tree node of a sequence and KV head", "", "root {0} lies inside another, or holds one")


@kernel(PAIR, INT64, TABLE, INTS, *(INT64,) * 9)
def _merge_all(
    merge_rows: int,
    roots: NDArray[np.int64],
    order: NDArray[np.int64],
    states: int,
    scratch: int,
    num_sequences: int,
    num_kv_heads: int,
    group: int,
    q_len: int,
    dim: int,
    sinks: int,
    output: int,
) -> tuple[int, int]:
    """Returns (0, 0), or a fault and the root that has it."""
    rows = group * q_len
    nbytes = rows * (dim + 2) * 4
    places, splits = np.empty(order.shape[0], np.int64), np.empty(order.shape[0], np.int64)
    for i in range(order.shape[0]):
        root = order[i]
        sequence, kv_head, level, index = roots[root, 0], roots[root, 1], roots[root, 2], roots[root, 3]
        if not (0 <= sequence < num_sequences and 0 <= kv_head < num_kv_heads and 0 <= level < 63):
            return 1, root
        if not 0 <= index < (1 << (62 - level)):
            return 1, root
        places[i], splits[i] = states + root * nbytes, index << level
        if i:
            before = order[i - 1]
            if roots[before, 0] > sequence or (roots[before, 0] == sequence and roots[before, 1] > kv_head):
                return 2, root
            if roots[before, 0] == sequence and roots[before, 1] == kv_head:
                if splits[i - 1] > splits[i]:
                    return 2, root
                if (roots[before, 3] + 1) << roots[before, 2] > splits[i]:
                    return 3, root
    for i in range(num_sequences * num_kv_heads * rows * dim):
        store_float(output + 4 * i, 0.0)
    first = 0
    while first < order.shape[0]:
        sequence, kv_head = roots[order[first], 0], roots[order[first], 1]
        last = first + 1
        while last < order.shape[0] and roots[order[last], 0] == sequence and roots[order[last], 1] == kv_head:
            last += 1
        merged = fold(merge_rows, places, splits, first, last, rows, dim, scratch)
        for q in range(q_len):
            row = ((sequence * q_len + q) * num_kv_heads + kv_head) * group
            sink = sinks + 4 * kv_head * group if sinks else 0
            put_output(output + row * dim * 4, merged + q * group * (dim + 2) * 4, group, dim, sink)
        first = last
    return 0, 0


def merge(
    args: Merge, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError if a root is no tree node or lies inside another."""
    check_sizes(group=args.group, q_len=args.q_len, head_dim_v=args.head_dim_v)
    roots = np.ascontiguousarray(args.roots, dtype=np.int64)
    if roots.ndim != 2 or roots.shape[1] != 4:
        raise ValueError(f"roots need shape (r, 4), got {roots.shape}")
    operands = Operands(bytes_of)
    states, output = operands.source(reads[0]), operands.target(writes[0])
    sinks = operands.source(reads[1]) if args.has_sinks else 0
    scratch = np.empty(fold_nbytes(args.q_len * args.group, args.head_dim_v), dtype=np.uint8)
    order = np.arange(len(roots))
    for last_try in (False, True):
        fault, root = _merge_all(
            int(ENTRIES[MERGE]), roots, order, states, address_of(scratch), args.num_sequences, args.num_kv_heads,
            args.group, args.q_len, args.head_dim_v, sinks, output,
        )  # fmt: skip
        if not fault:
            break
        if fault != _OUT_OF_ORDER or last_try:
            raise ValueError(_FAULTS[fault].format(root))
        order = np.lexsort((roots[:, 3] << np.clip(roots[:, 2], 0, 62), roots[:, 1], roots[:, 0]))
    operands.finish()
