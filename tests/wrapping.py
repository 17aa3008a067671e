"""For tests of wrappers: small devices with wrappers around them, and one command of every kind and of every kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tests.attention_case import bytes_of
from tests.launches import every_kernel
from tierloop.devices.clocks import Clock
from tierloop.devices.commands import VERBS, Command, Copy, Flush, Launch, Operand, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.drivers.reference import open_reference
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.kernels import contract
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.waiting import write_bytes
from tierloop.devices.wrappers import Around, wrapped

FAR = 1 << 60
"""A deadline that no test reaches, in ns."""
Layer = Callable[[Device, Site], Around]


def site() -> Site:
    """A virtual clock and the hazard checker."""
    return Site(checker=HazardChecker())


def reference(on: Site, layers: Sequence[Layer], duration_ns: int = 1, name: str = "emu:reference") -> Device:
    """The reference device, which offers everything, with wrappers around it. It may reach one called emu:other."""
    options = {"duration_ns": duration_ns, "capacity": 1 << 22, "reaches": ["emu:other"]}
    if name == "emu:other":
        options["reaches"] = ["emu:reference"]
    return wrapped(on, lambda inside: open_reference(name, inside, options), layers)


def stored(on: Site, region: Region) -> NDArray[np.uint8]:
    """The bytes of a region of a reference device, behind everybody's back: uint8 (nbytes,)."""
    array: NDArray[np.uint8] = on.shared["reference bytes"][region]
    return array


def ended(clock: Clock, *completions: Completion) -> list[int]:
    """Let time pass until all have ended well; returns when each did, in ns."""
    assert clock.run_until(lambda: all(c.done for c in completions), FAR)
    return [c.result().ended_ns for c in completions]


def failed(clock: Clock, completion: Completion) -> BaseException | None:
    """Let time pass until a command has ended; returns its error."""
    assert clock.run_until(lambda: completion.done, FAR)
    try:
        completion.result()
    except Exception as error:
        return error
    return None


def filled(clock: Clock, device: Device, nbytes: int, seed: int = 1) -> Region:
    """A region of random bytes, none of them 0."""
    region = device.alloc(nbytes)
    write_bytes(clock, device, region.all(), np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8))
    return region


def every_command(clock: Clock, device: Device) -> dict[str, Command]:
    """One command of every kind, and a launch of every kernel that there is, with their regions on the device."""
    one, other = filled(clock, device, 4096, 2), filled(clock, device, 4096, 3)
    commands: dict[str, Command] = {
        "read": Read(one.at(100, 3000), np.zeros(3000, dtype=np.uint8)),
        "write": Write(other.at(50, 500), np.full(500, 7, dtype=np.uint8)),
        "copy": Copy(one.at(0, 1000), other.at(1000, 1000)),
        "flush": Flush(one.all()),
    }
    assert {type(command) for command in commands.values()} | {Launch} == set(get_args(Command)) == {*VERBS, Launch}
    for name, launch in every_kernel().items():
        commands[name] = _there(clock, device, launch)
    assert set(commands) == set(VERBS.values()) | contract.KERNELS
    return commands


def _there(clock: Clock, device: Device, launch: Launch) -> Launch:
    """The launch with its regions copied to the device."""
    there: dict[int, Region] = {}

    def moved(operand: Operand) -> Operand:
        for one, _ in operand:
            if one.id not in there:
                there[one.id] = device.alloc(max(one.nbytes, 1))
                if one.nbytes:
                    write_bytes(clock, device, there[one.id].at(0, one.nbytes), bytes_of(one))
        return tuple(Segment(there[one.id], spans) for one, spans in operand)

    return Launch(launch.args, tuple(moved(o) for o in launch.reads), tuple(moved(o) for o in launch.writes))


def all_kinds(folder: Path) -> dict[str, Layer]:
    """All wrappers by name, none of them slow."""
    from tierloop.devices.wrappers import Checked, Delayed, Faulty, Latency, Recorded, Retried, Throttled

    return {
        "throttled": lambda device, on: Throttled(device, on, 3_000_000_000, 2_000_000_000),
        "delayed": lambda device, on: Delayed(device, on, Latency(1_000, 3_000), Latency(2_000), seed=3),
        "recorded": lambda device, on: Recorded(device, on, folder / "all.jsonl", replace=True),
        "checked": lambda device, on: Checked(device, on, 256),
        "faulty": lambda device, on: Faulty(device, on),
        "retried": lambda device, on: Retried(device, on, attempts=2, backoff_ns=1_000),
    }
