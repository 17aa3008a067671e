"""A gate: a command of some other device that ends when the check says so, and how it says so.

What names it in `after` is held back until then, by no clock: so a check can show that nothing happens too early, on
real devices as well as on emulated ones.
"""

from __future__ import annotations

from tierloop.devices.commands import Flush, Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site

NAME = "gate"


class Gate:
    """Shut from the start; `open` ends its one command, with an error if one is given."""

    def __init__(self, site: Site) -> None:
        self._queues = QueueSet(NAME, 1, 1, site, lambda _: None)
        command = Flush(Region(NAME, NAME, 1, 1).all())
        self.completion: Completion = self._queues.submit(command, 0, (), Traffic(command))

    def open(self, error: DeviceError | None = None) -> None:
        """Let through what waits; with an error, what waits is cancelled."""
        self._queues.finish(self.completion, error)
