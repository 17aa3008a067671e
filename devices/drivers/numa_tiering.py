"""What the kernel does behind us: tiering that moves pages between nodes, or throws them out, unasked.

An experiment that says where its KV lies has to know of it. Nothing is switched off here; each finding says what it
means and which command (as root) ends it. Ranges that are bound (mbind) are left alone by NUMA balancing, but not by
demotion and not by DAMON: reclaim does not ask for a range's policy before it moves a page down.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from tierloop.devices.drivers.kernel_numbers import number_of
from tierloop.devices.system import System

BALANCING = "/proc/sys/kernel/numa_balancing"
DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"
DAMON = "/sys/kernel/mm/damon/admin/kdamonds"


@dataclass(frozen=True)
class Tiering:
    """One mechanism that is on: what it is called, what it does to pages, and the command that switches it off."""

    name: str
    means: str
    off: str

    def __str__(self) -> str:
        return f"{self.name}: {self.means}; off: {self.off}"

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


def tiering(system: System) -> tuple[Tiering, ...]:
    """The mechanisms that are on now, none where the kernel shows none. Raises nothing."""
    return (*_balancing(system), *_demotion(system), *_damon(system), *_damon_modules(system))


def _balancing(system: System) -> list[Tiering]:
    bits = number_of(_text(system, BALANCING)) or 0
    means = []
    if bits & 1:
        means.append("moves pages to the node of the cores that touch them")
    if bits & 2:
        means.append("promotes hot pages from slow nodes to fast ones")
    if not means:
        return []
    return [
        Tiering(
            f"numa_balancing = {bits}",
            f"{' and '.join(means)}, except in ranges that are bound",
            f"echo 0 > {BALANCING}",
        )
    ]


def _demotion(system: System) -> list[Tiering]:
    if _text(system, DEMOTION) not in ("true", "1"):
        return []
    means = "moves cold pages of a node that runs full to a slower node, bound ones too"
    return [Tiering("demotion", means, f"echo false > {DEMOTION}")]


def _damon(system: System) -> list[Tiering]:
    found = []
    for name in _names(system, DAMON):
        if name.isdigit() and _text(system, f"{DAMON}/{name}/state") == "on":
            actions = sorted(set(_actions(system, f"{DAMON}/{name}/contexts")))
            means = f"its schemes do: {', '.join(actions)}" if actions else "it watches accesses; it has no schemes"
            found.append(Tiering(f"DAMON kdamond {name}", means, f"echo off > {DAMON}/{name}/state"))
    return found


def _actions(system: System, contexts: str) -> list[str]:
    return [
        action
        for context in _names(system, contexts)
        for scheme in _names(system, f"{contexts}/{context}/schemes")
        if re.fullmatch(r"\d+", scheme) and (action := _text(system, f"{contexts}/{context}/schemes/{scheme}/action"))
    ]


def _damon_modules(system: System) -> list[Tiering]:
    means = {
        "damon_reclaim": "pages out memory that was not touched for a while",
        "damon_lru_sort": "reorders which pages are taken first when memory runs short",
    }
    return [
        Tiering(module, what, f"echo N > /sys/module/{module}/parameters/enabled")
        for module, what in means.items()
        if _text(system, f"/sys/module/{module}/parameters/enabled") in ("Y", "1")
    ]


def _text(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _names(system: System, path: str) -> list[str]:
    try:
        return system.listdir(path)
    except OSError:
        return []
