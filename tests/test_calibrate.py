"""Calibration and verification on the virtual clock: what is known comes out again, and what is wrong is found."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import number
from tests.test_calibrate_measuring import MIB, PLAIN, write_platform
from tierloop.devices.errors import ConfigurationError
from tierloop.emulators.profile import read_profile
from tierloop.tools.calibrating_curves import pooled
from tierloop.tools.calibrating_squares import cost, minimise
from tierloop.tools.calibration import Calibration, run_calibration
from tierloop.tools.cli import Stopped
from tierloop.tools.measuring import Point, Subject
from tierloop.tools.measuring_plan import Plan, plan
from tierloop.tools.verifying import Verification, read_points, verify

RunCli = Callable[..., tuple[int, str, str]]
CORES = (
    number("overhead_ns", 5_000)
    + number("issue_ns", 4_000)
    + number("command_bytes_per_s", 4_000_000_000)
    + number("span_ns", 30)
    + 'mlp_lines = { value = [[64, 6.5], [256, 9]], source = "defined: for tests" }\n'
)
KNEE = """
[[memory.curves]]
read_fraction = 0.5
points = [[500_000_000, 100], [8_000_000_000, 120], [16_000_000_000, 200], [24_000_000_000, 500], [26_000_000_000, 500]]
source = "defined: for tests"
[[memory.curves]]
read_fraction = 1.0
points = [[500_000_000, 100], [20_000_000_000, 100]]
source = "defined: for tests"
"""


def few(plan: Plan) -> Plan:
    """A plan that is measured in no time, and says nothing about speed."""
    keep = [point for point in plan.points if point.nbytes <= 4 * MIB and point.depth <= 2][:4]
    return replace(plan, points=tuple(keep), passes=2, window_ns=100_000, windows=1, pool_nbytes=16 * MIB)


def no_score(plan: Plan) -> Plan:
    """What a knee needs: latencies, and whole streams of transfers; without the streams of kernels."""
    keep = [p for p in plan.points if p.load != "score" and (p.verb == "chase" or p.pattern == "sequential")]
    return replace(plan, points=tuple(keep))


def no_load(plan: Plan) -> Plan:
    """What constants need, in small: no streams beside a chase, which tell of curves, and scattered rows and walks of
    a sixteenth, since a model has no cache that they would have to be larger than."""
    kept = [p for p in plan.points if p.pattern != "loaded" and p.depth <= 2]
    small = [replace(p, nbytes=p.nbytes // 16) if p.verb in ("gather", "chase") else p for p in kept]
    return replace(plan, points=tuple(small))


def calibrated(folder: Path, device: str, change: Callable[[Plan], Plan] = lambda plan: plan) -> Calibration:
    """A quick calibration on the virtual clock; its profile lies in found.toml."""
    found = run_calibration(
        device, folder / "journal", "a machine", "2000-01-01", quick=True, clock="virtual", change=change
    )
    (folder / "found.toml").write_text(found.text)
    return found


# -- the fit ------------------------------------------------------------------------------------------------------


def test_an_emulated_device_gives_its_own_constants_back(tmp_path: Path) -> None:
    found = calibrated(tmp_path, "demo:dram", no_load)
    profile = read_profile(tmp_path / "found.toml")
    memory, cores = profile.memory, profile.executors[0]
    assert memory is not None
    assert memory.latency_ns == 90
    assert memory.read_bytes_per_s == pytest.approx(40_000_000_000, rel=1e-4)
    assert memory.write_bytes_per_s == pytest.approx(40_000_000_000, rel=1e-4)
    assert cores.overhead_ns == pytest.approx(2_000, abs=2)
    assert found.fit.worst_error < 1e-3
    # 96 lines of 64 bytes in 90 ns are more than the memory gives: neither they nor any other limit can be seen
    assert cores.mlp_lines == ()
    assert {name.partition(".")[2] for name, value in found.fit.constants.items() if value is None} >= {"issue_ns"}


def test_limits_of_commands_and_of_scattered_rows_come_out_too(tmp_path: Path) -> None:
    found = calibrated(tmp_path, f"{write_platform(tmp_path, PLAIN, CORES)}:mem")
    cores = read_profile(tmp_path / "found.toml").executors[0]
    assert found.fit.worst_error < 1e-2
    assert cores.command_bytes_per_s == pytest.approx(4_000_000_000, rel=0.01)
    assert cores.span_ns == pytest.approx(30, abs=1)
    assert cores.overhead_ns == pytest.approx(5_000, rel=0.01)
    assert cores.issue_ns == pytest.approx(4_000, rel=0.03)
    lines = dict(cores.mlp_lines)
    assert lines[64] == pytest.approx(6_500, rel=0.02)
    assert lines[256] == pytest.approx(9_000, rel=0.02)


def test_a_knee_is_found_and_verified(tmp_path: Path) -> None:
    cores = number("overhead_ns", 5_000) + number("command_bytes_per_s", 4_000_000_000)
    found = calibrated(tmp_path, f"{write_platform(tmp_path, KNEE, cores)}:mem", no_score)
    half = next(curve for curve in found.fit.curves if curve.read_fraction == 0.5)
    # streams of 4 GB/s move 8 on the memory each: three of them stand at the knee
    rates = [rate for rate, _ in half.points[1:4]]
    assert rates == pytest.approx([8e9, 16e9, 24e9], rel=0.01)
    assert [latency for _, latency in half.points[1:4]] == pytest.approx([120, 200, 500], rel=0.07)
    checked = verify(tmp_path / "found.toml", clock="virtual")
    loaded = [one for one in checked.points if one.expected.point.load == "transfer"]
    assert max(one.expected.value for one in loaded) > 3 * min(one.expected.value for one in loaded)
    assert max(abs(one.error) for one in loaded) < 0.01
    assert checked.failures == []


def test_a_memory_that_is_not_the_hosts_is_only_read_by_a_read(tmp_path: Path) -> None:
    found = calibrated(tmp_path, "demo:cxl", no_score)
    memory = read_profile(tmp_path / "found.toml").memory
    assert memory is not None
    assert memory.read_bytes_per_s == pytest.approx(12_000_000_000, rel=0.01)
    assert memory.write_bytes_per_s == pytest.approx(8_000_000_000, rel=0.01)
    assert memory.latency_ns == 250  # 150 of the card, 100 of the link to it
    assert found.fit.mean_error < 0.01
    checked = verify(tmp_path / "found.toml", clock="virtual")
    assert checked.mean_error == pytest.approx(found.fit.mean_error, rel=0.01)
    assert checked.coverage == 1.0


def test_a_small_memory_is_calibrated_and_verified_in_smaller_pools(tmp_path: Path) -> None:
    text = PLAIN + number("capacity", 24 * MIB)
    path = write_platform(tmp_path, text, number("overhead_ns", 5_000))
    profile = tmp_path / "mem.toml"
    lines = profile.read_text().splitlines()
    profile.write_text("\n".join(line for line in lines if "268435456" not in line))
    calibrated(tmp_path, f"{path}:mem")
    memory = read_profile(tmp_path / "found.toml").memory
    assert memory is not None
    assert memory.capacity == 24 * MIB
    assert memory.read_bytes_per_s == pytest.approx(20_000_000_000, rel=0.01)
    assert memory.write_bytes_per_s == pytest.approx(10_000_000_000, rel=0.01)
    checked = verify(tmp_path / "found.toml", clock="virtual")
    assert checked.coverage == 1.0
    assert checked.mean_error < 0.03


def test_a_drive_is_calibrated_as_a_memory_of_blocks(tmp_path: Path) -> None:
    calibrated(tmp_path, "demo:nvme", few)
    profile = read_profile(tmp_path / "found.toml")
    assert profile.memory is not None
    assert not profile.memory.byte_addressable
    assert profile.memory.flash is None
    assert profile.memory.alignment == 4096
    assert [executor.kind for executor in profile.executors] == ["dma"]


def test_the_same_readings_give_the_same_profile(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        texts.append(calibrated(tmp_path / name, "demo:dram", few).text)
    assert texts[0] == texts[1]


def test_least_squares_find_a_known_minimum_and_never_make_it_worse() -> None:
    at = np.arange(1.0, 9.0)

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(np.log((np.exp(x[0]) + np.exp(x[1]) * at) / (3.0 + 0.5 * at)))

    start = np.log([1.0, 1.0])
    x, left, _ = minimise(residuals, start)
    assert np.exp(x) == pytest.approx([3.0, 0.5], rel=1e-3)
    assert cost(left) <= cost(residuals(start))


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=20))
def test_pooled_values_never_fall_and_keep_their_sum(values: list[float]) -> None:
    rising = pooled(values)
    assert len(rising) == len(values)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(rising))
    assert math.isclose(sum(rising), sum(values), rel_tol=1e-9)
    assert pooled(rising) == pytest.approx(rising)


# -- verification -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated profile of a known device."""
    folder = tmp_path_factory.mktemp("calibrated")
    calibrated(folder, f"{write_platform(folder, PLAIN, number('overhead_ns', 5_000))}:mem")
    return folder / "found.toml"


def edited(profile: Path, folder: Path, old: str, new: str) -> Path:
    text = profile.read_text()
    assert old in text
    path = folder / "edited.toml"
    path.write_text(text.replace(old, new))
    return path


def test_every_constant_says_where_it_comes_from(profile: Path) -> None:
    sources = read_profile(profile).sources
    assert all(source.startswith("measured:") for source in sources.values())
    assert "95 % CI [" in sources["memory.latency_ns"]
    assert "a machine, 2000-01-01" in sources["memory.latency_ns"]


def test_what_was_calibrated_is_verified_without_error(profile: Path) -> None:
    found = verify(profile, clock="virtual")
    assert found.coverage == 1.0
    assert found.mean_error < 1e-3
    assert found.max_error < 5e-3
    assert found.failures == []


def test_a_profile_that_is_wrong_is_found_out(profile: Path, tmp_path: Path) -> None:
    found = verify(
        edited(profile, tmp_path, "latency_ns = { value = 100", "latency_ns = { value = 125"), clock="virtual"
    )
    chase = next(one for one in found.points if one.expected.point.pattern == "idle")
    assert chase.error == pytest.approx(0.25, abs=0.01)
    assert any("chase" in failure for failure in found.failures)


def test_a_profile_without_points_is_compared_with_its_own_model() -> None:
    from tierloop.emulators.profile import find_profile

    found = verify(find_profile("demo-dram"), clock="virtual", quick=True)
    assert found.mean_error < 1e-6
    assert any("no measured points" in note for note in found.notes)


def test_the_real_device_can_be_measured_again_and_is_what_counts_then(profile: Path, tmp_path: Path) -> None:
    changed = write_platform(tmp_path, PLAIN.replace("value = 100,", "value = 125,"), number("overhead_ns", 5_000))
    found = verify(profile, clock="virtual", device=f"{changed}:mem")
    chase = next(one for one in found.points if one.expected.point.pattern == "idle")
    assert chase.real == pytest.approx(125, rel=0.01)
    assert chase.error == pytest.approx(-0.2, abs=0.01)


def test_a_point_that_was_measured_badly_counts_neither_way(profile: Path, tmp_path: Path) -> None:
    one = read_points(profile)[0]
    wide = edited(profile, tmp_path, f"ci95_low = {one.low!r}", f"ci95_low = {0.8 * one.value!r}")
    found = verify(wide, clock="virtual")
    assert found.coverage < 1
    assert "wider than 5.0%" in found.points[0].reason
    assert found.to_json()["invalid_points"][0]["reason"] == found.points[0].reason


def test_an_emulation_that_came_late_is_invalid_and_not_slow(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.tools import measuring_passes, verifying

    honest = measuring_passes.measure

    def late(*arguments: Any, **options: Any) -> Any:
        measured = honest(*arguments, **options)
        for one in measured:
            one.rejected, one.tries, one.reason = one.tries, [], "the host was late for 3.0% of the time"
        return measured

    monkeypatch.setattr(verifying, "measure", late)
    found = verify(profile, clock="virtual")
    assert found.coverage == 0
    assert all("late" in one.reason for one in found.points)
    assert found.failures == []


def test_a_device_is_compared_with_the_points_before_anything_is_measured(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierloop.tools import verifying

    calibrated(tmp_path, "demo:nvme", few)
    monkeypatch.setattr(verifying, "measure", lambda *arguments, **options: pytest.fail("measured"))
    monkeypatch.setattr(verifying, "predict", lambda *arguments, **options: pytest.fail("predicted"))
    for path, device, said in (
        (profile, f"nvme:{tmp_path}/", "a memory of blocks"),
        (tmp_path / "found.toml", "demo:dram", "a memory of bytes"),
        (profile, "nope", "allowed: cpu"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            verify(path, clock="virtual", device=device)


def test_a_profile_that_has_no_room_for_its_points_is_refused_with_what_is_needed(
    profile: Path, tmp_path: Path
) -> None:
    small = edited(profile, tmp_path, "value = 268435456", f"value = {40 * MIB}")
    with pytest.raises(ConfigurationError, match=r"has 41943040 bytes; .* \d+ are needed"):
        verify(small, clock="virtual")


def test_points_that_stand_twice_or_not_at_all_are_refused(profile: Path, tmp_path: Path) -> None:
    head, point, *_ = profile.read_text().split("[[calibration.points]]")
    path = tmp_path / "edited.toml"
    for text, said in (
        (f"{head}[[calibration.points]]{point}[[calibration.points]]{point}", "stands at points.0. already"),
        (head, "calibration.points: missing"),
        (f"{head}points = []", "at least one"),
        (head.partition("[calibration]")[0] + "[calibration]", "calibration.version: missing"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            verify(path, clock="virtual")


def test_bounds_of_a_drive_are_wider_for_latency(tmp_path: Path) -> None:
    calibrated(tmp_path, "demo:nvme", few)
    bounds = verify(tmp_path / "found.toml", clock="virtual").bounds
    point = Point("idle", "transfer", 4096, 4096, 1)
    assert (bounds.worst(point), bounds.worst(replace(point, pattern="sequential"))) == (0.10, 0.05)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "calibration.version"),
        ("version = 1", "version = 1\ncolour = 3", "calibration.colour: unknown key"),
        ("host_apart = false", "host_apart = 0", "calibration.host_apart"),
        ('pattern = "idle"', 'pattern = "ilde"', "pattern"),
        ("depth = 1\n", "depth = 0\n", "depth"),
        ("read_fraction = 1.0", "read_fraction = 1.5", "read_fraction"),
        ("tries = 1", "tries = 1\ncolour = 3", "colour"),
        ('load = "score"', 'load = ""', "load"),
        ("[memory]", "[memory", "not a TOML file"),
        ("alignment = 1", "alignment = 0", "memory.alignment"),
    ],
)
def test_a_broken_profile_is_refused_by_key(profile: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        verify(edited(profile, tmp_path, old, new), clock="virtual")


# -- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that calibrate measure what constants need, and no more."""
    from tierloop.tools import calibration

    monkeypatch.setattr(calibration, "plan", lambda *arguments: no_load(plan(*arguments)))


@pytest.mark.usefixtures("without_load")
def test_the_loop_on_the_command_line(run_cli: RunCli, tmp_path: Path) -> None:
    output = tmp_path / "out" / "dram.toml"
    code, out, err = run_cli("calibrate", "demo:dram", "-o", output, "--quick", "--clock", "virtual", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["constants"]["latency_ns"]["value"] == pytest.approx(90, abs=0.5)
    assert "cores.issue_ns" in found["unknown"]
    assert [path.name for path in output.parent.iterdir()] == ["dram.toml"]
    report = tmp_path / "report.html"
    code, out, err = run_cli("verify", output, "--clock", "virtual", "--report", report, "--json")
    assert code == 0, err
    checked = json.loads(out)
    assert {"profile", "mean_error_pct", "max_error_pct", "coverage", "invalid_points", "dilation", "points"} <= set(
        checked
    )
    assert checked["coverage"] == 1.0
    assert checked["max_error_pct"] < 0.5
    assert "data:image/svg+xml" in report.read_text()


def test_an_error_above_the_bound_ends_with_1(run_cli: RunCli, profile: Path, tmp_path: Path) -> None:
    wrong = edited(profile, tmp_path, "latency_ns = { value = 100", "latency_ns = { value = 125")
    code, out, err = run_cli("verify", wrong, "--clock", "virtual")
    assert code == 1
    assert "idle chase" in out
    assert "FAILED" in err
    assert run_cli("verify", wrong, "--clock", "virtual", "--bound", "50")[0] == 0


@pytest.mark.usefixtures("without_load")
def test_a_model_that_does_not_describe_the_device_ends_with_1(run_cli: RunCli, tmp_path: Path) -> None:
    output = tmp_path / "nvme.toml"
    code, _, err = run_cli("calibrate", "demo:nvme", "-o", output, "--quick", "--clock", "virtual")
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("FAILED: the model is off by ")]
    assert [path.name for path in tmp_path.iterdir()] == ["nvme.toml"]
    assert read_profile(output).memory is not None


@pytest.mark.parametrize("link", ["the same", "symbolic", "hard"])
def test_an_output_that_is_an_input_is_refused(
    run_cli: RunCli, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    file = tmp_path / "drive.toml"
    text = profile.read_text()
    file.write_text(text)
    platform = write_platform(tmp_path)
    monkeypatch.chdir(tmp_path)

    def linked(target: Path, name: str) -> Path:
        if link == "the same":
            return target
        (symlink if link == "symbolic" else os.link)(target, tmp_path / name)
        return tmp_path / name

    symlink = os.symlink
    for case, arguments in enumerate(
        [
            ("verify", file, "--report", linked(file, "0.toml")),
            ("verify", "demo-dram", "--device", f"nvme:{file}", "--scratch", "--report", linked(file, "1.html")),
            ("calibrate", f"nvme:{file}", "--scratch", "-o", linked(file, "2.toml")),
            ("calibrate", f"{platform}:mem", "-o", linked(platform, "3.toml")),
            ("calibrate", f"{platform}:mem", "-o", linked(tmp_path / "mem.toml", "4.toml")),
        ]
    ):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        code, _, err = run_cli(*arguments)
        assert (code, "which is an input" in err) == (2, True), (case, err)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_journal_that_is_the_medium_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    medium = tmp_path / "x.toml.journal"
    medium.write_bytes(b"precious" * 1024)
    code, _, err = run_cli("calibrate", f"nvme:{medium}", "--scratch", "-o", tmp_path / "x.toml", "--resume")
    assert code == 2
    assert "which is an input" in err
    assert medium.read_bytes() == b"precious" * 1024


def test_too_few_points_that_count_end_with_3(run_cli: RunCli, profile: Path, tmp_path: Path) -> None:
    text = "\n".join(
        "ci95_low = 0.0" if line.startswith("ci95_low") else line for line in profile.read_text().splitlines()
    )
    (tmp_path / "unsure.toml").write_text(text)
    code, out, err = run_cli("verify", tmp_path / "unsure.toml", "--clock", "virtual")
    assert code == 3
    assert "INVALID" in out + err


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown device": (("calibrate", "cqu", "-o", "x.toml"), "PLATFORM:DEVICE"),
    "an unknown device of a platform": (("calibrate", "demo:gqu", "-o", "x.toml"), "'gpu'"),
    "no output": (("calibrate", "cpu"), "--output"),
    "an output that is no profile": (("calibrate", "cpu", "-o", "x.json"), ".toml"),
    "an output that cannot be written": (("calibrate", "cpu", "-o", "/proc/nowhere/x.toml"), "/proc/nowhere"),
    "a folder that is not there": (("calibrate", "nvme:/no/such/folder/", "-o", "x.toml"), "/no/such/folder"),
    "a virtual clock for a real device": (("calibrate", "cpu", "-o", "x.toml", "--clock", "virtual"), "real"),
    "a dilation of a real device": (("calibrate", "cpu", "-o", "x.toml", "--dilation", "3"), "real"),
    "an unknown clock": (("calibrate", "demo:dram", "-o", "x.toml", "--clock", "wal"), "'wall'"),
    "a device without a memory": (("verify", "no-such-profile"), "no-such-profile"),
    "a profile that is not there": (("verify", "nowhere.toml"), "nowhere.toml"),
    "a dilation on the virtual clock": (("verify", "demo-dram", "--clock", "virtual", "--dilation", "2"), "--dilation"),
    "a memory that nobody moves": (("verify", "demo-cxl", "--clock", "virtual"), "no executor"),
    "a report that cannot be written": (("verify", "demo-dram", "--report", "/proc/nowhere/r.html"), "/proc/nowhere"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_ends_with_2_and_leaves_nothing(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = WRONG[what]
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan be measured in no time.

    An emulated drive is filled at the speed that was measured: on a slow disk, with the pool of a true verification,
    that would take half an hour.
    """
    from tierloop.tools import calibration, measuring_plan, verifying

    whole, again = measuring_plan.plan, verifying._plan

    def short(subject: Subject, points: Sequence[Point], quick: bool, seed: int) -> Plan:
        pool = measuring_plan.room_for(points, subject.memory.alignment)
        return replace(again(subject, points, quick, seed), passes=1, window_ns=10_000, pool_nbytes=pool)

    monkeypatch.setattr(calibration, "plan", lambda *arguments: few(whole(*arguments)))
    monkeypatch.setattr(verifying, "_plan", short)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_loop_runs_on_this_machine(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    tiny(monkeypatch)
    output = tmp_path / "real.toml"
    name = "cpu" if device == "cpu" else f"nvme:{tmp_path}/"
    code, out, err = run_cli("calibrate", name, "-o", output, "--quick", "--json")
    assert code in (0, 1), err  # 1: four points at full speed may fit no profile
    found = json.loads(out)
    assert len(found["points"]) == 4
    assert all(point["ci95_low"] <= point["ci95_high"] for point in found["points"])
    assert [path.name for path in tmp_path.iterdir()] == ["real.toml"]
    code, out, err = run_cli("verify", output, "--json")
    assert code in (0, 1, 3), err  # how well it does is for a bench
    checked = json.loads(out)
    assert len(checked["points"]) == 4
    assert 0 <= checked["coverage"] <= 1
    assert checked["dilation"] >= 1


def test_an_interrupted_calibration_resumes_and_another_device_does_not(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierloop.tools import calibration
    from tierloop.tools.measuring import Rig

    monkeypatch.setattr(calibration, "plan", lambda *given: few(plan(*given)))
    honest = Rig.measure
    calls: list[Point] = []

    def stopping(rig: Any, point: Point, *arguments: Any) -> Any:
        calls.append(point)
        if len(calls) == 5:
            raise Stopped(signal.SIGTERM)
        return honest(rig, point, *arguments)

    output = tmp_path / "dram.toml"
    arguments = ("calibrate", "demo:dram", "-o", output, "--quick", "--clock", "virtual")
    monkeypatch.setattr(Rig, "measure", stopping)
    assert run_cli(*arguments)[0] == 128 + signal.SIGTERM
    monkeypatch.setattr(Rig, "measure", honest)
    assert [path.name for path in tmp_path.iterdir()] == ["dram.toml.journal"]
    code, _, err = run_cli("calibrate", "demo:cxl", "-o", output, "--quick", "--clock", "virtual", "--resume")
    assert code == 2
    assert "line 1: device" in err
    journal = (tmp_path / "dram.toml.journal").read_text().splitlines()
    assert len(journal) == 1 + 4
    assert run_cli(*arguments, "--resume")[0] in (0, 1)  # 1: so few points describe nothing; it is written all the same
    assert [path.name for path in tmp_path.iterdir()] == ["dram.toml"]
    assert len(read_points(output)) == len(json.loads(journal[0])["plan"]["points"])


def test_verification_is_plain_data(profile: Path) -> None:
    found = verify(profile, clock="virtual")
    assert isinstance(found, Verification)
    assert json.loads(json.dumps(found.to_json()))["coverage"] == 1.0
