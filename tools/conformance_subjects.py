"""DEVICE on the command line of `conformance`: a driver, a name with a colon, or the devices of a platform."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.tools.scratch import check_media, check_platform_media, check_scratch

if TYPE_CHECKING:
    from tierloop.devices.conformance import Opener
    from tierloop.devices.device import Device
    from tierloop.devices.platform import Platform

FORMS = "a driver, cpu:NODE, gpu:NUMBER, nvme:file=PATH, KIND:model (pnm, …), emu:PROFILE, a platform"
FILE_NBYTES = 64 << 20
"""Of a file that stands for a drive and did not exist: it is made, and removed again."""
LEAST_NBYTES = 64 << 10
"""Of a file that was there: what the checks need for their regions."""
_BUS = 64_000_000_000


class Target(NamedTuple):
    """What the suite is run on: `device` names it where the opener makes a platform of several."""

    device: str | None
    opener: Opener
    virtual: bool


@contextmanager
def targets(
    subject: str, chosen: list[str], given: dict[str, Any], clock: str | None, scratch: bool
) -> Iterator[list[Target]]:
    """Everything that is to be tested. `given` are options of a driver; `scratch` says that the contents of a medium
    may be lost. Raises ConfigurationError.
    """
    from tierloop.devices.registry import list_devices

    kind, colon, rest = subject.partition(":")
    drivers = [driver.name for driver in list_devices()]
    if (subject in drivers or colon) and chosen:
        raise ConfigurationError(f"--device: {subject} is one device; only a platform has several")
    if subject in drivers:
        check_media(subject, given, scratch)
        yield [_driver(subject, given, clock)]
    elif kind == "cpu" and colon:
        yield [_driver("cpu", {"node": _number(subject, rest), **given}, clock)]
    elif kind == "gpu" and colon and rest != "model":
        yield [_driver("gpu", {"device": f"cuda:{_number(subject, rest)}", **given}, clock)]
    elif kind == "nvme" and rest.startswith("file="):
        for key in {"path", "folder"} & given.keys():
            raise ConfigurationError(f"--option {key}: {subject} names the file already")
        with _file(subject, Path(rest.removeprefix("file=")), scratch) as options:
            yield [_driver("nvme", {**options, **given}, clock)]
    elif colon and rest == "model":
        yield [_model(kind, given, clock)]
    elif kind == "emu" and colon:
        with tempfile.TemporaryDirectory(prefix="tierloop-") as folder:
            yield [_profile(rest, Path(folder), given, clock)]
    else:
        yield _platform(subject, chosen, given, clock, drivers, scratch)


def _driver(name: str, given: dict[str, Any], clock: str | None) -> Target:
    from tierloop.devices.registry import entry, open_device

    emulated = bool(getattr(entry("devices", name), "emulated", False))

    def opener(site: Site) -> Device:
        return open_device(name, f"emu:{name}" if emulated else name, site, dict(given))

    return Target(None, opener, emulated if clock is None else clock == "virtual")


def _model(kind: str, given: dict[str, Any], clock: str | None) -> Target:
    from tierloop.emulators.modelled import KINDS, open_modelled

    if kind not in KINDS:
        raise ConfigurationError(f"{kind}:model: {nearest(kind, sorted(KINDS))}")
    if given:
        raise ConfigurationError(f"--option: {kind}:model is a driver with a model beneath it, and takes no options")
    if clock == "virtual":
        raise ConfigurationError(f"--clock virtual: {kind}:model is a real driver, and has no virtual time")

    def open_machine(site: Site) -> Platform:
        return open_modelled([kind], site)

    return Target(f"{kind}0", open_machine, False)


def _profile(name: str, folder: Path, given: dict[str, Any], clock: str | None) -> Target:
    """A profile beside host memory, at the end of a link that is faster than it needs to be."""
    from tierloop.devices.registry import open_platform
    from tierloop.emulators.profile import FOLDER, find_profile, read_profile

    if given:
        raise ConfigurationError("--option: a profile says everything of an emulated device")
    path = find_profile(name)
    profile = read_profile(path)
    device = path.stem if path.stem != "host" else "device"
    driver = f'driver = "emulated"\nprofile = "{path.resolve()}"\n'
    host = f'driver = "emulated"\nprofile = "{FOLDER / "demo-dram.toml"}"\n'
    reach = f'reaches."{device}" = ["bus"]\n' if profile.memory is not None and profile.memory.byte_addressable else ""
    back = 'reaches.host = ["bus"]\n' if profile.executors else ""
    text = (
        f'description = "{name} beside host memory"\nclock = "virtual"\nhost = "host"\n'
        f'[devices.host]\n{host}{reach}[devices."{device}"]\n{driver}{back}'
        f'[links.bus]\nends = ["host", "{device}"]\nbytes_per_s = {_BUS}\nlatency_ns = 0\n'
        'source = "defined: no limit"\n'
    )
    file = folder / "conformance.toml"
    file.write_text(text, encoding="utf-8")

    def open_machine(_: Site) -> Platform:
        return open_platform(file, clock=clock or "virtual")  # type: ignore[arg-type]  # checked by options.clock_kind

    return Target(f"emu:{device}", open_machine, clock != "wall")


def _platform(
    subject: str, chosen: list[str], given: dict[str, Any], clock: str | None, drivers: list[str], scratch: bool
) -> list[Target]:
    from tierloop.devices.platform_file import read_platform
    from tierloop.devices.registry import find_platform, list_platforms, open_platform

    if given:
        raise ConfigurationError("--option: a platform's file has the options of its devices")
    platforms = [platform.name for platform in list_platforms()]
    if subject not in platforms and not subject.endswith(".toml"):
        raise ConfigurationError(
            f"{subject!r} is no device and no platform; {nearest(subject, drivers + platforms)}; {FORMS}"
        )
    path = find_platform(subject)

    def open_machine(_: Site) -> Platform:
        return open_platform(path, clock=clock)  # type: ignore[arg-type]  # checked by options.clock_kind

    file = read_platform(path, find_platform)
    wanted = [name.removeprefix("emu:") for name in chosen] or list(file.devices)
    for name in wanted:
        if name not in file.devices:
            raise ConfigurationError(f"--device {name!r}: {nearest(name, list(file.devices))}")
    check_platform_media(file, wanted, scratch)  # before anything is opened
    with open_platform(path, clock=clock) as platform:  # type: ignore[arg-type]  # as above
        names = {name.removeprefix("emu:"): name for name in platform.devices}
        return [Target(names[name], open_machine, platform.clock.virtual) for name in wanted]


@contextmanager
def _file(subject: str, path: Path, scratch: bool) -> Iterator[dict[str, Any]]:
    """Options for a drive that is a file; one that was not there is removed again. Raises ConfigurationError."""
    if not path.name:
        raise ConfigurationError(f"{subject!r} names no file; {FORMS}")
    if os.path.lexists(path):
        if path.is_file() and (nbytes := path.stat().st_size) < LEAST_NBYTES:
            raise ConfigurationError(f"{path} holds {nbytes} bytes; the suite needs {LEAST_NBYTES} or more")
        check_scratch(path, scratch)
        with nullcontext() if scratch else _blank_again(path):
            yield {"path": str(path)}
        return
    if path.parent.is_dir() and (free := shutil.disk_usage(path.parent).free) < FILE_NBYTES:
        raise ConfigurationError(f"{path}: {free} bytes are free there; a new file takes {FILE_NBYTES}")
    try:
        yield {"path": str(path), "capacity": FILE_NBYTES, "create": True}
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _blank_again(path: Path) -> Iterator[None]:
    """A file of zeros has as many zeros afterwards, whatever was closed before it was freed.

    Not if somebody else has it by then: the suite was refused it, and what it holds is not the suite's.
    """
    nbytes = path.stat().st_size if path.is_file() else 0
    try:
        yield
    finally:
        if nbytes:
            with path.open("r+b") as file, suppress(BlockingIOError):
                HOST.lock(file.fileno())
                os.truncate(file.fileno(), 0)
                os.truncate(file.fileno(), nbytes)


def _number(subject: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise ConfigurationError(f"{subject!r}: {text!r} is no number; {FORMS}")
    return int(text)
