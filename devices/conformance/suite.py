"""The suite as a class for pytest (or unittest-style runners): subclass it, say how to open the device.

    class TestMyDevice(Suite):
        def open(self, site):
            return open_my_device(site)

Each check is a test method `test_<level>_<check>`; each opens the device afresh. What a device says that it cannot do
is skipped with the reason. pytest itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tierloop.devices.conformance.runner import LEVELS, MACHINE, Check, carry_out, carry_out_machine, checks_of
from tierloop.devices.conformance.subject import Skip
from tierloop.devices.device import Device
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site


class Suite:
    """Subclass it with a name that begins with Test, and override `open`.

    `virtual`: give the device the virtual clock (emulated devices only). `device`: the name of the device under test,
    where `open` returns a platform of several. `levels`: what a driver that is still being written may leave out.
    `seed` and `examples`: for the data, and the number of sequences that the stateful machine tries.
    """

    virtual: ClassVar[bool] = False
    device: ClassVar[str | None] = None
    levels: ClassVar[tuple[str, ...]] = LEVELS
    seed: ClassVar[int] = 0
    examples: ClassVar[int] = 50

    def open(self, site: Site) -> Device | Platform:
        """Open the device on this site, or a platform that holds it; called once or more per test."""
        raise NotImplementedError("override `open` to open your device")


def _method(level: str, check: Check) -> Callable[[Suite], None]:
    def test(self: Suite) -> None:
        if level not in self.levels:
            raise Skip(f"level {level} is left out by {type(self).__name__}")
        carry_out(check, self.open, self.virtual, self.device, self.seed)

    test.__doc__ = check.__doc__
    return test


def _machine(self: Suite) -> None:
    """Any sequence of commands agrees with a dict of bytes."""
    if "stateful" not in self.levels:
        raise Skip(f"level stateful is left out by {type(self).__name__}")
    carry_out_machine(self.open, self.virtual, self.device, self.examples)


for _level in LEVELS:
    for _name, _check in checks_of(_level):
        setattr(Suite, f"test_{_level}_{_name}", _method(_level, _check))
setattr(Suite, f"test_stateful_{MACHINE}", _machine)
