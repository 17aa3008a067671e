"""Memories that outlive a process: what a device offers beside its seven members so that regions can be found again.

A driver of a persistent memory may have these three; whoever needs them asks `keeper` for the device that has them,
past any wrappers. Nothing on the medium says which regions there were: whoever allocated them writes that down.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tierloop.devices.device import Device
from tierloop.devices.regions import Region


@runtime_checkable
class Keeper(Protocol):
    """A device whose memory keeps its bytes from one opening to the next."""

    def adopt(self, offset: int, nbytes: int) -> Region:
        """The region that an earlier owner of the medium had at `offset`, with its bytes as they are on the medium.

        Raises OutOfRange, OutOfMemory, Busy (some is taken), Gone, and Unsupported where the memory keeps nothing.
        """

    def offset_of(self, region: Region) -> int:
        """Where a region lies on the medium, in bytes: what `adopt` takes. Raises OutOfRange."""

    def disown(self, region: Region) -> None:
        """Let go of a region that was adopted, and leave its bytes on the medium as they are, unlike `free`.

        Raises OutOfRange, Busy (a command still names it), Gone.
        """


def keeper(device: Device) -> Keeper | None:
    """The device itself, or the one that stands inside its wrappers, if it has a memory that keeps its bytes."""
    inner: object = device
    while not isinstance(inner, Keeper):
        inner = getattr(inner, "inner", None)
        if inner is None:
            return None
    return inner
