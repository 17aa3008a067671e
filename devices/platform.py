"""A platform: one clock, the devices built on it, and what joins them.

Built by the registry from a file, or by hand from opened devices. With any real device in it the clock is the wall
clock. The platform owns its devices: `close` closes all of them, last opened first, and raises the first error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from tierloop.devices.clocks import Clock
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.info import ExecutorInfo, MemoryInfo
from tierloop.devices.regions import Region
from tierloop.devices.site import Site

RunProvenance = Literal["measured", "emulated", "simulated", "extrapolated"]


@dataclass
class Platform:
    """Devices by name, in the order of the platform file.

    `host` names the memory that host buffers live in. `notes` says what was changed against the file (raised memory,
    dilation), for reports.
    """

    name: str
    site: Site
    devices: dict[str, Device] = field(default_factory=dict)
    host: str = ""
    dilation: int = 1
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        real = [n for n, d in self.devices.items() if d.info.provenance == "real"]
        if real and self.clock.virtual:
            raise ConfigurationError(
                f"platform {self.name}: {', '.join(real)} is real, and real devices cannot run on the virtual clock; "
                "use the wall clock, or emulated devices only"
            )

    @property
    def clock(self) -> Clock:
        """The one clock of the platform."""
        return self.site.clock

    @property
    def provenance(self) -> RunProvenance:
        """How numbers of this platform came about: measured, emulated, simulated or extrapolated.

        A real driver whose device a wrapper slows down, or that has a model of hardware beneath it, measures nothing:
        its time is that of an emulation.
        """
        infos = [d.info for d in self.devices.values()]
        if all(info.provenance == "real" for info in infos):
            return "emulated" if any(info.slowed or info.model for info in infos) else "measured"
        if self.guesses:
            return "extrapolated"
        return "simulated" if self.clock.virtual else "emulated"

    @property
    def guesses(self) -> list[str]:
        """Constants that are unknown or assumed, with the device that rests on them."""
        return [f"{n}: {g}" for n, d in self.devices.items() for g in d.info.guesses]

    def device(self, name: str) -> Device:
        """The device of that name. Raises ConfigurationError with the near names."""
        if name not in self.devices:
            raise ConfigurationError(
                f"platform {self.name} has no device {name!r}: {nearest(name, list(self.devices))}"
            )
        return self.devices[name]

    def memories(self) -> Iterator[tuple[Device, MemoryInfo]]:
        """Every memory with the device that allocates on it."""
        for device in self.devices.values():
            for memory in device.info.memories:
                yield device, memory

    def executors(self) -> Iterator[tuple[Device, ExecutorInfo]]:
        """Every executor with the device that takes its commands."""
        for device in self.devices.values():
            for executor in device.info.executors:
                yield device, executor

    def memory_owner(self, memory: str) -> Device:
        """The device whose memory that is. Raises ConfigurationError."""
        for device, info in self.memories():
            if info.name == memory:
                return device
        known = [m.name for _, m in self.memories()]
        raise ConfigurationError(f"platform {self.name} has no memory {memory!r}: {nearest(memory, known)}")

    def free(self, region: Region) -> None:
        """Free a region on whichever device owns it. Raises ConfigurationError if none of the platform does."""
        self.device(region.device).free(region)

    def close(self) -> None:
        """Close every device, last opened first; raises the first error after all are closed."""
        errors: list[Exception] = []
        for device in reversed(list(self.devices.values())):
            try:
                device.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Platform:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
