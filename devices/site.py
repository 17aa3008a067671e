"""The site that a device is built into: its clock, who watches completions, and what devices share.

One platform has one site. Observers are called with every completion as it ends (ledger, trace); links are registered
by whoever models them; `shared` lets the devices of one family find what they have in common (the emulators' fabric).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierloop.devices.clocks import Clock, VirtualClock
from tierloop.devices.completion import Completion
from tierloop.devices.hazards import HazardChecker


class LinkMeter(Protocol):
    """What a link has carried: bytes per direction and ns during which it was busy (union over both directions)."""

    name: str
    bytes_forward: int
    bytes_back: int
    busy_ns: int


@dataclass
class Site:
    """Shared by all devices of one platform."""

    clock: Clock = field(default_factory=VirtualClock)
    observers: list[Callable[[Completion], None]] = field(default_factory=list)
    checker: HazardChecker | None = None
    links: dict[str, LinkMeter] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
