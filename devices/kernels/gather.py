"""gather: scattered rows → one dense run (contract.py)."""

from __future__ import annotations

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.operands import BytesOf, Operands, move_spans


def gather(
    args: object, reads: tuple[Operand, ...], writes: tuple[Operand, ...], bytes_of: BytesOf, threads: int
) -> None:
    """Carry out the kernel: bytes end to end, whatever the spans."""
    operands = Operands(bytes_of)
    source, target = operands.rows(reads[0]), operands.rows(writes[0])
    move_spans(*target, *source)
