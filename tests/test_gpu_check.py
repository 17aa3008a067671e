"""What is to be run on a machine with a GPU: on a stand-in here, and for real where there is one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.test_gpu_fused import TurnsToBase2
from tierloop.devices.conformance import run
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.gpu_probe import gpus
from tierloop.devices.drivers.gpu_runtime import CudaAccelerator
from tierloop.devices.errors import ProtocolError
from tierloop.emulators.host_accelerator import HostAccelerator
from tierloop.tools import gpu_check

MIB = 1 << 20


@pytest.fixture
def a_gpu() -> str:
    """The first GPU of this machine; skips where there is none, with the reason."""
    seen = gpus()
    if not seen.found:
        pytest.skip("; ".join(seen.reasons))
    return seen.found[0].device


def test_every_part_runs_on_a_stand_in_and_its_numbers_are_not_called_measured() -> None:
    found = gpu_check.check(partial(HostAccelerator, capacity=80 * MIB, eager=True), ("identity",), MIB)
    assert found["failed"] == {}
    assert found["provenance"].startswith("a model: ")
    assert found["conformance"]["failed"] == 0
    for part, numbers in (("transfers", 4), ("registered", 2), ("attention", 4), ("launches", 3)):
        assert sum(isinstance(value, int) and value > 0 for value in found[part].values()) == numbers, part
    for kernel in ("flash", "flashinfer"):
        assert found["fused"][kernel]["launches"] >= 12, "two launches, six times each"
        assert found["fused"][kernel]["paged_bytes_per_s"] > 0
    json.dumps(found)


def test_the_states_of_a_fused_kernel_are_checked() -> None:
    make = partial(HostAccelerator, capacity=8 * MIB, eager=True)
    assert gpu_check.wrong_states(make, "flashinfer", ["one_token_gives_its_value"]) == {}
    wrong = gpu_check.wrong_states(
        partial(TurnsToBase2, capacity=8 * MIB, eager=True), "flash", ["one_token_gives_its_value"]
    )
    assert "one token" in wrong["flash one_token_gives_its_value"]


def test_fused_kernels_that_are_missing_are_no_failure_and_wrong_ones_are() -> None:
    without = partial(HostAccelerator, capacity=80 * MIB, eager=True, bases={})
    desk = gpu_check.Desk(without, MIB)
    assert "this stand-in has no flash," in gpu_check.fused(desk)["flash"]["why_not"]
    desk.close()
    wrong = gpu_check.Desk(partial(HostAccelerator, capacity=80 * MIB, eager=True, bases={"flash": 2.0}), MIB)
    with pytest.raises(ProtocolError, match="has base 2"):
        gpu_check.fused(wrong)
    wrong.close()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--out", str(tmp_path / "nowhere" / "x.json")])
    assert ended.value.code == 2
    assert "x.json: No such file or directory" in capsys.readouterr().err


def test_what_fails_and_what_was_left_out_is_named() -> None:
    found = gpu_check.check(partial(HostAccelerator, capacity=80 * MIB, eager=True), ("identity",), MIB, budget_s=0.0)
    assert found["failed"].keys() == gpu_check.PARTS.keys()
    assert "left out" in found["failed"]["attention"]


def test_without_a_gpu_it_says_why_and_the_exit_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    assert gpu_check.main(["--device", "cuda:99", "--out", str(out)]) == 2
    written = json.loads(out.read_text())
    assert "cuda:99 is not there" in written["failed"]["open"]
    assert "FAILED open" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["identity", "memory", "ordering", "errors", "compute", "stateful"])
def test_a_real_gpu_conforms(a_gpu: str, level: str) -> None:
    report = run(lambda site: open_gpu("gpu", site, {"device": a_gpu, "capacity": 64 * MIB}), [level], examples=12)
    assert not report.failed, str(report)


@pytest.mark.gpu
def test_flash_attention_of_a_real_gpu_conforms(a_gpu: str) -> None:
    assert gpu_check.wrong_states(lambda: CudaAccelerator(a_gpu), "flash") == {}


@pytest.mark.gpu
def test_a_real_gpu_is_checked_and_measured(a_gpu: str) -> None:
    found = gpu_check.check(lambda: CudaAccelerator(a_gpu), ("identity",))
    assert found["failed"] == {}
    assert found["provenance"] == "measured"
    assert found["seconds"] < 180
