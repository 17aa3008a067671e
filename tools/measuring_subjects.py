"""DEVICE on the command line as something that can be measured: `cpu`, `nvme:PATH`, or `PLATFORM:DEVICE`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierloop.devices.clocks import WallClock
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo
from tierloop.devices.platform import Platform
from tierloop.devices.registry import ClockKind, entry, open_platform
from tierloop.devices.site import Site
from tierloop.tools.measuring import Subject

FORMS = "cpu, nvme:FILE, nvme:FOLDER/ (a temporary file there), or PLATFORM:DEVICE"
DRIVE_NBYTES = 1 << 30
"""Of a temporary file that stands for a drive; it is sparse, and only what is measured is written."""


@contextmanager
def open_subject(
    text: str, clock: ClockKind | None = None, dilation: int | None = None, scratch: bool = False
) -> Iterator[Subject]:
    """Open what `calibrate` was told to measure, and close it.

    `scratch` says that the contents of a file or block device may be lost; a file that has any is refused without. A
    temporary file is removed. Raises ConfigurationError, and the DeviceError of a device that cannot be opened.
    """
    driver, colon, rest = text.partition(":")
    if text == "cpu":
        _refuse(text, clock, dilation)
        with _opened(entry("devices", "cpu")("cpu", site := Site(clock=WallClock()), {})) as device:
            yield choose(site, [device], device, 1)
    elif driver == "nvme" and colon:
        _refuse(text, clock, dilation)
        with _drive(rest, scratch) as path:
            options = {"path": path, **({"capacity": DRIVE_NBYTES, "create": True} if path != rest else {})}
            with _opened(entry("devices", "nvme")("nvme", site := Site(clock=WallClock()), options)) as device:
                yield choose(site, [device], device, 1)
    elif colon and driver and rest:
        with open_platform(driver, clock=clock, dilation=dilation) as platform:
            yield of_platform(platform, rest)
    else:
        raise ConfigurationError(f"device {text!r}; allowed: {FORMS}")


def of_platform(platform: Platform, name: str) -> Subject:
    """A device of an open platform. Raises ConfigurationError with the near names."""
    names = {full.removeprefix("emu:"): full for full in platform.devices}
    short = name.removeprefix("emu:")
    if short not in names:
        raise ConfigurationError(f"platform {platform.name} has no device {name!r}: {nearest(short, list(names))}")
    device = platform.devices[names[short]]
    host = [platform.memory_owner(platform.host)] if platform.host else []
    others = [other for other in platform.devices.values() if other is not device and other not in host]
    return choose(platform.site, [device, *host, *others], device, platform.dilation)


def choose(site: Site, engines: list[Device], owner: Device, dilation: int) -> Subject:
    """The first memory of `owner`, and the executors that reach it: of the first engine that reads and writes it.

    Raises ConfigurationError if there is none.
    """
    if not owner.info.memories:
        raise ConfigurationError(f"{owner.info.name} has no memory that could be measured")
    memory = owner.info.memories[0]
    for engine in engines:
        able = [e for e in engine.info.executors if e.path(memory.name) is not None]
        movers = [e for e in able if {"read", "write"} <= e.verbs]
        if movers:
            mover = max(movers, key=lambda e: (bool(e.kernels), len(e.queues)))
            return Subject(site, owner, memory, engine, mover, _kernels(engine.info, able, memory), dilation)
    raise ConfigurationError(f"no executor reads and writes {memory.name} from host buffers, so it cannot be measured")


def _kernels(info: DeviceInfo, able: list[ExecutorInfo], memory: MemoryInfo) -> ExecutorInfo | None:
    """The executor whose kernels are measured: one that walks, if the memory is made of bytes."""
    found = [e for e in able if {"chase", "score", "gather"} & e.kernels and memory.byte_addressable]
    return max(found, key=lambda e: len({"chase", "score", "gather"} & e.kernels), default=None)


def _refuse(text: str, clock: ClockKind | None, dilation: int | None) -> None:
    if clock == "virtual":
        raise ConfigurationError(f"--clock virtual: {text} is real, and real devices have no virtual time")
    if dilation not in (None, 1):
        raise ConfigurationError(f"--dilation {dilation}: {text} is real: time cannot be stretched for it; allowed: 1")


@contextmanager
def _opened(device: Device) -> Iterator[Device]:
    try:
        yield device
    finally:
        device.close()


@contextmanager
def _drive(path: str, scratch: bool) -> Iterator[str]:
    """The path that the driver is given. Raises ConfigurationError where contents would be lost."""
    if not path:
        raise ConfigurationError(f"device 'nvme:'; allowed: {FORMS}")
    place = Path(path)
    if place.is_dir():
        try:
            handle, name = tempfile.mkstemp(prefix=".tierloop-calibrate-", suffix=".img", dir=place)
        except OSError as error:
            raise ConfigurationError(f"{path}: no file can be made there: {error.strerror or error}") from error
        os.close(handle)
        try:
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
        return
    if not place.exists():
        raise ConfigurationError(
            f"{path}: there is no such file; name one, or a folder for a temporary one (nvme:FOLDER/)"
        )
    if not scratch:
        raise ConfigurationError(
            f"{path}: its contents would be overwritten; --scratch says that they may be lost, and nvme:FOLDER/ "
            "measures a temporary file instead"
        )
    yield path
