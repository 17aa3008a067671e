"""The conformance suite: our devices pass it, and each way to break one is noticed by the check meant for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from tests.broken_devices import (
    BROKEN,
    BROKEN_BY_FAULTS,
    WRONG_KERNELS,
    CallsItselfReal,
    ClaimsEqualBits,
    DirtyMemory,
    half_precision,
)
from tests.planted_faults import PLANTED, PLANTED_KERNELS
from tierloop.devices.conformance import LEVELS, NUMBERS, Report, Result, Skip, Suite, named, oracle, run
from tierloop.devices.conformance.example import Example, Kernel
from tierloop.devices.conformance.runner import MACHINE, checks_of
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import KERNELS
from tierloop.devices.kernels.definition import define
from tierloop.devices.platform import Platform
from tierloop.devices.registry import entry, open_platform
from tierloop.devices.site import Site
from tierloop.devices.wrappers import Faulty, wrapped
from tierloop.emulators.modelled import open_modelled

DEFINED: dict[str, Kernel] = dict.fromkeys(KERNELS, define)
DEMO = ("emu:gpu", "emu:dram", "emu:numa", "emu:cxl", "emu:nvme", "emu:pnm")
REAL = ("cpu", "nvme")
ONLY_EMULATED = {
    "submit_takes_no_time",
    "effects_appear_at_completion",
    "copies_and_launches_show_nothing_before_they_end",
    "a_missing_dependency_is_visible",
}
"""What asks for more than hardware promises."""
DOCS = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"


# Devices that must pass


def opened(name: str, folder: Path, site: Site) -> Device | Platform:
    """A device of ours by name; those of the platform demo come with all others of it."""
    if name in DEMO:
        return open_platform("demo")
    if name == "example on a grid":
        return Example(site, capacity=8 << 20, alignment=512)
    options: dict[str, dict[str, Any]] = {
        "reference": {},
        "cpu": {"capacity": 64 << 20, "threads": 2},
        "nvme": {"path": str(folder / "drive"), "create": True, "capacity": 16 << 20},
    }
    prefix = "emu:" if name == "reference" else ""
    device: Device = entry("devices", name)(prefix + name, site, options[name])
    return device


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["example on a grid", "reference", *REAL, *DEMO])
def test_our_devices_pass(name: str, level: str, tmp_path: Path) -> None:
    report = run(
        partial(opened, name, tmp_path),
        [level],
        virtual=name not in REAL,
        device=name if name in DEMO else None,
        examples=12,
    )
    assert not report.failed, str(report)
    skipped = {r.check for r in report.results if r.outcome == "skipped"}
    if level == "compute" and name in ("cpu", "emu:gpu", "emu:dram"):
        assert skipped <= {"operands_may_lie_in_several_memories"}, str(report)
    if level in ("memory", "ordering", "errors"):
        assert len(skipped - (ONLY_EMULATED if name in REAL else set())) <= 4, str(report)


@pytest.mark.parametrize("level", ["memory", "ordering", "errors", "stateful"])
def test_an_emulated_device_passes_on_the_wall_clock_too(level: str) -> None:
    report = run(lambda site: Example(site, delay_ns=20_000), [level], examples=12)
    assert report.passed, str(report)


class TestTheSuiteInPytest(Suite):
    """The example of the documentation, as a vendor would run it."""

    virtual = True
    examples = 10

    def open(self, site: Site) -> Device:
        return Example(site, capacity=8 << 20, kernels=DEFINED)


# Devices and kernels that must not pass


@pytest.mark.parametrize(("broken", "name"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_device_is_failed_by_the_check_that_is_meant_for_it(broken: type[Example], name: str) -> None:
    kernels = {"gather": define} if name.startswith("launches") else None
    opener = partial(broken, kernels=kernels)
    report = run(opener, only=[name], virtual=broken is not CallsItselfReal, shrink=False)
    assert report.outcome(name) == "failed", str(report)
    assert report.results[0].reason


@pytest.mark.parametrize(("broken", "name"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_that_small_tests_do_not_meet_is_noticed(broken: type[Example], name: str) -> None:
    kernels = dict.fromkeys(["attend", "gather"], define)
    report = run(partial(broken, kernels=kernels), only=[name], virtual=True, shrink=False)
    assert report.outcome(name) == "failed", str(report)


@pytest.mark.parametrize(("broken", "name"), BROKEN_BY_FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_device_that_fails_wrongly_is_failed_by_the_check_that_is_meant_for_it(
    broken: type[Faulty], name: str
) -> None:
    def opener(site: Site) -> Device:
        return wrapped(site, lambda inside: Example(inside), [lambda device, on: broken(device, on)])

    report = run(opener, only=[name], virtual=True)
    assert report.outcome(name) == "failed", str(report)


def test_a_device_that_moves_nothing_is_failed_by_every_level_that_looks_at_bytes() -> None:
    report = run(
        lambda site: entry("devices", "null")("emu:null", site, {}),
        ["memory", "ordering", "stateful"],
        virtual=True,
        shrink=False,
    )
    assert {r.level for r in report.failed} == {"memory", "ordering", "stateful"}
    assert report.outcome("every_byte_comes_back") == "failed"


@pytest.mark.parametrize(
    ("kernel", "wrong", "name"),
    [*WRONG_KERNELS, *PLANTED_KERNELS],
    ids=[f"{w.__name__}-{n}" for _, w, n in WRONG_KERNELS]
    + [f"{k}-{i}" for i, (k, _, _) in enumerate(PLANTED_KERNELS)],
)
def test_a_wrong_kernel_is_failed_by_the_check_that_is_meant_for_it(kernel: str, wrong: Kernel, name: str) -> None:
    kernels = {**DEFINED, kernel: wrong}
    report = run(lambda site: Example(site, capacity=8 << 20, kernels=kernels), only=[name], virtual=True)
    assert report.outcome(name) == "failed", str(report)


@pytest.mark.parametrize("name", ["bits_do_not_depend_on_the_cut", "combine_of_logits_is_attend"])
def test_bits_that_depend_on_the_cut_are_noticed(name: str) -> None:
    report = run(lambda site: ClaimsEqualBits(site, capacity=8 << 20, kernels=DEFINED), only=[name], virtual=True)
    assert report.outcome(name) == "failed", str(report)


class SumsOf16Bits(Example):
    """Keeps its sums in float16, and says so."""

    accumulator: ClassVar[Literal["float16", "float32"]] = "float16"

    def __init__(self, site: Site) -> None:
        rounded = dict.fromkeys(["attend", "logits", "combine", "merge", "score"], half_precision)
        super().__init__(site, capacity=8 << 20, kernels={**DEFINED, **rounded})
        executor = replace(self._info.executors[0], dtypes=frozenset({"float16", "float32"}))
        arithmetic = Arithmetic("half", self.accumulator, self.accumulator, cut_invariant=False)
        self._info = replace(self._info, executors=(executor,), arithmetic=arithmetic)


class SaysThatItHas32(SumsOf16Bits):
    """Keeps its sums in float16, and does not say so."""

    accumulator = "float32"


@pytest.mark.parametrize(
    "name",
    [
        "attend_is_attention",
        "one_token_gives_its_value",
        "logits_are_scaled_products",
        "combine_is_attention_of_given_logits",
        "merge_is_the_softmax_over_parts",
        "score_is_what_the_summary_says",
    ],
)
def test_a_device_is_judged_by_the_arithmetic_that_it_declares(name: str) -> None:
    for device, outcome in ((SumsOf16Bits, "passed"), (SaysThatItHas32, "failed")):
        report = run(device, only=[name], virtual=True)
        assert report.outcome(name) == outcome, str(report)


@pytest.mark.parametrize("name", ["bits_do_not_depend_on_the_cut", "combine_of_logits_is_attend"])
def test_a_device_whose_sums_depend_on_the_launch_is_held_to_the_bound_only(name: str) -> None:
    report = run(SumsOf16Bits, only=[name], virtual=True)
    assert report.outcome(name) == "skipped", str(report)


# The oracle, against what can be computed by hand


def test_the_oracle_rounds_to_nearest_even() -> None:
    rows = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -0.0], dtype=np.float32)
    expected = [1.0, 1.0, 1 + 4 * 2**-8, 1 + 2 * 2**-8, np.inf, -0.0]
    assert oracle.decode(oracle.encode(rows, "bfloat16"), "bfloat16").tolist() == expected
    assert np.isnan(oracle.decode(oracle.encode(np.array([np.nan], dtype=np.float32), "bfloat16"), "bfloat16")).all()
    big = np.array([65504.0, 65519.0, 65520.0], dtype=np.float32)
    assert oracle.decode(oracle.encode(big, "float16"), "float16").tolist() == [65504.0, 65504.0, np.inf]


def test_the_oracle_orders_scores_by_hand() -> None:
    scores = np.array([1, 3, 3, np.nan, -np.inf, 0, -0.0, 2], dtype=np.float32)
    assert oracle.topk(scores, np.array([5, 3]), 4).tolist() == [[1, 2, 0, 4], [2, 0, 1, -1]]


def test_the_oracle_computes_two_rows_by_hand() -> None:
    rows = oracle.Rows.of(np.array([[0, 0, 3], [0, 0, 9]]), np.array([1, 1]))
    assert rows.position.tolist() == [3, 9]
    queries, keys = np.ones((1, 1, 1, 1)), np.array([[0.0], [np.log(3.0)]])
    logits = oracle.logits(queries, keys, rows, np.array([[20]]), 1, 1.0, Arithmetic("float32"))
    roots = np.array([[0, 0, 1, 0], [0, 0, 0, 5]])
    made = oracle.states(logits, np.array([[1.0], [5.0]]), rows, roots, 8, Arithmetic("float32"))
    np.testing.assert_allclose(made.m[0], np.log(3.0))
    np.testing.assert_allclose(made.total[0], 4 / 3)
    np.testing.assert_allclose(made.acc[0], 5 + 1 / 3)
    assert np.isneginf(made.m[1]).all()
    masked = oracle.logits(queries, keys, rows, np.array([[8]]), 1, 1.0, Arithmetic("float32"))
    assert masked.value.ravel().tolist() == [0.0, -np.inf]


# Runner, report, documentation


def test_the_report_says_why() -> None:
    report = run(lambda site: DirtyMemory(site), ["identity", "memory"], virtual=True)
    as_data = json.loads(json.dumps(report.to_dict()))
    assert as_data["device"] == "emu:example"
    assert not as_data["conforms"]
    assert set(as_data["levels"]) == {"L0", "L1"}
    memory = as_data["levels"]["L1"]
    assert memory["names"] == ["memory"]
    assert memory["failed"] == len(memory["failures"]) > 0
    assert memory["failures"][0]["test"] == "fresh_memory_is_zero"
    for outcome in ("passed", "failed"):
        assert as_data[outcome] == sum(level[outcome] for level in as_data["levels"].values())
    assert as_data["skipped"] == sum(len(level["skipped"]) for level in as_data["levels"].values())
    assert as_data["passed"] + as_data["failed"] + as_data["skipped"] == len(report.results)
    assert all(
        entry["reason"] for level in as_data["levels"].values() for entry in level["failures"] + level["skipped"]
    )
    assert "failed  fresh memory is zero: region 0 of emu:example: 65536 of 65536 bytes differ" in str(report)


def test_progress_gets_every_result_as_it_comes() -> None:
    seen: list[Result] = []
    report = run(lambda site: Example(site), ["identity"], virtual=True, progress=seen.append)
    assert tuple(seen) == report.results
    assert [r.check for r in seen] == [name for name, _ in checks_of("identity")]


def test_what_is_declared_stands_beside_what_was_measured() -> None:
    report = run(lambda site: Example(site, delay_ns=500), ["envelope"], virtual=True)
    seen = {entry["quantity"]: entry for entry in report.to_dict()["declared_vs_measured"]}
    assert seen["read_latency_ns"]["declared"] == 500
    assert seen["read_latency_ns"]["measured"] == 501
    assert seen["write_bytes_per_s"]["declared"] == 10**9
    assert 0.99 < seen["write_bytes_per_s"]["ratio"] < 1


def test_levels_are_named_by_their_numbers_too() -> None:
    assert named(["L6", "identity"]) == ["identity", "stateful", "faults"]
    assert set(NUMBERS.values()) == {f"L{number}" for number in range(7)}


def test_a_real_driver_on_a_model_is_reported_as_emulated_with_the_model() -> None:
    report = run(lambda site: open_modelled(["pnm"], site), ["identity"], device="pnm0")
    assert (report.provenance, report.model) == ("emulated", "the firmware model of a near-memory processor")
    assert report.passed, str(report)


def test_skipping_everything_is_not_passing() -> None:
    assert not Report("d", "cxl", "real", (Result("memory", "x", "skipped", "no memory"),)).passed
    assert not Report("d", "cxl", "real", ()).passed


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"levels": ["memroy"]}, "level 'memroy': did you mean 'memory'"),
        ({"only": ["every_byte"]}, "check 'every_byte'"),
    ],
)
def test_unknown_levels_and_checks_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lambda site: Example(site), virtual=True, **asked)


def test_what_the_opener_raises_is_passed_on() -> None:
    def broken(site: Site) -> Device:
        raise ConfigurationError("no such card")

    with pytest.raises(ConfigurationError, match="no such card"):
        run(broken)


def test_an_opener_that_gives_no_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"gave None, whose `info` raises AttributeError: .*; allowed: a dev"):
        run(lambda site: None)  # type: ignore[arg-type,return-value]  # on purpose


def test_a_real_device_is_not_tested_on_the_virtual_clock() -> None:
    with pytest.raises(ConfigurationError, match="virtual clock"):
        run(lambda site: CallsItselfReal(site), virtual=True)


def test_a_platform_of_several_devices_needs_a_name() -> None:
    def several(site: Site) -> Platform:
        return Platform("two", site, {name: Example(site, name) for name in ("emu:a", "emu:b")})

    with pytest.raises(ConfigurationError, match="several devices"):
        run(several, ["identity"], virtual=True)
    assert run(several, ["identity"], virtual=True, device="emu:b").device == "emu:b"


def test_two_runs_report_the_same() -> None:
    reports = [run(lambda site: Example(site), ["memory", "stateful"], virtual=True, examples=5) for _ in range(2)]
    assert reports[0] == reports[1]


def test_the_suite_has_a_method_per_check() -> None:
    methods = [name for name in dir(Suite) if name.startswith("test_")]
    checks = [f"test_{level}_{name}" for level in LEVELS for name, _ in checks_of(level)]
    assert sorted(methods) == sorted([*checks, f"test_stateful_{MACHINE}"])
    assert all(getattr(Suite, name).__doc__ for name in methods)


def test_a_level_that_a_driver_leaves_out_is_skipped_with_the_reason() -> None:
    class Unfinished(Suite):
        levels = ("identity",)

    with pytest.raises(Skip, match="level memory is left out by Unfinished"):
        vars(Suite)["test_memory_fresh_memory_is_zero"](Unfinished())


def test_the_runner_needs_no_test_framework() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; sys.modules['hypothesis'] = None\n"
        "from tierloop.devices.conformance import run\n"
        "from tierloop.devices.conformance.example import Example\n"
        "print(run(lambda site: Example(site), ['memory', 'stateful'], virtual=True))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "passed  every byte comes back" in done.stdout
    assert "failed" not in done.stdout
    assert f"skipped {MACHINE.replace('_', ' ')}: Hypothesis is not installed" in done.stdout


def test_the_suite_does_not_pass_for_want_of_asserts() -> None:
    code = (
        "from tests.broken_devices import DirtyMemory\n"
        "from tierloop.devices.conformance import run\n"
        "report = run(lambda site: DirtyMemory(site), only=['fresh_memory_is_zero'], virtual=True)\n"
        "raise SystemExit(report.passed)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_examples_of_the_documentation_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "my_card.py").write_text(blocks[0])
    (tmp_path / "test_my_card.py").write_text(blocks[1])
    (tmp_path / "run_it.py").write_text(blocks[2])
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_card.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    ran = subprocess.run([sys.executable, "run_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed  every byte comes back" in ran.stdout


def test_the_documentation_names_every_level_and_every_check_that_it_names_exists() -> None:
    text = DOCS.read_text()
    names = {name for level in LEVELS for name, _ in checks_of(level)} | {MACHINE}
    for level in LEVELS:
        assert f"`{level}`" in text
    quoted = set(re.findall(r"`([a-z]+(?:_[a-z]+){3,})`", text))
    assert quoted <= names | {"test_memory_fresh_memory_is_zero"}, quoted - names
