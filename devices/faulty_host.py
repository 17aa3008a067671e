"""The back door of a device for tests: whoever can make its hardware fail offers this, per device of a site.

A `FaultyHost` reaches the hardware, or a model of it, without the driver: it makes bytes unreadable, keeps a command
from coming back, pulls the device out. Models beneath real drivers offer one, as does the wrapper `Faulty` for any
device; the conformance suite's level `faults` and tests look it up with `of`.
"""

from __future__ import annotations

from typing import Literal, Protocol

from tierloop.devices.regions import Region
from tierloop.devices.site import Site

Ability = Literal["unreadable", "hang", "unplug"]
ABILITIES: tuple[Ability, ...] = ("unreadable", "hang", "unplug")


class FaultyHost(Protocol):
    """The back door of one device; `abilities` says which of its methods do something.

    `grain_nbytes` is what may be lost together with one byte: a block, a page, the alignment of a devdax.
    """

    abilities: frozenset[Ability]
    grain_nbytes: int

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        """From now on these bytes cannot be read: poison, a worn-out cell. What is written over them stays unread."""

    def hang(self) -> None:
        """The next command that reaches the hardware does not come back."""

    def unplug(self) -> None:
        """The device is no longer there."""


def offer(site: Site, device: str, host: FaultyHost) -> None:
    """Put a back door where the checks look for it; an opener calls this."""
    site.shared.setdefault("faults", {})[device] = host


def of(site: Site, device: str) -> FaultyHost | None:
    """The back door of a device, if anybody has offered one."""
    found: FaultyHost | None = site.shared.get("faults", {}).get(device)
    return found
