"""Which regions are in use: named by commands of any device of the platform that have not ended.

A memory that others reach (host-mapped memory, a GPU that has peers) may not give a region back while a command of
another device names it, and its own queues know nothing of that. `Uses.of(site)` is the one of a platform; a driver
asks for it when it is opened, before anybody can name its regions. Called on the clock's thread.
"""

from __future__ import annotations

from collections import Counter

from tierloop.devices.commands import segments
from tierloop.devices.completion import Completion
from tierloop.devices.regions import Region
from tierloop.devices.site import Site

_SHARED = "uses"


class Uses:
    """Counts for each region the commands that name it, from when they are queued until they have ended."""

    def __init__(self, platform: Site) -> None:
        self._counts: Counter[Region] = Counter()
        platform.arrivals.append(self._began)
        platform.observers.append(self._ended)

    @classmethod
    def of(cls, site: Site) -> Uses:
        """Those of a platform, also for a device that stands inside a wrapper; made at first use."""
        if _SHARED not in site.shared:
            site.shared[_SHARED] = cls(site.outside or site)
        made: Uses = site.shared[_SHARED]
        return made

    def named(self, region: Region) -> bool:
        """Whether a command that has not ended names the region."""
        return region in self._counts

    def _began(self, completion: Completion) -> None:
        for region, _ in segments(completion.command):
            self._counts[region] += 1

    def _ended(self, completion: Completion) -> None:
        for region, _ in segments(completion.command):
            if region in self._counts:
                self._counts[region] -= 1
                if not self._counts[region]:
                    del self._counts[region]
