"""The registry: the one place where names become objects. Platforms, drivers and policies are found by entry points.

Groups: `tierloop.devices`, factories `(name, site, options) -> Device`; `tierloop.platforms`, packages whose folder
holds platform files (*.toml); `tierloop.policies`, classes. A factory is given the options of its table in the file, as
they stand there, and `reaches`, if the file has routes for it, as {full name of the memory: hops}; one that makes
emulated devices, or has the attribute `takes_folder`, is given `folder` as well, where relative paths begin.

What must hold:

- Discovered is not enabled: a driver is opened only when a platform file names it, and nothing is tried instead.
- Two distributions that offer one name are an error that names both; a module that is missing is an error that says
  what to install.
- An emulated device carries `emu:` in its name and a real one never does. A factory that makes emulated devices has
  the attribute `emulated = True`, by which the registry adds the prefix before anything is opened.
- Wrappers that the file puts around a device are part of its making: nothing else ever holds the device inside. Each
  stands in the notes.
- On the wall clock, emulated devices run at a dilation that this host can honour (host_speed.py), and with a real
  device at none. On the virtual clock there is no dilation and there are no real devices.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import getattr_static
from pathlib import Path
from typing import Any, Literal

from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, DeviceError, nearest
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.host_speed import automatic_dilation, demands, host_speed, smallest_dilation
from tierloop.devices.info import DeviceInfo
from tierloop.devices.platform import Platform
from tierloop.devices.platform_file import (
    DILATIONS,
    DeviceEntry,
    LoadSpec,
    PlatformFile,
    Topology,
    read_platform,
)
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import wrapped

GROUPS = {"devices": "tierloop.devices", "platforms": "tierloop.platforms", "policies": "tierloop.policies"}
_SINGULAR = {"devices": "driver", "platforms": "platform package", "policies": "policy"}

_OURS = "tierloop"
_MEMBERS = tuple(name for name in vars(Device) if not name.startswith("_"))
"""What a device has."""

Factory = Callable[[str, Site, dict[str, Any]], Device]
ClockKind = Literal["virtual", "wall"]


@dataclass(frozen=True)
class Discovered:
    """An entry point: what it is called, which distribution offers it, and whether it can be loaded.

    `reasons` says why not, or what is wrong with it.
    """

    group: str
    name: str
    distribution: str
    value: str
    usable: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlatformListing:
    """A platform file that can be opened by name; `reasons` says what is wrong with it, if anything."""

    name: str
    path: Path
    distribution: str
    description: str = ""
    clock: str = ""
    reasons: tuple[str, ...] = ()


def entry(group: str, name: str) -> Any:
    """The object behind a name of a group ("devices", "policies", "platforms").

    Raises ConfigurationError: an unknown name (with the near ones), two offers, a module that is missing.
    """
    found = _offers(group)
    if name not in found:
        raise ConfigurationError(f"unknown {_SINGULAR[group]} {name!r}; {nearest(name, sorted(found))}")
    return _load(group, found[name])


def open_device(driver: str, name: str, site: Site, options: dict[str, Any]) -> Device:
    """Have a driver open a device. Raises what the driver raises, where that is a DeviceError or ConfigurationError.

    Anything else that a driver of another distribution raises, and whatever it gives that is no device, becomes a
    ConfigurationError that names the two; of a driver of ours it is a bug of ours, and stays what it is.
    """
    factory = entry("devices", driver)
    with _faults_of(driver, f"opening {name}"):
        device = factory(name, site, options)
    missing = [member for member in _MEMBERS if not _has(device, member)]
    if missing:
        raise _faulty(driver, f"it opened {name} as a {type(device).__name__}, which has no {', '.join(missing)}")
    return device  # type: ignore[no-any-return]  # it has what a device has


def info_of(driver: str, device: Device) -> DeviceInfo:
    """What a device that a driver opened says of itself. Raises as `open_device` does."""
    with _faults_of(driver, "its info"):
        info = device.info
    if not isinstance(info, DeviceInfo):
        raise _faulty(driver, f"its info is a {type(info).__name__}, and no DeviceInfo")
    return info


@contextmanager
def _faults_of(driver: str, what: str) -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, DeviceError):
        raise
    except (Exception, SystemExit) as error:
        if _offered_by(driver) == _OURS:
            raise
        raise _faulty(driver, f"{what} raised {type(error).__name__}: {error}") from error


def _faulty(driver: str, wrong: str) -> ConfigurationError:
    return ConfigurationError(f"driver {driver!r} of {_offered_by(driver)} is faulty: {wrong}")


def _offered_by(driver: str) -> str:
    return ", ".join(_distribution(point) for point in _offers("devices").get(driver, []))


def discover(group: str) -> list[Discovered]:
    """Every entry point of a group, by name, loaded to see whether it works. Nothing is opened."""
    listed = []
    for name, points in sorted(_offers(group).items()):
        for point in points:
            reasons: tuple[str, ...] = ()
            try:
                _load(group, points)
            except ConfigurationError as error:
                reasons = (str(error),)
            listed.append(Discovered(group, name, _distribution(point), point.value, not reasons, reasons))
    return listed


def list_devices() -> list[Discovered]:
    """Every driver that was discovered, with the reason where it cannot be used. Nothing is opened."""
    return discover("devices")


def list_platforms() -> list[PlatformListing]:
    """Every platform that can be opened by name, in alphabetical order."""
    listed = []
    for name, (path, distribution) in sorted(_platform_paths().items()):
        try:
            file = read_platform(path, find_platform)
            listed.append(PlatformListing(name, path, distribution, file.description, file.clock))
        except ConfigurationError as error:
            listed.append(PlatformListing(name, path, distribution, reasons=(str(error),)))
    return listed


def find_platform(name: str | Path) -> Path:
    """The file of a platform: a path (ending in .toml), or a name. Raises ConfigurationError with the near names."""
    if isinstance(name, Path) or name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.exists():
            raise ConfigurationError(f"there is no platform file {path}")
        return path
    known = _platform_paths()
    if name not in known:
        raise ConfigurationError(f"unknown platform {name!r}; {nearest(name, sorted(known))}")
    return known[name][0]


def open_platform(
    name_or_path: str | Path,
    *,
    clock: ClockKind | None = None,
    dilation: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    check_hazards: bool = False,
    only: Collection[str] | None = None,
) -> Platform:
    """Open a platform: its clock, links and devices; close it when done (it is a context manager).

    `clock` and `dilation` win over the file. `overrides` changes keys of the file, dotted: {"devices.gpu.capacity":
    1 << 30}. `only` opens just these devices (names as in the file), with the routes between them. `check_hazards`
    puts the happens-before checker in. Raises ConfigurationError for whatever is wrong with file or arguments, and the
    DeviceError of a device that cannot be opened; then nothing stays open.
    """
    file = read_platform(find_platform(name_or_path), find_platform, overrides)
    if only is not None:
        file = _only(file, only)
    kind: ClockKind = file.clock if clock is None else clock
    if kind not in ("virtual", "wall"):
        raise ConfigurationError(f"clock {kind!r}; allowed: 'virtual' or 'wall'")
    factories = {name: _factory(file, device) for name, device in file.devices.items()}
    names = {name: f"emu:{name}" if _is_emulated(factory) else name for name, factory in factories.items()}
    loads = _loads(file, names)  # what is wrong with the file is said before this host is measured
    sigma = _dilation(file, kind, dilation, factories, names)
    site = Site(
        clock=VirtualClock() if kind == "virtual" else WallClock(),
        checker=HazardChecker() if check_hazards else None,
    )
    notes = [f"changed: {change}" for change in file.changed]
    notes += [f"load {load.name}: {load.bytes_per_s} bytes/s on {load.memory}" for load in file.loads.values()]
    if kind != file.clock:
        notes.append(f"clock: {kind} instead of {file.clock}")
    if sigma > 1:
        notes.append(f"dilation: all times of emulated devices are {sigma} times as long")
    site.shared["topology"] = Topology(file.links, names.get(file.host, ""), sigma, loads)
    return _open(file, site, sigma, factories, names, notes)


# -- platforms ----------------------------------------------------------------------------------------------------


def _open(
    file: PlatformFile, site: Site, sigma: int, factories: dict[str, Factory], names: dict[str, str], notes: list[str]
) -> Platform:
    with ExitStack() as undo:
        devices: dict[str, Device] = {}
        for name, device_entry in file.devices.items():
            device = _wrapped(file, device_entry, factories[name], names, site)
            undo.callback(device.close)
            devices[names[name]] = device
            notes += [f"{names[name]}: {layer}" for layer in device_entry.wrap]
        for load in file.loads.values():
            if load.bytes_per_s and load.name not in site.loads:
                raise ConfigurationError(
                    f"{file.folder / file.name}.toml: loads.{load.name}: memory: {load.memory} has no memory of its "
                    "own that a load can be put on"
                )
        memories = set()
        for name in sorted(names, key=lambda name: name != file.host):  # the host's memory first: others need it
            of, made = file.devices[name].driver, devices[names[name]]
            info = _blamed(file, name, lambda of=of, made=made: info_of(of, made))  # type: ignore[misc]  # late binding
            if info.name != names[name] or (info.provenance == "emulated") != names[name].startswith("emu:"):
                raise _error(
                    file,
                    name,
                    f"the driver {file.devices[name].driver} opened {info.name!r} ({info.provenance}) as "
                    f"{names[name]!r}; emulated devices, and no others, have names that begin with 'emu:'",
                )
            memories |= {memory.name for memory in info.memories}
            if name == file.host and names[name] not in memories:
                raise ConfigurationError(f"{file.folder / file.name}.toml: host: {name} has no memory of that name")
        for name, device_entry in file.devices.items():
            for target in device_entry.reaches:
                if names[target] not in memories:
                    raise _error(file, name, f"reaches.{target}: {target} has no memory of that name")
        platform = Platform(file.name, site, devices, names.get(file.host, ""), sigma, notes)
        undo.pop_all()
    return platform


def _loads(file: PlatformFile, names: dict[str, str]) -> tuple[LoadSpec, ...]:
    """The loads by the full names of their memories. Raises ConfigurationError for a real one."""
    for name, load in file.loads.items():
        if not names[load.memory].startswith("emu:"):
            raise ConfigurationError(
                f"{file.folder / file.name}.toml: loads.{name}: memory: {load.memory} is real, and no load "
                "can be put on a real memory"
            )
    return tuple(replace(load, memory=names[load.memory]) for load in file.loads.values())


def _make(file: PlatformFile, device: DeviceEntry, factory: Factory, names: dict[str, str], site: Site) -> Device:
    options = dict(device.options)
    if device.reaches:
        options["reaches"] = {names[target]: route for target, route in device.reaches.items()}
    if _is_emulated(factory) or getattr(factory, "takes_folder", False):
        options["folder"] = str(file.folder)
    made: Device = _blamed(file, device.name, lambda: open_device(device.driver, names[device.name], site, options))
    return made


def _wrapped(file: PlatformFile, device: DeviceEntry, factory: Factory, names: dict[str, str], site: Site) -> Device:
    """The device with the wrappers that the file puts around it."""
    layers = [partial(layer.around, file.folder) for layer in device.wrap]
    made: Device = _blamed(
        file, device.name, lambda: wrapped(site, lambda inside: _make(file, device, factory, names, inside), layers)
    )
    return made


def _blamed(file: PlatformFile, name: str, call: Callable[[], Any]) -> Any:
    """Call, and put file and device in front of what the driver finds wrong with its options."""
    try:
        return call()
    except ConfigurationError as error:
        if str(error).startswith(str(_error(file, name, ""))):  # blamed already, by a call inside
            raise
        raise _error(file, name, str(error)) from error


def _error(file: PlatformFile, name: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{file.folder / file.name}.toml: devices.{name}: {problem}")


def _factory(file: PlatformFile, device: DeviceEntry) -> Factory:
    try:
        factory: Factory = entry("devices", device.driver)
    except ConfigurationError as error:
        raise _error(file, device.name, f"driver: {error}") from error
    return factory


def _is_emulated(factory: Factory) -> bool:
    return bool(getattr(factory, "emulated", False))


def _only(file: PlatformFile, only: Collection[str]) -> PlatformFile:
    for name in only:
        if name not in file.devices:
            raise ConfigurationError(
                f"platform {file.name} has no device {name!r}; {nearest(name, list(file.devices))}"
            )
    devices = {
        name: replace(device, reaches={t: route for t, route in device.reaches.items() if t in only})
        for name, device in file.devices.items()
        if name in only
    }
    loads = {name: load for name, load in file.loads.items() if load.memory in only}
    routes = [route for device in devices.values() for route in device.reaches.values()]
    routes += [load.over for load in loads.values()]
    used = {hop[0] for route in routes for hop in route}
    links = {name: link for name, link in file.links.items() if name in used}
    return replace(file, devices=devices, links=links, loads=loads)


# -- dilation -----------------------------------------------------------------------------------------------------


def _dilation(
    file: PlatformFile, kind: ClockKind, given: int | None, factories: dict[str, Factory], names: dict[str, str]
) -> int:
    """The dilation to open with. Raises ConfigurationError if this host cannot honour what is asked for."""
    if given is not None and (isinstance(given, bool) or not DILATIONS[0] <= given <= DILATIONS[1]):
        raise ConfigurationError(f"dilation {given!r}; allowed: {DILATIONS[0]} to {DILATIONS[1]}")
    if kind == "virtual":
        if given not in (None, 1):
            raise ConfigurationError(f"dilation {given}: the virtual clock needs none; use the wall clock, or 1")
        return 1
    emulated = [name for name, factory in factories.items() if _is_emulated(factory)]
    real = [name for name in factories if name not in emulated]
    wanted = given if given is not None else file.dilation
    if real and wanted not in ("auto", 1):
        raise ConfigurationError(
            f"platform {file.name}: dilation {wanted}, but {', '.join(real)} is real: time cannot be stretched for a "
            "real device; allowed: 1"
        )
    if not emulated:
        return 1
    need, fastest = _smallest(file, factories, names)
    if wanted == "auto" and not real:
        return automatic_dilation(need, host_speed())
    sigma = 1 if real or wanted == "auto" else wanted
    if sigma < need:
        allowed = "with a real device it has to be 1, so use slower profiles" if real else f"smallest allowed: {need}"
        raise ConfigurationError(
            f"platform {file.name}: dilation {sigma}: this host cannot keep up with {fastest} at that speed; {allowed}"
        )
    return sigma


def _smallest(file: PlatformFile, factories: dict[str, Factory], names: dict[str, str]) -> tuple[int, str]:
    """The smallest dilation of the file's emulated devices on this host, and the device that asks for most."""
    speed = host_speed()
    site = Site(shared={"topology": Topology(file.links, names.get(file.host, ""))})
    with ExitStack() as undo:
        devices = []
        for name, device_entry in file.devices.items():
            if _is_emulated(factories[name]):
                device = _make(file, device_entry, factories[name], names, site)
                undo.callback(device.close)
                devices.append((name, device))
        infos = [_blamed(file, name, lambda device=device: device.info) for name, device in devices]  # type: ignore[misc]  # late binding
    return smallest_dilation(infos, speed), max(infos, key=lambda info: demands(info, speed)).name


# -- entry points -------------------------------------------------------------------------------------------------


def _offers(group: str) -> dict[str, list[importlib.metadata.EntryPoint]]:
    if group not in GROUPS:
        raise ConfigurationError(f"unknown group {group!r}; {nearest(group, list(GROUPS))}")
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in _entry_points(GROUPS[group], tuple(sys.path)):
        found.setdefault(point.name, []).append(point)
    return found


@cache  # 10 ms a call, and what is installed does not change while a process runs, only where it looks
def _entry_points(group: str, _: tuple[str, ...]) -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=group))


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _load(group: str, points: list[importlib.metadata.EntryPoint]) -> Any:
    point = points[0]
    what = f"{_SINGULAR[group]} {point.name!r}"
    if len(points) > 1:
        offers = " and ".join(f"{_distribution(p)} ({p.value})" for p in points)
        raise ConfigurationError(f"{what} is offered twice, by {offers}; uninstall one of them")
    try:
        found = point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing and missing == point.value.partition(".")[0].partition(":")[0]:
            advice = f"{_distribution(point)} is installed incompletely: there is no module {error.name}"
        else:
            advice = f"it needs the module {error.name}: pip install {missing}"
        raise ConfigurationError(f"{what} of {_distribution(point)} cannot be loaded: {advice}") from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{what} of {_distribution(point)} cannot be loaded: {error!r}") from error
    if group == "devices" and not callable(found):
        wrong = f"{point.value} is {found!r}; allowed: a function of (name, site, options)"
        raise ConfigurationError(f"{what} of {_distribution(point)} cannot be used: {wrong}")
    return found


def _has(device: Any, member: str) -> bool:
    """Whether an object has a member, which is not looked at: a device may know its `info` when all others are open."""
    return hasattr(type(device), "__getattr__") or getattr_static(device, member, None) is not None


def _platform_paths() -> dict[str, tuple[Path, str]]:
    """Platform files by name, with the distribution. Raises ConfigurationError where two have one name."""
    paths: dict[str, tuple[Path, str]] = {}
    for points in _offers("platforms").values():
        package = _load("platforms", points)
        for folder in _folders(package):
            for path in sorted(folder.glob("*.toml")):
                if path.stem in paths and paths[path.stem][0] != path:
                    raise ConfigurationError(
                        f"platform {path.stem!r} is offered twice, by {paths[path.stem][0]} and {path}; remove one"
                    )
                paths[path.stem] = (path, _distribution(points[0]))
    return paths


def _folders(package: Any) -> list[Path]:
    if hasattr(package, "__path__"):
        return [Path(folder) for folder in package.__path__]
    return [Path(package.__file__).parent]
