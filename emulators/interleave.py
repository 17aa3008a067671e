"""An interleave set: an emulated memory made of several emulated memories. Entry point `interleaved`. Options:

    members         devices of the platform whose memories it consists of, opened before or after it
    policy          how bytes are spread over them
    granule_nbytes  with "hdm": 256 (the default) to 16384
    arithmetic      with "hdm": "modulo" (the default) or "xor"
    weights         with "weighted-interleave": pages per round for each member, 1 to 255

- "hdm": an HDM decoder deals granules by address; there are as many ways as members.
- "interleave" and "weighted-interleave": pages are dealt in turn, one or `weights` of them to each member, and the next
  region goes on where the last one ended, as Linux does for a process.
- "preferred": pages lie on the first member while it has room, then on the next.
- "bind": pages lie on the one member and nowhere else.

The set has no capacity of its own: what it allocates is taken from its members' and refused where one of them has no
room, and freeing gives it back. Its bytes are kept in one piece here; its time is spent on the members: a command takes
one flow per member, with the bytes that lie there, over the links by which its executor reaches that member. So every
executor that reaches all members reaches the set, and no route to it is written in the platform file. Commands on the
set are counted on the set; `bytes_on` says how they fell on the members.

Members are memories with rates of their own. A drive is none, a set neither; and a PNM's regions are never in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierloop.devices.commands import Command, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Estimate, check
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    Gone,
    OutOfMemory,
    OutOfRange,
    Unsupported,
    nearest,
)
from tierloop.devices.info import DeviceInfo, MemoryInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.tables import Table
from tierloop.emulators.fabric import Fabric, Medium
from tierloop.emulators.placement import PAGE_NBYTES, Dealt, Filled, Placement, Striped
from tierloop.emulators.store import Store
from tierloop.firmware_models.hdm import ARITHMETICS, GRANULES, WAYS, Interleave

POLICIES = ("hdm", "bind", "preferred", "interleave", "weighted-interleave")
_MOST = WAYS[-1]
"""Members of a set: an HDM decoder has no more ways."""
_WEIGHTS = (1, 255)


def open_interleaved(name: str, site: Site, options: dict[str, Any]) -> InterleavedDevice:
    """Open an interleave set; `name` carries the prefix `emu:`. Raises ConfigurationError."""
    if not name.startswith("emu:"):
        raise ConfigurationError(f"{name}: the name of an emulated device begins with 'emu:'")
    table = Table(options, name)
    table.get("folder", "")
    members = table.names("members")
    if not 1 <= len(members) <= _MOST:
        raise table.error("members", f"{len(members)} given; allowed: 1 to {_MOST}")
    policy = table.text("policy", POLICIES)
    if policy == "bind" and len(members) > 1:
        raise table.error("members", "bind holds all pages on one member; allowed: 1, or the policy 'preferred'")
    decoder = None
    weights = [1] * len(members)
    if policy == "hdm":
        granule_nbytes = table.integer("granule_nbytes", GRANULES[0], GRANULES[-1], default=GRANULES[0])
        if granule_nbytes not in GRANULES:
            raise table.error("granule_nbytes", f"{granule_nbytes} given; allowed: {', '.join(map(str, GRANULES))}")
        if len(members) not in WAYS:
            raise table.error("members", f"{len(members)} given; an HDM decoder has {', '.join(map(str, WAYS))} ways")
        arithmetic = table.text("arithmetic", ARITHMETICS, default="modulo")
        decoder = Interleave(len(members), granule_nbytes, "xor" if arithmetic == "xor" else "modulo")
    elif policy == "weighted-interleave":
        given = table.get("weights")
        if not isinstance(given, list) or len(given) != len(members):
            raise table.error("weights", f"{given!r} given; allowed: a whole number for each of {list(members)}")
        weights = [table.check_integer("weights", weight, *_WEIGHTS) for weight in given]
    elif policy in ("bind", "preferred"):
        weights = [1] + [0] * (len(members) - 1)
    table.finish()
    return InterleavedDevice(name, site, tuple(f"emu:{member}" for member in members), policy, decoder, weights)


open_interleaved.emulated = True  # type: ignore[attr-defined]  # what the registry looks at before it opens anything


class InterleavedDevice:
    """An opened interleave set; made by `open_interleaved`.

    `members` are full names; `weights` says how a long stream falls on them. `bytes_on` counts what commands moved on
    each member so far.
    """

    def __init__(
        self,
        name: str,
        site: Site,
        members: tuple[str, ...],
        policy: str,
        decoder: Interleave | None,
        weights: list[int],
    ) -> None:
        self.members = members
        self.weights = weights
        self.bytes_on = dict.fromkeys(members, 0)
        self._name = name
        self._policy = policy
        self._decoder = decoder
        self._fabric = Fabric.of(site)
        self._table = np.repeat(np.arange(len(members), dtype=np.int64), weights)
        self._next = 0
        self._placed: dict[Region, tuple[Placement, list[tuple[Medium, Region]]]] = {}
        self._store: Store | None = None
        self._media: list[Medium] = []
        self._info: DeviceInfo | None = None
        self._closed = False
        if name in self._fabric.media or name in self._fabric.sets:
            raise ConfigurationError(f"{name}: the site has a memory of that name already")
        self._fabric.sets[name] = self

    @property
    def info(self) -> DeviceInfo:
        """What it is. Raises ConfigurationError if a member is not there, or none that a set may have."""
        if self._info is None:
            self._media = [self._member(name) for name in self.members]
            grid = self._decoder.stripe_nbytes if self._decoder is not None else PAGE_NBYTES
            capacity = self._capacity()
            if not capacity:
                raise ConfigurationError(f"{self._name}: members: they are too small to hold {grid} bytes together")
            self._store = Store(
                self._name, capacity, grid, addressed=self._decoder is not None, live=self._fabric.regions
            )
            notes = {"members": ", ".join(self.members), "policy": self._policy}
            if self._decoder is not None:
                notes["decoder"] = (
                    f"{self._decoder.ways} ways of {self._decoder.granule_nbytes} B, {self._decoder.arithmetic}"
                )
            if self._policy == "weighted-interleave":
                notes["weights"] = ", ".join(map(str, self.weights))
            self._info = DeviceInfo(
                name=self._name,
                kind="cxl",
                provenance="emulated",
                memories=(MemoryInfo(self._name, capacity),),
                dilation=self._fabric.dilation,
                notes=notes,
            )
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate zeroed bytes, on the members. Raises OutOfMemory, OutOfRange, Gone."""
        self._alive("alloc")
        if memory not in (None, self._name):
            raise OutOfRange(self._name, "alloc", f"there is no memory {memory!r} here, only {self._name!r}")
        assert self.info
        assert self._store is not None
        region = self._store.alloc(nbytes, phantom)
        taken: list[tuple[Medium, Region]] = []
        try:
            placement = self._place(self._store.address(region), region.nbytes)
            for medium, share in zip(self._media, placement.shares, strict=True):
                if share:
                    taken.append((medium, medium.store.alloc(share, phantom=True)))
        except OutOfMemory as error:
            self._give(taken)
            self._store.free(region)
            raise OutOfMemory(self._name, "alloc", f"{nbytes} bytes: {error}") from error
        if isinstance(placement, Dealt):
            self._next = placement.next
        self._placed[region] = (placement, taken)
        return region

    def free(self, region: Region) -> None:
        """Give the bytes back to the members. Raises OutOfRange, Busy, Gone."""
        self._alive("free")
        if region not in self._placed:
            raise OutOfRange(self._name, "free", f"{region} is not a region of this device, or is freed")
        if any(uses(region) for uses in self._fabric.users):
            raise Busy(self._name, "free", f"{region} is named by a command that has not ended")
        assert self._store is not None
        self._store.free(region)
        self._give(self._placed.pop(region)[1])

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """It has no queues. Raises OutOfRange or Gone."""
        self._alive(verb(command))
        check(self.info, command, queue)
        raise Unsupported(self._name, verb(command), "an interleave set has no executors")

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """It has no queues. Raises OutOfRange."""
        check(self.info, command, queue)
        raise Unsupported(self._name, verb(command), "an interleave set has no executors")

    def poll(self) -> None:
        """Nothing to collect."""

    def close(self) -> None:
        """Give everything back."""
        if self._closed:
            return
        self._closed = True
        del self._fabric.sets[self._name]
        for _, taken in self._placed.values():
            self._give(taken)
        self._placed.clear()
        if self._store is not None:
            self._store.close()

    def spread(self, segments: Sequence[Segment]) -> list[int]:
        """Bytes of these segments of the set's regions on each member."""
        parts = [self._placed[region][0].bytes_on(spans.array) for region, spans in segments]
        return parts[0] if len(parts) == 1 else [sum(column) for column in zip(*parts, strict=True)]

    def typical(self, nbytes: int) -> list[int]:
        """How so many bytes at an unknown place would lie: host buffers, on a platform whose host memory this is."""
        if not any(self.weights[1:]):
            return [nbytes] + [0] * (len(self.members) - 1)
        whole = np.array([[0, nbytes]], dtype=np.int64)
        return self._pattern(0, nbytes, 0).bytes_on(whole)

    def count(self, nbytes: Sequence[int]) -> None:
        """A command moves so many bytes on each member."""
        for name, more in zip(self.members, nbytes, strict=True):
            self.bytes_on[name] += more

    def _member(self, name: str) -> Medium:
        short = name.removeprefix("emu:")
        if name in self._fabric.sets:
            raise ConfigurationError(f"{self._name}: members: {short} is an interleave set itself")
        medium = self._fabric.media.get(name)
        if medium is None:
            known = [other.removeprefix("emu:") for other in self._fabric.media]
            raise ConfigurationError(
                f"{self._name}: members: no emulated memory {short!r} on this platform; {nearest(short, known)}"
            )
        if medium.profile.pnm is not None:
            raise ConfigurationError(
                f"{self._name}: members: {short} is a PNM's memory, and its regions are never in an interleave set: "
                "granules of 256 B would tear the rows that its engines work on"
            )
        if medium.firmware is not None or not medium.profile.byte_addressable:
            raise ConfigurationError(
                f"{self._name}: members: {short} is a block device; allowed: memories that loads and stores reach"
            )
        return medium

    def _capacity(self) -> int:
        capacities = [medium.profile.capacity for medium in self._media]
        if self._decoder is not None:
            return min(capacities) // self._decoder.granule_nbytes * self._decoder.stripe_nbytes
        pages = [capacity // PAGE_NBYTES for capacity in capacities]
        if self._policy in ("bind", "preferred"):
            return sum(pages) * PAGE_NBYTES
        most = min(count * sum(self.weights) // weight for count, weight in zip(pages, self.weights, strict=True))
        return most * PAGE_NBYTES

    def _place(self, address: int, nbytes: int) -> Placement:
        """Where a new region of so many bytes goes. Raises OutOfMemory."""
        if self._policy not in ("bind", "preferred"):
            return self._pattern(address, nbytes, self._next)
        left = -(-nbytes // PAGE_NBYTES)
        pages = []
        for medium in self._media:
            pages.append(min((medium.store.capacity - medium.store.used) // PAGE_NBYTES, left))
            left -= pages[-1]
        if left:
            raise OutOfMemory(self._name, "alloc", f"{left} pages of {PAGE_NBYTES} bytes find no room on any member")
        return Filled(pages)

    def _pattern(self, address: int, nbytes: int, first: int) -> Placement:
        if self._decoder is not None:
            return Striped(self._decoder, address, nbytes)
        return Dealt(self._table, len(self.members), first, nbytes)

    def _give(self, taken: list[tuple[Medium, Region]]) -> None:
        for medium, share in taken:
            if not share.freed:  # the member may have been closed before
                medium.store.free(share)

    def _alive(self, op: str) -> None:
        if self._closed:
            raise Gone(self._name, op, "the device is closed")
