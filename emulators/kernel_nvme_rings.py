"""What entries of an io_uring do on the nodes of an NVMe drive: transfers of the block device, and passthrough.

Reads, writes and syncs go to block nodes; an entry off the grid, or outside the registered buffer that it names, is
refused as Linux does. Passthrough commands (URING_CMD) go to the character nodes and need a ring with wide entries and
wide completions; their result is the NVMe status, and the second word of the completion is the command's result. What a
controller has in hand cannot be cancelled.
"""

from __future__ import annotations

import errno

from tierloop.devices.drivers.ring import DATASYNC, FSYNC, READ, WRITE
from tierloop.emulators.kernel import ModelKernel, Node
from tierloop.emulators.kernel_nvme_nodes import AdminNode, Asked, BlockNode, GenericNode
from tierloop.emulators.kernel_uring import (
    CQE32,
    READ_FIXED,
    SQE128,
    URING_CMD,
    WRITE_FIXED,
    ModelRing,
    Reply,
    Submission,
)

URING_IO, URING_ADMIN = 0xC0484E80, 0xC0484E82
_NOP = 0
_WIDE = SQE128 | CQE32
_FIXED = 1
_OPS = {READ: "read", READ_FIXED: "read", WRITE: "write", WRITE_FIXED: "write"}


def carry_out(kernel: ModelKernel, ring: ModelRing, submission: Submission, reply: Reply) -> None:
    """Begin an entry; `reply` is called when it has ended, at once if it is refused."""
    try:
        if submission.flags:
            raise OSError(errno.EINVAL, "no flags of entries are known here")
        if submission.opcode == _NOP:
            reply(0, 0)
            return
        node = kernel.node_of(submission.fd)
        if submission.opcode == URING_CMD:
            _command(ring, submission, node, reply)
        else:
            _transfer(ring, submission, node, reply)
    except OSError as error:
        reply(-(error.errno or errno.EIO), 0)


def _transfer(ring: ModelRing, submission: Submission, node: Node, reply: Reply) -> None:
    opcode = submission.opcode
    if opcode == FSYNC:
        if submission.op_flags & ~DATASYNC or submission.offset or submission.nbytes or submission.address:
            raise OSError(errno.EINVAL, "fsync of a part")
        op, address, nbytes = "sync", 0, 0
    elif opcode in _OPS:
        op, address, nbytes = _OPS[opcode], submission.address, submission.nbytes
        if submission.op_flags or submission.priority:
            raise OSError(errno.EOPNOTSUPP, "no flags of transfers are known here")
        if opcode in (READ_FIXED, WRITE_FIXED) and not ring.inside_buffer(submission, address, nbytes):
            raise OSError(errno.EFAULT, "outside the registered buffer")
    else:
        raise OSError(errno.EINVAL, f"opcode {opcode}")
    if not isinstance(node, BlockNode):
        raise OSError(errno.EINVAL, "not a block device")
    node.start(op, submission.offset, address, nbytes, lambda result: reply(result, 0))


def _command(ring: ModelRing, submission: Submission, node: Node, reply: Reply) -> None:
    kind = submission.offset & 0xFFFFFFFF
    if isinstance(node, BlockNode) or not isinstance(node, (GenericNode, AdminNode)):
        raise OSError(errno.EOPNOTSUPP, "no commands for this file")
    if ring.flags & _WIDE != _WIDE:
        raise OSError(errno.EOPNOTSUPP, "a command needs wide entries and completions")
    admin = isinstance(node, AdminNode)
    if kind != (URING_ADMIN if admin else URING_IO):
        raise OSError(errno.ENOTTY, f"command {kind:#x}")
    asked = Asked.of(submission.payload)
    if isinstance(node, GenericNode) and asked.nsid != node.nsid:
        raise OSError(errno.EINVAL, "a namespace that is not this one")
    if submission.op_flags & ~_FIXED:
        raise OSError(errno.EINVAL, "unknown flags of a command")
    if submission.op_flags & _FIXED and not ring.inside_buffer(submission, asked.address, asked.nbytes):
        raise OSError(errno.EFAULT, "outside the registered buffer")
    node.commands.start(asked, admin, reply)
