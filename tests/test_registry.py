"""The registry: names become objects, once, and never an emulator by accident."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.machines import DEVICES, open_machine, write_machine
from tierloop.devices import host_speed as host_speed_module
from tierloop.devices import registry
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.conformance import run
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, NotPresent
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.host_speed import HostSpeed, demands, host_speed, smallest_dilation
from tierloop.devices.registry import (
    discover,
    entry,
    find_platform,
    list_devices,
    list_platforms,
    open_device,
    open_platform,
)
from tierloop.devices.site import Site
from tierloop.tools.inventory import inventory


@dataclass
class Distribution:
    name: str


class Offered(EntryPoint):
    """An entry point of a distribution that is not installed."""

    @classmethod
    def by(cls, distribution: str, name: str, value: str, group: str) -> EntryPoint:
        point = EntryPoint(name, value, group)
        vars(point)["dist"] = Distribution(distribution)
        return point


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds entry points to those that are installed."""
    more: list[EntryPoint] = []
    installed = registry._entry_points

    def entry_points(group: str, where: tuple[str, ...]) -> list[EntryPoint]:
        return installed(group, where) + [p for p in more if p.group == group]

    def add(distribution: str, name: str, value: str, group: str = "tierloop.devices") -> None:
        more.append(Offered.by(distribution, name, value, group))

    monkeypatch.setattr(registry, "_entry_points", entry_points)
    return add


# -- names --------------------------------------------------------------------------------------------------------


def test_drivers_and_policies_are_found_by_name() -> None:
    assert callable(entry("devices", "emulated"))
    assert {d.name for d in list_devices()} >= {"cpu", "emulated", "null", "nvme", "reference"}
    assert all(d.distribution == "tierloop" for d in list_devices())
    assert "split-all" in {d.name for d in discover("policies")}


def test_an_unknown_name_is_answered_with_the_near_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown driver 'emulatd'; did you mean 'emulated'\?"):
        entry("devices", "emulatd")
    with pytest.raises(ConfigurationError, match=r"unknown policy 'split'; did you mean 'split-all'"):
        entry("policies", "split")
    with pytest.raises(ConfigurationError, match=r"unknown platform 'dem'; did you mean 'demo'"):
        find_platform("dem")
    with pytest.raises(ConfigurationError, match=r"unknown group 'device'; did you mean 'devices'\?"):
        entry("device", "cpu")
    with pytest.raises(ConfigurationError, match=r"there is no platform file .*nowhere\.toml"):
        find_platform("nowhere.toml")


def test_two_distributions_with_one_name_are_an_error_that_names_both(offer: Callable[..., None]) -> None:
    offer("acme-tiers", "cpu", "acme.cpu:open")
    with pytest.raises(ConfigurationError, match=r"'cpu' is offered twice, by tierloop .* and acme-tiers \(acme"):
        entry("devices", "cpu")
    both = [d for d in list_devices() if d.name == "cpu"]
    assert [d.distribution for d in both] == ["tierloop", "acme-tiers"]
    assert not any(d.usable for d in both)


def test_a_missing_module_is_answered_with_what_to_install(
    offer: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_driver.py").write_text("import acme_sdk_of_nobody\n")
    (tmp_path / "acme_broken.py").write_text("raise OSError('no firmware')\n")
    (tmp_path / "acme_script.py").write_text("raise SystemExit('usage: acme')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    offer("acme-tiers", "acme", "acme_driver:open")
    offer("acme-tiers", "broken", "acme_broken:open")
    offer("acme-tiers", "script", "acme_script:open")
    offer("acme-tiers", "absent", "acme_absent.driver:open")
    offer("acme-tiers", "nameless", "tests.machines:no_such_function")
    with pytest.raises(ConfigurationError, match="needs the module acme_sdk_of_nobody: pip install acme_sdk_of_nobody"):
        entry("devices", "acme")
    with pytest.raises(ConfigurationError, match=r"cannot be loaded: OSError\('no firmware'\)"):
        entry("devices", "broken")
    with pytest.raises(ConfigurationError, match=r"cannot be loaded: SystemExit\('usage: acme'\)"):
        entry("devices", "script")
    with pytest.raises(ConfigurationError, match="acme-tiers is installed incompletely"):
        entry("devices", "absent")
    found = {d.name: d for d in list_devices()}
    assert [found[n].usable for n in ("acme", "broken", "absent", "nameless", "cpu")] == [False] * 4 + [True]
    assert "pip install acme_sdk_of_nobody" in found["acme"].reasons[0]


FAULTY = """
from types import SimpleNamespace

def nothing(name, site, options): return None
def half(name, site, options): return SimpleNamespace(info=1, alloc=1, free=1, submit=1)
def raises(name, site, options): raise RuntimeError("the cover is open")
def no_card(name, site, options): raise FileNotFoundError(2, "No such file or directory", "/dev/card0")
def too_few(): return None
def leaves(name, site, options): raise SystemExit("usage: acme")
def odd(name, site, options):
    members = dict.fromkeys(("alloc", "free", "submit", "estimate", "poll", "close"), lambda: None)
    return SimpleNamespace(**members, info={})
number = 7
"""


def test_a_device_that_is_none_by_what_it_says_is_its_drivers_fault(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "odd_driver.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    offer("tierloop-acme", "acme", "odd_driver:odd")
    (tmp_path / "machine.toml").write_text('clock = "wall"\nhost = "card"\n[devices.card]\ndriver = "acme"\n')
    says = "driver 'acme' of tierloop-acme is faulty: its info is a dict, and no DeviceInfo"
    with pytest.raises(ConfigurationError, match=says):
        open_platform(tmp_path / "machine.toml")
    (seen,) = [found for found in inventory() if found.driver == "acme"]
    assert "driver 'acme' of tierloop-acme is faulty: AttributeError" in seen.reasons[0]
    with pytest.raises(ConfigurationError, match="`info` is a dict, no DeviceInfo"):
        run(lambda site: open_device("acme", "card", site, {}), levels=["identity"])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nothing", "is faulty: it opened card as a NoneType, which has no info, alloc, free, submit, estimate"),
        ("half", "is faulty: it opened card as a SimpleNamespace, which has no estimate, poll, close"),
        ("raises", "is faulty: opening card raised RuntimeError: the cover is open"),
        ("no_card", r"is faulty: opening card raised FileNotFoundError: .*'/dev/card0'"),
        ("too_few", "is faulty: opening card raised TypeError: too_few"),
        ("leaves", "is faulty: opening card raised SystemExit: usage: acme"),
        ("number", r"cannot be used: faulty:number is 7; allowed: a function of \(name, site, options\)"),
    ],
)
def test_a_driver_that_is_faulty_is_blamed_with_its_distribution(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, says: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    offer("tierloop-acme", "acme", f"faulty:{value}")
    with pytest.raises(ConfigurationError, match=f"driver 'acme' of tierloop-acme {says}"):
        open_device("acme", "card", Site(clock=WallClock()), {})
    (tmp_path / "machine.toml").write_text('clock = "wall"\nhost = "card"\n[devices.card]\ndriver = "acme"\n')
    with pytest.raises(
        ConfigurationError, match=rf"machine\.toml: devices\.card: .*driver 'acme' of tierloop-acme {says}"
    ):
        open_platform(tmp_path / "machine.toml")
    (listed,) = [driver for driver in list_devices() if driver.name == "acme"]
    assert listed.usable == (value != "number")
    (seen,) = [found for found in inventory() if found.driver == "acme"]
    assert not seen.usable
    assert "tierloop-acme" in seen.reasons[0]


@pytest.mark.parametrize("member", ["info", "close"])
def test_a_driver_whose_device_raises_leaves_the_others_in_the_inventory(
    offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, member: str
) -> None:
    wrong = {"info": "property(lambda self: 1 / 0)", "close": "lambda self: 1 / 0"}[member]
    (tmp_path / "raising.py").write_text(
        "from tierloop.devices.conformance.example import Example\n"
        f"class Card(Example):\n    {member} = {wrong}\n"
        "def opened(name, site, options): return Card(site, name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "raising", raising=False)
    offer("tierloop-acme", "acme", "raising:opened")
    found = {each.driver: each for each in inventory()}
    assert found["acme"].reasons == ("driver 'acme' of tierloop-acme is faulty: ZeroDivisionError: division by zero",)
    assert found["cpu"].usable


def test_platforms_come_from_packages_and_are_listed_with_what_is_wrong(
    offer: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "acme_platforms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "acme-box.toml").write_text('include = ["demo"]\ndescription = "a box"\n')
    (package / "acme-bad.toml").write_text("clock = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    offer("acme-tiers", "acme", "acme_platforms", "tierloop.platforms")
    listed = {p.name: p for p in list_platforms()}
    assert (listed["acme-box"].description, listed["acme-box"].clock) == ("a box", "virtual")
    assert listed["acme-box"].distribution == "acme-tiers"
    assert "clock: 3 given" in listed["acme-bad"].reasons[0]
    with open_platform("acme-box") as platform:
        assert platform.name == "acme-box"
    (package / "demo.toml").write_text("clock = 3\n")
    with pytest.raises(ConfigurationError, match=r"platform 'demo' is offered twice, by .*demo\.toml and .*demo\.toml"):
        find_platform("demo")
    sys.modules.pop("acme_platforms", None)


# -- opening ------------------------------------------------------------------------------------------------------


def test_emulated_devices_carry_their_prefix_and_keep_the_order_of_the_file(tmp_path: Path) -> None:
    with open_machine(tmp_path) as platform:
        assert list(platform.devices) == [f"emu:{name}" for name in DEVICES]
        assert [memory.name for _, memory in platform.memories()] == list(platform.devices)
        assert platform.host == "emu:dram"
        assert list(platform.site.links) == ["pcie", "cxl", "half", "half2"]
        assert isinstance(platform.site.checker, HazardChecker)
        assert isinstance(platform.clock, VirtualClock)


def test_overrides_change_the_machine_and_are_noted(tmp_path: Path) -> None:
    with open_machine(tmp_path, overrides={"devices.gpu.capacity": 1 << 23}) as platform:
        memory = platform.devices["emu:gpu"].info.memory("emu:gpu")
        assert memory is not None
        assert memory.capacity == 1 << 23
        assert platform.notes == ["changed: devices.gpu.capacity = 8388608"]


def test_only_some_devices_can_be_opened(tmp_path: Path) -> None:
    with open_machine(tmp_path, only=["gpu", "dram"]) as platform:
        assert list(platform.devices) == ["emu:dram", "emu:gpu"]
        paths = platform.devices["emu:gpu"].info.executors[0].paths
        assert [path.memory for path in paths] == ["emu:gpu", "emu:dram"]
        assert list(platform.site.links) == ["pcie"]
    with open_machine(tmp_path, only=["gpu"]) as platform:
        assert platform.host == ""
    with pytest.raises(ConfigurationError, match=r"no device 'gpuu'; did you mean 'gpu'\?"):
        open_machine(tmp_path, only=["gpuu"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('driver = "emulated"', 'driver = "emulate"', r"devices\.dram: driver: unknown driver 'emulate'; did you mean"),
        ('"gpu.toml"', '"h100"', r"devices\.gpu: profile: unknown profile 'h100'; did you mean .*'h100-sxm'"),
        ('"gpu.toml"', '"gpv.toml"', r"devices\.gpu: profile: there is no file .*gpv\.toml"),
        ('"cxl.toml"\n', '"cxl.toml"\ncapcity = 4\n', r"devices\.cxl: emu:cxl: capcity: unknown key; did you mean"),
        ('"cxl.toml"\n', '"cxl.toml"\ncapacity = -4\n', r"devices\.cxl: .*memory\.capacity: -4 given"),
        ('reaches.dram = ["half"]', "numa_node = 0", r"devices\.nvme: executor dma reads and writes host buffers"),
        ('host = "dram"', 'host = "bare"', r"host: bare has no memory of that name"),
        ('reaches.cxl = ["cxl"]', 'reaches.bare = ["bare"]', r"devices\.dram: .*reaches emu:bare, which is not open"),
    ],
)
def test_what_is_wrong_is_said_with_file_device_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_machine(tmp_path)
    bare = '[devices.bare]\ndriver = "emulated"\nprofile = "bare.toml"\nreaches.dram = ["bare"]\n'
    wire = '[links.bare]\nends = ["dram", "bare"]\nbytes_per_s = 1e9\nlatency_ns = 0\nsource = "defined"\n'
    (tmp_path / "bare.toml").write_text(
        'kind = "gpu"\nsummary = "no memory"\n[executors.dma]\nkind = "dma"\nverbs = ["copy"]\n'
        'overhead_ns = { value = 0, source = "defined: for tests" }\n'
    )
    text = path.read_text() + bare + wire
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_platform(path)
    assert str(path) in str(caught.value)


class Stub:
    """A device that is only opened and closed."""

    def __init__(self, device: Device, closed: list[str]) -> None:
        self._device = device
        self._closed = closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def close(self) -> None:
        self._closed.append(self._device.info.name)
        self._device.close()


def test_nothing_stays_open_when_one_device_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    emulated = entry("devices", "emulated")

    def open_or_fail(name: str, site: Site, options: dict[str, Any]) -> Any:
        if name == "emu:nvme":
            raise NotPresent(name, "open", "there is no such drive")
        return Stub(emulated(name, site, options), closed)

    open_or_fail.emulated = True  # type: ignore[attr-defined]  # as the registry asks of factories
    monkeypatch.setattr(registry, "entry", lambda group, name: open_or_fail)
    with pytest.raises(NotPresent, match="emu:nvme: open: there is no such drive"):
        open_machine(tmp_path)
    assert closed == ["emu:gpu", "emu:cxl", "emu:dram"]


@pytest.mark.parametrize("says_so", [False, True])
def test_an_emulator_cannot_pass_for_a_real_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_so: bool
) -> None:
    null = entry("devices", "null")

    def pretend(name: str, site: Site, options: dict[str, Any]) -> Any:
        return null(name.removeprefix("emu:"), site, {})

    pretend.emulated = says_so  # type: ignore[attr-defined]  # as the registry asks of factories
    monkeypatch.setattr(registry, "entry", lambda group, name: pretend)
    path = tmp_path / "one.toml"
    path.write_text('clock = "virtual"\nhost = "a"\n[devices.a]\ndriver = "pretend"\n')
    with pytest.raises(ConfigurationError, match="emulated devices, and no others, have names that begin with 'emu:'"):
        open_platform(path)


# -- clocks and dilation ------------------------------------------------------------------------------------------

REAL = 'clock = "wall"\nhost = "dram"\n[devices.dram]\ndriver = "cpu"\ncapacity = 1_048_576\n'
SLOW = HostSpeed(attend_bytes_per_s=4_000_000_000, copy_bytes_per_s=2_000_000_000, spare_cores=1)


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which the machine's devices (20 + 10 + 5 / 2 + 8 bytes/ns at most) need σ = 12 or so."""
    monkeypatch.setattr(registry, "host_speed", lambda: SLOW)


def test_a_virtual_clock_with_a_real_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "real.toml"
    path.write_text(REAL)
    with pytest.raises(ConfigurationError, match=r"real.* virtual clock"):
        open_platform(path, clock="virtual")
    with open_platform(path) as platform:
        assert (platform.provenance, platform.dilation) == ("measured", 1)
        assert isinstance(platform.clock, WallClock)
        assert list(platform.devices) == ["dram"]


def test_time_cannot_be_stretched_for_a_real_device(tmp_path: Path) -> None:
    path = tmp_path / "real.toml"
    path.write_text(REAL)
    with pytest.raises(ConfigurationError, match=r"dilation 4, but dram is real: .* allowed: 1"):
        open_platform(path, dilation=4)
    path.write_text("dilation = 4\n" + REAL)
    with pytest.raises(ConfigurationError, match=r"dilation 4, but dram is real"):
        open_platform(path)


@pytest.mark.usefixtures("slow_host")
def test_emulated_devices_beside_a_real_one_have_to_be_slow_enough(tmp_path: Path) -> None:
    write_machine(tmp_path)
    path = tmp_path / "mixed.toml"
    path.write_text(
        'include = ["machine"]\nclock = "wall"\nhost = "dram"\n[devices.dram]\ndriver = "cpu"\ncapacity = 1_048_576\n'
    )
    with pytest.raises(ConfigurationError, match=r"cannot keep up with emu:gpu .* use slower profiles"):
        open_platform(path)
    with open_platform(path, only=["dram", "cxl"]) as platform:
        assert platform.dilation == 1
        assert platform.provenance == "emulated"


@pytest.mark.usefixtures("slow_host")
def test_auto_is_what_the_host_can_honour_with_room_to_spare(tmp_path: Path) -> None:
    with open_machine(tmp_path) as virtual:
        need = smallest_dilation((d.info for d in virtual.devices.values()), SLOW)
        assert need == -int(-sum(demands(d.info, SLOW) for d in virtual.devices.values()) // 1)
    assert need > 5
    with open_machine(tmp_path, clock="wall") as platform:
        assert platform.dilation == -(-need * 3 // 2)
        assert f"all times of emulated devices are {platform.dilation} times as long" in platform.notes[-1]
    with open_machine(tmp_path, clock="wall", dilation=need) as platform:
        assert platform.dilation == need
    with pytest.raises(ConfigurationError, match=rf"dilation {need - 1}: .* emu:gpu .* smallest allowed: {need}"):
        open_machine(tmp_path, clock="wall", dilation=need - 1)


def test_the_virtual_clock_needs_no_dilation(tmp_path: Path) -> None:
    with open_machine(tmp_path, dilation=1) as platform:
        assert platform.dilation == 1
    with pytest.raises(ConfigurationError, match="the virtual clock needs none"):
        open_machine(tmp_path, dilation=2)
    for wrong in (0, -1, True, 10**9):
        with pytest.raises(ConfigurationError, match="allowed: 1 to"):
            open_machine(tmp_path, dilation=wrong)
    with pytest.raises(ConfigurationError, match="clock 'real'; allowed: 'virtual' or 'wall'"):
        open_machine(tmp_path, clock="real")
    with open_platform("demo-wall", clock="virtual") as platform:
        assert (platform.dilation, platform.provenance) == (1, "simulated")
        assert platform.notes == ["clock: virtual instead of wall"]


def test_the_host_is_measured_once() -> None:
    speed = host_speed()
    assert speed is host_speed()
    assert min(speed.attend_bytes_per_s, speed.copy_bytes_per_s) > 10**8
    assert speed.spare_cores >= 1
    assert host_speed_module.HEADROOM_PERCENT > 100
