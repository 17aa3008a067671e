"""What the nvme driver could do with a path, without changing anything: for `doctor`."""

from __future__ import annotations

from contextlib import ExitStack

from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.nvme_drive import condition
from tierloop.devices.drivers.opening import open_medium
from tierloop.devices.drivers.options import A_PATH, is_path
from tierloop.devices.drivers.passthrough import CommandEntries
from tierloop.devices.drivers.ring import refusal
from tierloop.devices.drivers.uring import UringEngine
from tierloop.devices.drivers.wish import Wish
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.system import HOST, System


class Reason(str):
    """A sentence for people. `fatal`: the path cannot be opened at all; otherwise it works, but less well."""

    fatal: bool

    def __new__(cls, text: str, fatal: bool = False) -> Reason:
        made = super().__new__(cls, text)
        made.fatal = fatal
        return made


def probe(path: str, system: System = HOST, deadline_s: float = 10.0) -> list[Reason]:
    """Why the driver could not work on this path, or not as well as it might; empty if nothing stands in its way.

    Opens, locks and reads the first block, through O_DIRECT or NVMe passthrough and through io_uring; writes and
    creates nothing. A path that is in use by an opened device, mounted or held is reported as busy; a drive that warns
    is a reason as well. Raises nothing but programming errors.
    """
    if not is_path(path):
        return [Reason(f"nvme: path = {path!r}: {A_PATH}", fatal=True)]
    with ExitStack() as undo:
        try:
            medium = open_medium("nvme", Wish(path, deadline_s=deadline_s), system, undo)
        except (DeviceError, ConfigurationError) as error:
            return [Reason(str(error), fatal=True)]
        namespace = medium.target.namespace
        entries = None if namespace is None else CommandEntries(medium.target, namespace)
        remains = "pread and pwrite remain" if namespace is None else "ioctl remains, one command at a time"
        reasons = [Reason(why) for why in medium.why]
        try:
            reasons += [Reason(why) for why in condition(medium.drive, medium.read_only)[0]]
            UringEngine(medium.target, 32, entries).close()
        except DeviceError as error:
            reasons.append(Reason(str(error), fatal=True))
        except OSError as error:
            reasons.append(Reason(f"{refusal(system, error)}; {remains}"))
        except Stuck as error:
            reasons.append(Reason(f"nvme: probe: {error}", fatal=True))
        return reasons
