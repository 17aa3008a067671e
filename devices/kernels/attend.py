"""attend: queries × K rows × V rows → states (contract.py)."""

from __future__ import annotations

import numpy as np

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.contract import ITEMSIZE, Attend
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows
from tierloop.devices.kernels.roots import states_of_roots


def attend(
    args: Attend, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs, spans, roots or positions do not fit each other."""
    operands = Operands(bytes_of)
    item = ITEMSIZE[args.dtype]
    keys, values = operands.rows(reads[1]), operands.rows(reads[2])
    rows = Rows(
        args.runs,
        keys[1],
        args.head_dim * item,
        args.num_sequences,
        args.num_kv_heads,
        (values[1], args.head_dim_v * item),
    )
    positions = np.ascontiguousarray(args.q_positions, dtype=np.int64)
    if positions.shape != (args.num_sequences, args.q_len):
        raise ValueError(f"q_positions need shape {(args.num_sequences, args.q_len)}, got {positions.shape}")
    states_of_roots(
        args, rows, values, operands.target(writes[0]), threads, keys=keys, queries=operands.source(reads[0]),
        q_positions=positions, num_kv_heads=args.num_kv_heads, head_dim=args.head_dim, scale=args.scale,
    )  # fmt: skip
    operands.finish()
