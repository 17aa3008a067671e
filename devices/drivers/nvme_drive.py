"""An NVMe drive behind an opened descriptor: what it is, how it is, and what that means for its owner.

Works on the generic character device and on the block device of a namespace alike, because the kernel passes
administrative commands of both on. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tierloop.devices.drivers.engines import Namespace, Target, room
from tierloop.devices.drivers.nvme_commands import (
    IDENTIFY_CONTROLLER,
    IDENTIFY_NAMESPACE,
    LOG_HEALTH,
    NVME_ID,
    NvmeCommand,
    get_log,
    identify,
)
from tierloop.devices.drivers.nvme_identity import HEALTH_NBYTES, Health, Identity, identity_of
from tierloop.devices.drivers.nvme_status import error_of
from tierloop.devices.drivers.passthrough import Judge, tried
from tierloop.devices.errors import DeviceError, Gone, ProtocolError, Timeout
from tierloop.devices.system import address_of

_TABLE_NBYTES = 4096


class Drive:
    """Asks the drive behind `target.fd`; `identity` was read and checked when it was made."""

    def __init__(self, target: Target) -> None:
        """Raises ProtocolError, Unsupported (a format), NoPermission, Gone, Timeout; OSError if it is no NVMe node."""
        self._target = target
        nsid = target.system.ioctl(target.fd, NVME_ID, bytearray(8))
        if not 1 <= nsid < 0xFFFFFFFF:
            raise ProtocolError(target.device, "open", f"namespace number {nsid:#x}; 1 to 0xfffffffe can be")
        self._judge = Judge(target, Namespace(nsid, 0, False))
        tables = [
            self._ask("identify", partial(identify, what, of), _TABLE_NBYTES)
            for what, of in ((IDENTIFY_CONTROLLER, 0), (IDENTIFY_NAMESPACE, nsid))
        ]
        self.identity: Identity = identity_of(target.device, nsid, *tables)

    def health(self) -> Health:
        """The SMART log as it is now. Raises NoPermission, Unsupported, Gone, Timeout."""
        return Health.of(self._ask("health", partial(get_log, LOG_HEALTH, HEALTH_NBYTES), HEALTH_NBYTES))

    def _ask(self, op: str, command_at: Callable[[int], NvmeCommand], nbytes: int) -> bytes:
        memory = room(self._target, _TABLE_NBYTES)
        command = command_at(address_of(memory))
        status = tried(self._target, self._judge, op, command, memory, admin=True)
        if status:
            raise error_of(self._target.device, op, status, "the drive refuses to say", optional=True)
        return memory[:nbytes]


def condition(drive: Drive | None, read_only: str = "") -> tuple[list[str], str]:
    """What an owner should know of a drive before using it, and why it takes no writes (empty: it does).

    `read_only` is what the kernel says of that. A log that may not be read is one of the things to know, and no error.
    """
    if drive is None:
        return [read_only] * bool(read_only), read_only
    locked = "the namespace is write protected" if drive.identity.write_protected else read_only
    try:
        health = drive.health()
    except (Gone, Timeout):
        raise
    except DeviceError as error:
        return [locked] * bool(locked) + [f"the drive's health is not known ({error.detail})"], locked
    warnings = [f"the drive warns: {warning}" for warning in health.warnings] + [locked] * bool(locked)
    worn_out = "the drive says that its media are read-only (critical warning); nothing can be written"
    return warnings, worn_out if health.read_only else locked
