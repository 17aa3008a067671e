"""DEVICE on the command line as something that can be measured: `cpu`, `nvme:PATH`, or `PLATFORM:DEVICE`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tierloop.devices.clocks import WallClock
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo
from tierloop.devices.platform import Platform
from tierloop.devices.platform_file import read_platform
from tierloop.devices.registry import ClockKind, entry, find_platform, open_platform
from tierloop.devices.site import Site
from tierloop.tools.measuring import Subject
from tierloop.tools.output import OutputError
from tierloop.tools.scratch import check_platform_media, check_scratch

FORMS = "cpu, nvme:FILE, nvme:FOLDER/ (a temporary file there), or PLATFORM:DEVICE"
DRIVE_NBYTES = 1 << 30
"""Of a temporary file that stands for a drive; it is sparse, and only what is measured is written."""


@contextmanager
def open_subject(
    text: str, clock: ClockKind | None = None, dilation: int | None = None, scratch: bool = False
) -> Iterator[Subject]:
    """Open what `calibrate` was told to measure, and close it.

    `scratch` says that the contents of a file or block device may be lost; one that has any is refused without, a
    platform's, too. A temporary file is removed. Raises ConfigurationError, and the DeviceError of a device that cannot
    be opened.
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
                if path != rest:  # the driver has it open and needs its name no more: it goes however this ends
                    os.unlink(path)
                yield choose(site, [device], device, 1)
    elif colon and driver and rest:
        file = read_platform(find_platform(driver), find_platform)
        check_platform_media(file, file.devices.keys() & {rest.removeprefix("emu:")}, scratch)  # before it is opened
        with open_platform(driver, clock=clock, dilation=dilation) as platform:
            yield of_platform(platform, rest)
    else:
        raise ConfigurationError(f"device {text!r}; allowed: {FORMS}")


def input_files(text: str | None) -> list[Path]:
    """The files that a device is made of: the medium of a drive, or a platform's file and its devices' profiles.

    Raises ConfigurationError for a platform that is not there.
    """
    driver, colon, rest = (text or "").partition(":")
    if not colon or not rest:
        return []
    if driver == "nvme":
        return [Path(rest)]
    file = read_platform(path := find_platform(driver), find_platform)
    named = [device.options.get("profile") for device in file.devices.values()]
    return [path, *(file.folder / name for name in named if isinstance(name, str) and name.endswith(".toml"))]


def refuse_inputs(option: str, outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """See that no output is one of the inputs, by whatever name or link. Raises OutputError."""
    for output in outputs:
        for file in inputs:
            same = os.path.realpath(output) == os.path.realpath(file)
            if same or (output.exists() and file.exists() and output.samefile(file)):
                raise OutputError(f"{option} {output}: would replace {file}, which is an input; name another file")


def of_platform(platform: Platform, name: str) -> Subject:
    """A device of an open platform. Raises ConfigurationError with the near names."""
    names = {full.removeprefix("emu:"): full for full in platform.devices}
    short = name.removeprefix("emu:")
    if short not in names:
        raise ConfigurationError(f"platform {platform.name} has no device {name!r}: {nearest(short, list(names))}")
    device = platform.devices[names[short]]
    host = [platform.memory_owner(platform.host)] if platform.host else []
    others = [other for other in platform.devices.values() if other is not device and other not in host]
    subject = choose(platform.site, [device, *host, *others], device, platform.dilation)
    return replace(subject, apart=subject.apart or platform.host not in ("", subject.memory.name))


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
            kernels = _kernels(engine.info, able, memory)
            return Subject(site, owner, memory, engine, mover, kernels, dilation, not memory.byte_addressable)
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
    check_scratch(place, scratch, ", and nvme:FOLDER/ measures a temporary file instead")
    yield path
