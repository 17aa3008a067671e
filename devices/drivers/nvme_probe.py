"""What the nvme driver could do with a path, without changing anything: for `doctor`."""

from __future__ import annotations

from contextlib import ExitStack

from tierloop.devices.drivers.deadlines import Stuck
from tierloop.devices.drivers.opening import Wish, open_medium
from tierloop.devices.drivers.ring import refusal
from tierloop.devices.drivers.uring import UringEngine
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

    Opens, locks and reads the first block, through O_DIRECT and through io_uring; writes and creates nothing. A path
    that is in use by an opened device is reported as busy. Raises nothing but programming errors.
    """
    with ExitStack() as undo:
        try:
            medium = open_medium("nvme", Wish(path, deadline_s=deadline_s), system, undo)
        except (DeviceError, ConfigurationError) as error:
            return [Reason(str(error), fatal=True)]
        reasons = [Reason(why) for why in medium.why]
        try:
            UringEngine(medium.target, depth=32).close()
        except DeviceError as error:
            reasons.append(Reason(str(error), fatal=True))
        except OSError as error:
            reasons.append(Reason(f"{refusal(system, error)}; pread and pwrite remain"))
        except Stuck as error:
            reasons.append(Reason(f"nvme: probe: {error}", fatal=True))
        return reasons
