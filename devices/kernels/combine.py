"""combine: logits + V rows → states (contract.py)."""

from __future__ import annotations

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.contract import Combine, value_nbytes
from tierloop.devices.kernels.operands import BytesOf, Operands
from tierloop.devices.kernels.plan import Rows, check_sizes
from tierloop.devices.kernels.roots import states_of_roots


def combine(
    args: Combine, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel. Raises ValueError where runs, spans or roots do not fit each other."""
    check_sizes(group=args.group, q_len=args.q_len, head_dim_v=args.head_dim_v)
    operands = Operands(bytes_of)
    values = operands.rows(reads[1])
    rows = Rows(args.runs, values[1], value_nbytes(args.dtype, args.head_dim_v))
    states_of_roots(args, rows, values, operands.target(writes[0]), threads, logits=operands.source(reads[0]))
    operands.finish()
