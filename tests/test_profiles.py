"""Profiles and platforms that ship: each opens, every constant has a source, guesses are named."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machines import PROFILES, duration
from tierloop.devices.commands import Copy, Launch
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Segment
from tierloop.devices.registry import list_platforms, open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.emulators.device import open_emulated
from tierloop.emulators.profile import FOLDER, find_profile, profile_names, read_profile

SHIPPED = [p.name for p in list_platforms()]


def test_what_the_readme_promises_is_there() -> None:
    assert set(profile_names()) >= {
        *("h100-sxm", "a100-80", "l20", "rtx4090"),
        *("ddr4-3200", "ddr4-3200-remote", "ddr5-4800", "ddr5-4800-remote"),
        *("cxl-a", "cxl-b", "cxl-c", "nvme-gen4-p5510", "nvme-gen5-ps1010"),
        *("nelssa-prototype", "nelssa-512"),
    }
    assert set(SHIPPED) >= {
        *("demo", "demo-wall", "demo-host", "laptop"),
        *("hybridgen-a100-cxl", "kvdrive-l20", "nelssa-h100-4pnm"),
    }


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_opens_and_says_what_it_guesses(name: str) -> None:
    site = Site()
    device = open_emulated("emu:it", site, {"profile": name})
    info = device.info
    profile = read_profile(find_profile(name))
    assumed = [key for key, source in profile.sources.items() if source.startswith("assumed")]
    assert (info.name, info.provenance, info.kind) == ("emu:it", "emulated", profile.kind)
    for key in assumed:
        assert any(guess.startswith(key) for guess in info.guesses), key
    assert bool(info.guesses) != name.startswith("demo-")
    device.alloc(1 << 20, phantom=True)
    device.close()


def constants(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and "value" not in value:
            yield from constants(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("name", profile_names())
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    structure = ("queues", "alignment", "depth", "weight", "largest_transfer", "optional")
    for key, value in constants(tomllib.loads((FOLDER / f"{name}.toml").read_text())):
        if isinstance(value, dict):
            assert set(value) == {"value", "source"}, key
            assert len(value["source"]) > 8, key
        else:
            assert not isinstance(value, (int, float)) or isinstance(value, bool) or key.split(".")[-1] in structure, (
                key
            )


@pytest.mark.parametrize("name", [p.name for p in list_platforms() if p.clock == "virtual"])
def test_every_virtual_platform_opens(name: str) -> None:
    with open_platform(name, check_hazards=True) as platform:
        assert all(device.info.name.startswith("emu:") for device in platform.devices.values())
        assert platform.clock.virtual
        assert platform.memory_owner(platform.host).info.kind == "cpu"
        assert platform.provenance == ("simulated" if name == "demo" else "extrapolated")
        for device, executor in platform.executors():
            for path in executor.paths:
                region = platform.memory_owner(path.memory).alloc(1 << 20, phantom=True)
                if "copy" in executor.verbs and not any(note.startswith("load ") for note in platform.notes):
                    queue = executor.queues[0]
                    command = Copy(region.at(0, 1 << 19), region.at(1 << 19, 1 << 19))
                    assert device.estimate(command, queue).duration_ns == duration(platform, device, command, queue)


def test_the_demo_runs_on_the_wall_clock_at_a_dilation_that_this_host_can_honour() -> None:
    with open_platform("demo-wall") as platform:
        assert (platform.provenance, platform.clock.virtual) == ("emulated", False)
        assert platform.dilation > 1
        assert {device.info.dilation for device in platform.devices.values()} == {platform.dilation}
        path = platform.devices["emu:gpu"].info.executors[0].path("emu:gpu")
        assert path is not None
        assert path.read_bytes_per_s == 96_000_000_000 // platform.dilation
        assert path.latency_ns == 400 * platform.dilation


def test_the_demo_machine_holds_a_part_of_the_cache_on_its_gpu() -> None:
    cache = 2 * 30 * 3 * 64 * 4 * 4_096  # SmolLM2-135M: K and V, layers, heads, dim, float32, tokens
    with open_platform("demo") as platform:
        capacity = {memory.name: memory.capacity for _, memory in platform.memories()}
    assert capacity["emu:gpu"] < cache / 3
    assert all(capacity[f"emu:{n}"] > cache for n in ("dram", "numa", "cxl", "nvme", "pnm"))


def test_all_host_memories_of_the_demo_are_reached_by_the_cores_and_the_gpu() -> None:
    with open_platform("demo") as platform:
        for name in ("dram", "gpu"):
            executor = platform.devices[f"emu:{name}"].info.executors[0]
            assert {f"emu:{m}" for m in ("dram", "numa", "cxl")} <= {path.memory for path in executor.paths}


def test_the_bandwidth_of_the_nelssa_prototype_emerges() -> None:
    with open_platform("nelssa-h100-4pnm", only=["pnm0", "dram"]) as platform:
        pnm = platform.devices["emu:pnm0"]
        region = pnm.alloc(1 << 33, phantom=True)
        clusters = np.random.default_rng(0).permutation((1 << 32) // 4096)[:20_000].astype(np.int64) * 4096
        rows = Segment(region, Spans.equal(clusters, 4096))
        command = Launch(Gather(), ((rows,),), ((region.at(1 << 32, 20_000 * 4096),),))
        seconds_ns = duration(platform, pnm, command) - 20_000
        assert 2 * 20_000 * 4096 / seconds_ns == pytest.approx(200, rel=0.05)  # GB/s, as NELSSA measured


@pytest.mark.parametrize(
    ("name", "read_gb_per_s", "write_gb_per_s"),
    [("nvme-gen4-p5510", 7.0, 4.2), ("nvme-gen4-pm9a3", 6.8, 4.0), ("nvme-gen5-ps1010", 14.5, 10.5)],
)
def test_drives_reach_the_rates_of_their_datasheets(name: str, read_gb_per_s: float, write_gb_per_s: float) -> None:
    site = Site()
    drive = open_emulated("emu:ssd", site, {"profile": name, "capacity": 1 << 33})
    region = drive.alloc(1 << 31, phantom=True)
    # on its own the drive has no host memory to fill, so it copies to and from itself: once read, once written
    work = drive.estimate(Copy(region.at(0, 1 << 30), region.at(1 << 30, 1 << 30))).duration_ns
    assert work >= (1 << 30) / write_gb_per_s
    path = drive.info.executors[0].path("emu:ssd")
    assert path is not None
    assert path.read_bytes_per_s == read_gb_per_s * 10**9
    assert path.write_bytes_per_s == pytest.approx(write_gb_per_s * 10**9, rel=0.01)
    drive.close()


# -- what is refused ----------------------------------------------------------------------------------------------

DRAM = PROFILES["dram"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (DRAM.replace('kind = "cpu"', 'kind = "ram"'), r"kind: unknown value 'ram'; (did you mean|known)"),
        (DRAM.replace("capacity", "capcity"), r"memory\.capacity: missing; this table has capcity, "),
        (
            DRAM.replace('{ value = 16777216, source = "defined: for tests" }', "5"),
            r"capacity: 5 given; allowed: \{ value",
        ),
        (DRAM + "[exectuors]\n", r"exectuors: unknown key; did you mean 'executors'\?"),
        (DRAM.replace("value = 100,", "value = -1,"), r"memory\.latency_ns\.value: -1 given; allowed: 0 to 1000000000"),
        (DRAM.replace("value = 10000000000,", "value = 0,"), r"read_bytes_per_s\.value: 0 given; allowed: 1000 to"),
        (DRAM.replace("value = 10000000000,", "value = nan,"), r"value: nan given; allowed: a whole number"),
        (DRAM.replace("value = 10000000000,", "value = 1e30,"), r"value: 1e\+30 given; allowed: 1000 to"),
        (DRAM.replace("value = 10000000000,", "value = true,"), r"value: True given"),
        (DRAM.replace("value = 10000000000,", 'value = "unknown",'), r"value: unknown is not allowed here"),
        (DRAM.replace("defined: for tests", " "), r"source: empty; say where"),
        (DRAM.replace(', source = "defined: for tests"', ""), r"source: missing"),
        (DRAM.replace('"attend"', '"atend"'), r"kernels: unknown name 'atend'; did you mean 'attend'"),
        (DRAM.replace('"flush"', '"fush"'), r"verbs: unknown name 'fush'; did you mean 'flush'\?"),
        (DRAM.replace('kind = "cores"', 'kind = "core"'), r"executors\.cores\.kind: unknown value 'core'"),
        (DRAM.replace("queues = 4", "queues = 0"), r"queues: 0 given; allowed: 1 to 256"),
        (PROFILES["pnm"].replace("channels = { value = 4", "channels = { value = 3"), r"memory\.pnm: .* power of two"),
        (PROFILES["nvme"].replace("value = 16384", "value = 5000"), r"memory\.flash: a page of 5000 B holds no whole"),
        (
            PROFILES["gpu"].replace("[executors.d2h]", "[executors.d2h]\ndepth = 8"),
            r"executors: the queues of one device all have the same depth",
        ),
        ('kind = "cxl"\nsummary = "nothing"\n', r"a device has a memory, executors, or both"),
        (DRAM + "= broken", r"not a TOML file: .*line"),
    ],
)
def test_wrong_profiles_are_refused_with_file_key_and_what_is_allowed(tmp_path: Path, wrong: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(wrong)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_an_unknown_profile_is_answered_with_the_near_names() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown profile 'rtx5091'; did you mean 'rtx5090'"):
        find_profile("rtx5091")
    with pytest.raises(ConfigurationError, match=r"there is no file .*nowhere\.toml"):
        find_profile("nowhere.toml")


def test_platforms_change_constants_and_executors() -> None:
    path = find_profile("ddr5-4800-remote")
    plain = read_profile(path)
    assert plain.executors == ()
    slow = {"executors": {"cores": {"flops_per_s": 5_000_000_000}}, "memory": {"latency_ns": 140}}
    changed = read_profile(path, 1 << 30, ("cores",), slow)
    assert changed.memory is not None
    assert (changed.memory.capacity, changed.memory.latency_ns) == (1 << 30, 140)
    assert changed.executors[0].flops_per_s == changed.executors[0].dense_flops_per_s == 5_000_000_000
    assert changed.sources["executors.cores.flops_per_s"] == "set by the platform"
    assert not any("flops" in guess or "capacity" in guess for guess in changed.guesses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, r"memory\.capacity: 0 given"),
        ({"capacity": "1 GB"}, r"memory\.capacity: '1 GB' given"),
        ({"executors": ("core",)}, r"executors: no executor 'core'; did you mean 'cores'\?"),
        ({"constants": {"memory": {"latency": 3}}}, r"constants\.memory\.latency: no such constant; did you mean"),
        ({"constants": {"memory": 3}}, r"constants\.memory: 3 given; this is a table of constants"),
        ({"constants": {"memory": {"latency_ns": -3}}}, r"memory\.latency_ns\.value: -3 given"),
    ],
)
def test_wrong_changes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_profile(find_profile("ddr5-4800"), **options)


def test_unknown_options_of_a_device_are_answered_with_the_near_names() -> None:
    with pytest.raises(ConfigurationError, match=r"emu:it: capcity: unknown key; did you mean 'capacity'\?"):
        open_emulated("emu:it", Site(), {"profile": "demo-dram", "capcity": 4})
    with pytest.raises(ConfigurationError, match="emu:it: profile: missing"):
        open_emulated("emu:it", Site(), {})


def test_what_is_unknown_is_not_counted_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vague.toml"
    path.write_text(DRAM.replace("value = 100,", 'value = "unknown",'))
    profile = read_profile(path)
    assert profile.memory is not None
    assert profile.memory.latency_ns == 0
    assert profile.guesses == ("memory.latency_ns: unknown, not counted",)
