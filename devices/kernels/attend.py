"""attend: queries × K rows × V rows → states (contract.py)."""

from __future__ import annotations

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.contract import ITEMSIZE, Attend, value_nbytes
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes, positions_of
from tierloop.devices.kernels.roots import states_of_roots


def attend(
    args: Attend, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs, spans, roots or positions do not fit each other."""
    check_sizes(group=args.group, q_len=args.q_len, head_dim=args.head_dim, head_dim_v=args.head_dim_v)
    operands = Operands(bytes_of)
    item = ITEMSIZE[args.dtype]
    keys, values = operands.rows(reads[1]), operands.rows(reads[2])
    rows = Rows(
        args.runs,
        keys[1],
        args.head_dim * item,
        args.num_sequences,
        args.num_kv_heads,
        (values[1], value_nbytes(args.dtype, args.head_dim_v)),
    )
    states_of_roots(
        args, rows, values, operands.target(writes[0]), threads, keys=keys, queries=operands.source(reads[0]),
        q_positions=positions_of(args), num_kv_heads=args.num_kv_heads, head_dim=args.head_dim, scale=args.scale,
        window=args.window, sink_tokens=args.sink_tokens, softcap=args.softcap,
    )  # fmt: skip
    operands.finish()
