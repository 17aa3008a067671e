"""The command line: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError, MediaError, OutOfMemory
from tierloop.runtime.results import Comparison
from tierloop.tools import comparing
from tierloop.tools import demo as demo_tool
from tierloop.tools.bench_policies import POLICIES
from tierloop.tools.cli import exit_code
from tierloop.tools.options import assignments, policy_options
from tierloop.tools.output import OutputError

COMMANDS = ("doctor", "list", "run", "compare", "demo", "bench", "conformance", "calibrate", "verify")
SHORT = ("--prompt-tokens", "300", "--tokens", "3")


RunCli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run_cli: RunCli, command: str) -> None:
    code, out, _ = run_cli(command, "--help")
    assert code == 0
    assert "Exit code" in out
    assert "--json" in out


def test_help_needs_no_framework() -> None:
    code = (
        "import sys; from tierloop.tools.cli import main; main(['--help']); print(sorted({'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert command in done.stdout


def test_the_version_is_that_of_the_package(run_cli: RunCli) -> None:
    code, out, _ = run_cli("--version")
    assert (code, out.split()[0]) == (0, "tierloop")


def test_compare_prints_json_and_nothing_else(run_cli: RunCli, tiny_folder: Path) -> None:
    code, out, err = run_cli("compare", "--model", tiny_folder, *SHORT, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["platform"] == "demo"
    assert found["clock"] == "virtual"
    assert found["model"] == "tiny"
    assert 300 <= found["prompt_tokens"] < 320
    assert {p["policy"] for p in found["policies"]} == {
        "all-gpu",
        "stream-offload",
        "cpu-attention",
        "split-all",
        "topk-blocks",
        "cluster-topk",
        "hybridgen",
        "kvdrive",
        "nelssa",
        "paged",
    }
    sparse = ("topk-blocks", "cluster-topk", "hybridgen", "kvdrive", "nelssa")
    for policy in found["policies"]:
        assert policy["refused"] is None
        assert policy["max_error"] <= policy["error_bound"]
        assert policy["checked"] > 0
        assert policy["provenance"] == "simulated"
        assert len(policy["tokens"]) == 3
        assert policy["equal_to_dense"] or policy["policy"] in sparse
        assert policy["tokens_per_s"] > 0
        for use in policy["devices"].values():
            assert {"bytes_read", "bytes_written", "busy_ns", "stall_ns", "commands"} <= set(use)
            assert use["busy_ns"] + use["stall_ns"] <= policy["elapsed_ns"]
        for use in policy["links"].values():
            assert {"bytes_forward", "bytes_back", "busy_ns"} <= set(use)
    assert found["manifest"]["config"]["policies"][0]["name"]
    assert found["manifest"]["platform"]["name"] == "demo"


def test_the_policy_that_is_named_takes_its_path(run_cli: RunCli, tiny_folder: Path) -> None:
    code, out, err = run_cli("run", "--policy", "cpu-attention", "--model", tiny_folder, *SHORT, "--json")
    assert code == 0, err
    (policy,) = json.loads(out)["policies"]
    assert policy["devices"]["emu:dram"]["commands"] > 0
    assert policy["placement"].keys() == {"emu:dram"}


def test_run_shows_the_text_and_a_table(run_cli: RunCli, tiny_folder: Path) -> None:
    code, out, _ = run_cli("run", "--model", tiny_folder, *SHORT)
    assert code == 0
    assert "split-all" in out
    assert "simulated" in out
    assert "all 3" in out


def test_the_same_command_gives_the_same_trace_and_report(run_cli: RunCli, tiny_folder: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        trace, report = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        code, _, err = run_cli("run", "--model", tiny_folder, *SHORT, "--trace", trace, "--report", report)
        assert code == 0, err
        texts.append(trace.read_bytes())
        assert "<svg" not in report.read_text()
        assert "data:image/svg+xml" in report.read_text()
    assert texts[0] == texts[1]
    assert len(list(tmp_path.iterdir())) == 4
    assert json.loads(texts[0])["traceEvents"]


def test_options_reach_policy_and_platform(run_cli: RunCli, tiny_folder: Path) -> None:
    arguments = ("--option", "stream-offload.percent={'emu:dram' = 100}", "--set", "links.pcie.bytes_per_s=1e6")
    code, out, err = run_cli("run", "--policy", "stream-offload", "--model", tiny_folder, *SHORT, *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["policies"][0]["placement"].keys() == {"emu:dram"}
    assert found["manifest"]["config"]["overrides"] == {"links.pcie.bytes_per_s": 1e6}
    link = found["policies"][0]["links"]["pcie"]
    assert link["busy_ns"] >= link["bytes_forward"] * 1000


def test_a_policy_that_does_not_fit_is_refused_and_the_others_run(run_cli: RunCli, tiny_folder: Path) -> None:
    small = ("--set", "devices.gpu.capacity=140000", "--policy", "all-gpu", "--policy", "cpu-attention")
    code, out, err = run_cli("compare", "--model", tiny_folder, *SHORT, *small, "--json")
    assert code == 0, err
    refused, ran = json.loads(out)["policies"]
    assert "emu:gpu" in refused["refused"]
    assert ran["refused"] is None


def test_a_tier_that_is_too_small_is_wrong_input(run_cli: RunCli, tiny_folder: Path) -> None:
    code, out, err = run_cli(
        "run", "--policy", "all-gpu", "--model", tiny_folder, *SHORT, "--set", "devices.gpu.capacity=140000"
    )
    assert (code, out) == (2, "")
    assert "emu:gpu" in err
    assert "Traceback" not in err


PLATFORM = """
clock = "virtual"
host = "dram"
[devices.gpu]
driver = "emulated"
profile = "demo-gpu"
reaches.dram = ["pcie"]
[devices.dram]
driver = "emulated"
profile = "demo-dram"
[links.pcie]
ends = ["dram", "gpu"]
bytes_per_s = 1e10
latency_ns = 100
source = "defined: a test"
"""
DRIVE = """
clock = "wall"
host = "dram"
[devices.dram]
driver = "cpu"
[devices.drive]
driver = "nvme"
path = "PATH"
"""
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown command": (("compere",), "No such command"),
    "an unknown option": (("run", "--polcy", "x"), "No such option"),
    "an unknown platform": (("run", "--platform", "dmeo"), "'demo'"),
    "an unknown policy": (("run", "--policy", "split-al"), "'split-all'"),
    "an unknown policy among others": (("compare", "--policy", "all-gpu", "--policy", "topk"), "'topk-blocks'"),
    "an unknown profile": (("run", "--set", "devices.gpu.profile=h10-sxm"), "'h100-sxm'"),
    "an unknown option of a policy": (("run", "--option", "split-all.share=1"), "'shares'"),
    "an option of a policy that does not run": (("run", "--option", "topk-blocks.budget=1"), "topk-blocks"),
    "an option without a value": (("run", "--option", "split-all.shares"), "KEY=VALUE"),
    "an unknown key of the platform": (("run", "--set", "devices.gpu.colour=red"), "colour"),
    "a device that is not there": (("run", "--set", "devices.gqu.capacity=1"), "'gpu'"),
    "a negative bandwidth": (("run", "--set", "links.pcie.bytes_per_s=-1"), "links.pcie.bytes_per_s"),
    "an unknown clock": (("run", "--clock", "real"), "virtual"),
    "an unknown type": (("run", "--kv-dtype", "float8"), "float16"),
    "a model that is not there": (("run", "--model", "no-such-model"), "no such model"),
    "a prompt that is not there": (("run", "--prompt-file", "no-such-file"), "no-such-file"),
    "a virtual clock with a real device": (("run", "--platform", "demo-host", "--clock", "virtual"), "real"),
    "a dilation on the virtual clock": (("run", "--clock", "virtual", "--dilation", "2"), "--dilation"),
    "a dilation that this host cannot honour": (("run", "--platform", "demo-wall", "--dilation", "1"), "dilation 1"),
    "no tokens": (("run", "--tokens", "0"), "--tokens"),
    "a prompt that is too short for the needle": (("run", "--prompt-tokens", "20"), "20 tokens"),
    "a prompt longer than the context": (("run", "--prompt-tokens", "5000"), "1024"),
    "an output that cannot be written": (("run", "--trace", "/proc/nowhere/trace.json"), "/proc/nowhere"),
    "a demo that cannot be written": (("demo", "--out", "/dev/null/out"), "/dev/null"),
    "an unknown device of a platform": (("conformance", "demo", "--device", "gqu"), "'gpu'"),
    "an unknown level": (("conformance", "cpu", "--level", "memry"), "'memory'"),
    "neither a driver nor a platform": (("conformance", "dem"), "'demo'"),
    "an unknown model": (("conformance", "pmn:model"), "'pnm'"),
    "a node that is no number": (("conformance", "cpu:x"), "'x' is no number"),
    "an unknown profile of an emulated device": (("conformance", "emu:demo-cxx"), "'demo-cxl'"),
    "a device of one device": (("conformance", "pnm:model", "--device", "pnm0"), "is one device"),
    "options of a model": (("conformance", "pnm:model", "--option", "a=1"), "takes no options"),
    "virtual time for a real driver": (("conformance", "pnm:model", "--clock", "virtual"), "no virtual time"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_ends_with_2_and_says_what_is_allowed(
    run_cli: RunCli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = WRONG[what]
    if arguments[0] in ("run", "compare") and "--model" not in arguments:
        arguments = (arguments[0], "--model", str(tiny_folder), *SHORT, *arguments[1:])
    code, out, err = run_cli(*arguments)
    assert code == 2, err
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not toml", "not a TOML file"),
        (PLATFORM.replace('["pcie"]', '["pice"]'), "'pcie'"),
        (PLATFORM.replace('reaches.dram = ["pcie"]', "reaches.dram = []"), "link is missing"),
        (PLATFORM.replace("latency_ns", "latency"), "latency"),
        ('include = ["machine"]' + PLATFORM, "circle"),
        (DRIVE.replace("PATH", "/no/such/drive"), "/no/such/drive"),
        (DRIVE.replace("PATH", "/tmp"), "/tmp"),
        (DRIVE.replace("PATH", "/dev/null"), "/dev/null"),
    ],
    ids=[
        "not TOML",
        "an unknown link",
        "a missing link",
        "an unknown key",
        "an include of itself",
        "a drive that is missing",
        "a drive that is a folder",
        "a drive that is neither file nor block device",
    ],
)
def test_a_wrong_platform_file_ends_with_2_and_names_what_is_wrong(
    run_cli: RunCli, tiny_folder: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(text)
    code, out, err = run_cli("run", "--model", tiny_folder, *SHORT, "--platform", file)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_model_file_that_is_no_model_ends_with_2(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("once upon a time")
    code, out, err = run_cli("run", "--model", tmp_path / "model.gguf")
    assert (code, out) == (2, "")
    assert "model.gguf" in err


def altered(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let every result of a comparison come out with these fields."""
    from tierloop.runtime import compare as runtime

    honest = runtime.compare

    def compare(*arguments: Any, **options: Any) -> Comparison:
        found = honest(*arguments, **options)
        return replace(found, policies=tuple(replace(result, **changes) for result in found.policies))

    monkeypatch.setattr(runtime, "compare", compare)


def test_a_check_that_failed_ends_with_1_and_the_result_is_shown(
    run_cli: RunCli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, equal_to_dense=False)
    code, out, err = run_cli("run", "--model", tiny_folder, *SHORT, "--json")
    assert code == 1
    assert json.loads(out)["policies"][0]["equal_to_dense"] is False
    assert "the tokens differ from dense" in err


def test_an_invalid_run_ends_with_3(run_cli: RunCli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(monkeypatch, invalid=("late by 3 ms",))
    code, out, err = run_cli("run", "--model", tiny_folder, *SHORT)
    assert code == 3
    assert "INVALID" in out
    assert "late by 3 ms" in err


def test_a_bug_shows_its_traceback(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.devices import registry

    def broken() -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(registry, "list_platforms", broken)
    code, out, err = run_cli("list")
    assert (code, out) == (1, "")
    assert "Traceback" in err
    assert "boom" in err
    assert "bug in tierloop" in err


def test_errors_have_their_exit_codes() -> None:
    from tierloop.runtime.models import ModelError
    from tierloop.runtime.workloads import WorkloadError

    for wrong in (ConfigurationError("x"), OutputError("x"), ModelError("x"), WorkloadError("x")):
        assert exit_code(wrong) == 2
    assert exit_code(OutOfMemory("gpu", "alloc", "too much")) == 2
    assert exit_code(MediaError("nvme", "read", "bad block")) == 1
    assert exit_code(ValueError("a bug")) is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_leaves_nothing(
    run_cli: RunCli,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    @contextmanager
    def interrupting() -> Iterator[Callable[[str, int, int], None]]:
        def progress(stage: str, done: int, total: int) -> None:
            if (stage, done) == ("split-all", 2):
                os.kill(os.getpid(), number)

        yield progress

    monkeypatch.setattr(comparing, "progress", interrupting)
    before = signal.getsignal(number)
    outputs = ("--trace", tmp_path / "trace.json", "--report", tmp_path / "report.html")
    ended, out, err = run_cli("run", "--model", tiny_folder, *SHORT, *outputs)
    assert (ended, out) == (code, "")
    assert "interrupted" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_list_names_what_other_commands_take(run_cli: RunCli) -> None:
    code, out, _ = run_cli("list", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"demo", "demo-wall", "demo-host", "laptop"} <= {p["name"] for p in found["platforms"]}
    assert {"split-all", "all-gpu"} <= {p["name"] for p in found["policies"]}
    assert {"cpu", "nvme", "emulated"} <= {d["name"] for d in found["drivers"]}
    assert all(not row["reasons"] for rows in found.values() for row in rows)
    assert "demo-wall" in run_cli("list")[1]


def test_doctor_keeps_its_contract(run_cli: RunCli) -> None:
    code, out, _ = run_cli("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    for device in found["devices"]:
        assert {"name", "kind", "provenance", "usable", "reasons"} <= set(device)
        assert device["provenance"] in ("real", "emulated")
        assert device["name"].startswith("emu:") == (device["provenance"] == "emulated")
        assert device["usable"] or device["reasons"]
    assert any(d["name"] == "cpu" and d["usable"] for d in found["devices"])
    assert {
        "lateness_p99_ns",
        "smallest_latency_ns",
        "smallest_paced_latency_ns",
        "highest_rate_bytes_per_s",
    } <= set(found["timing_floor"])
    assert found["dilation"]["auto"] >= found["dilation"]["smallest"] >= 1


def test_doctor_probes_a_drive_and_leaves_it_as_it_was(run_cli: RunCli, tmp_path: Path) -> None:
    drive = tmp_path / "disk.img"
    drive.write_bytes(b"precious" * 1024)
    code, out, _ = run_cli("doctor", "--quick", "--path", drive, "--json")
    assert code == 0
    assert {"name": str(drive), "usable": True}.items() <= next(
        d for d in json.loads(out)["devices"] if d["driver"] == "nvme"
    ).items()
    assert drive.read_bytes() == b"precious" * 1024


@pytest.mark.parametrize("drive", ["/no/such/drive", "/tmp", "/dev/null"])
def test_doctor_says_why_a_drive_cannot_be_used_and_ends_with_2(run_cli: RunCli, drive: str) -> None:
    code, out, err = run_cli("doctor", "--quick", "--path", drive)
    assert code == 2
    assert drive in out
    assert drive in err


def test_conformance_reports_every_check(run_cli: RunCli) -> None:
    code, out, err = run_cli("conformance", "reference", "--level", "identity", "--level", "memory", "--json")
    report = json.loads(out)
    assert code == 0, err
    assert (report["device"], report["provenance"], report["failed"]) == ("emu:reference", "emulated", 0)
    assert report["conforms"]
    assert report["passed"] > 5
    assert set(report["levels"]) == {"L0", "L1"}
    assert report["declared_vs_measured"] == []


@pytest.mark.parametrize(
    ("name", "device", "provenance"),
    [
        ("pnm:model", "pnm:model", "emulated"),
        ("emu:demo-cxl", "emu:demo-cxl", "emulated"),
        ("nvme:file=", "nvme:file={drive}", "real"),
    ],
)
def test_conformance_knows_devices_by_short_names(
    run_cli: RunCli, tmp_path: Path, name: str, device: str, provenance: str
) -> None:
    drive = tmp_path / "drive"
    code, out, err = run_cli("conformance", f"{name}{drive}" if name.endswith("=") else name, "--level", "L5", "--json")
    report = json.loads(out)
    assert code == (0 if report["passed"] else 1), err
    assert (report["device"], report["provenance"], report["failed"]) == (device.format(drive=drive), provenance, 0)
    assert {seen["quantity"] for seen in report["declared_vs_measured"]} >= {"read_bytes_per_s", "write_latency_ns"}
    assert all(seen["measured"] > 0 for seen in report["declared_vs_measured"])
    assert not drive.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvme:file=", "'nvme:file=' names no file"),
        ("nvme:file=/", "'nvme:file=/' names no file"),
        ("nvme:file=small", "small holds 8 bytes; the suite needs 65536 or more"),
        ("nvme:file=no/such/folder/drive", "no/such/folder/drive: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_a_drive_is_refused_by_name(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_bytes(b"precious")
    code, out, err = run_cli("conformance", name, "--level", "L0")
    assert (code, out) == (2, ""), err
    assert why in err
    assert (tmp_path / "small").read_bytes() == b"precious"


def test_conformance_overwrites_nothing_unasked(run_cli: RunCli, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.touch()
    os.truncate(drive, 1 << 20)
    for _ in range(2):  # a blank file, and it is blank again afterwards
        assert run_cli("conformance", f"nvme:file={drive}", "--level", "L1")[0] == 0
    with drive.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"you")
    for subject in ([f"nvme:file={drive}"], *([name, "--option", f"path={drive}"] for name in ("nvme", "cxl"))):
        code, _, err = run_cli("conformance", *subject, "--level", "L1")
        assert code == 2
        assert "its contents would be overwritten; --scratch says that they may be lost" in err
    assert drive.read_bytes() == bytes((1 << 20) - 3) + b"you"
    assert run_cli("conformance", f"nvme:file={drive}", "--level", "L1", "--scratch")[0] == 0


def test_conformance_knows_which_file_its_options_name(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "drive").write_bytes(b"precious" * (1 << 17))
    inside = ("--option", "path=drive", "--option", f"folder={tmp_path}")
    for subject in (
        ("nvme", *inside),
        ("cxl", *inside),
        (f"nvme:file={tmp_path / 'new'}", "--option", f"path={tmp_path / 'drive'}"),
        ("cxl", "--option", "serial=7"),
    ):
        code, _, err = run_cli("conformance", *subject, "--level", "L0")
        assert code == 2
        assert "--scratch" in err or "names the file already" in err, err
    assert (tmp_path / "drive").read_bytes() == b"precious" * (1 << 17)


def test_conformance_of_a_platform_overwrites_nothing_unasked(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(
        'description = "a drive"\nclock = "wall"\nhost = "dram"\n[devices.dram]\ndriver = "cpu"\n'
        'capacity = 67_108_864\n[devices.drive]\ndriver = "nvme"\npath = "medium"\n'
    )
    (tmp_path / "medium").write_bytes(b"precious" * (1 << 17))
    code, _, err = run_cli("conformance", file, "--level", "L0")
    assert code == 2
    assert f"{tmp_path / 'medium'}: its contents would be overwritten" in err
    assert (tmp_path / "medium").read_bytes() == b"precious" * (1 << 17)
    assert run_cli("conformance", file, "--device", "dram", "--level", "identity")[0] == 0
    assert run_cli("conformance", file, "--device", "drive", "--level", "identity", "--scratch")[0] == 0


def test_a_blank_file_that_somebody_else_has_is_left_as_it_is(run_cli: RunCli, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.write_bytes(bytes(1 << 20))
    before = drive.stat()
    with drive.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        code, _, err = run_cli("conformance", f"nvme:file={drive}", "--level", "L0")
    assert code != 0, err
    assert drive.stat() == before


def test_conformance_leaves_a_link_to_nowhere_alone(run_cli: RunCli, tmp_path: Path) -> None:
    link = tmp_path / "drive"
    link.symlink_to(tmp_path / "nowhere")
    code, _, err = run_cli("conformance", f"nvme:file={link}", "--level", "L0")
    assert code == 2, err
    assert link.is_symlink()


def test_conformance_of_a_new_file_asks_for_the_room_first(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierloop.tools.conformance_subjects.FILE_NBYTES", 1 << 60)
    code, _, err = run_cli("conformance", f"nvme:file={tmp_path / 'drive'}", "--level", "L0")
    assert code == 2
    assert f"{1 << 60}" in err
    assert list(tmp_path.iterdir()) == []


def test_conformance_leaves_nothing_behind_where_it_is_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierloop.tools.cli", "conformance", "reference"]
    done = subprocess.run(
        [*command, "--level", "stateful", "--examples", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_writes_a_platform_only_where_it_can_be_opened_from(run_cli: RunCli, tmp_path: Path) -> None:
    code, _, err = run_cli("doctor", "--quick", "--write-platform", tmp_path / "here")
    assert code == 2
    assert ".toml" in err
    assert list(tmp_path.iterdir()) == []


def test_conformance_of_several_devices_has_a_report_for_each(run_cli: RunCli) -> None:
    chosen = ("--device", "cxl", "--device", "dram")
    code, out, err = run_cli("conformance", "demo", *chosen, "--level", "identity", "--json")
    assert code == 0, err
    assert [report["device"] for report in json.loads(out)["devices"]] == ["emu:cxl", "emu:dram"]


def test_a_device_that_keeps_no_bytes_fails_its_conformance(run_cli: RunCli) -> None:
    code, out, err = run_cli("conformance", "null", "--level", "memory")
    assert code == 1
    assert "FAILED" in out
    assert "FAILED: memory" in err


@pytest.mark.slow
def test_bench_gives_figures_with_their_limits(run_cli: RunCli, tiny_folder: Path) -> None:
    code, out, err = run_cli("bench", "--model", tiny_folder, *SHORT, "--json")
    assert code == 0, err
    figures = json.loads(out)["figures"]
    # A policy's own code on a tiny model is less than what the cost of commands varies by: it may come out as nothing.
    assert all(figure["value"] > 0 or "its own code" in figure["name"] for figure in figures)
    assert all(figure["value"] >= 0 and figure["unit"] for figure in figures)
    assert {f"{name}: its own code" for name in (*POLICIES, "serving loop")} <= {f["name"] for f in figures}
    assert [figure["name"] for figure in figures if "decode step" in figure["name"]]
    assert any(figure["limit"] for figure in figures)


def test_the_demo_leaves_its_files_and_fails_if_the_fact_is_not_answered(
    run_cli: RunCli, tiny_folder: Path, tmp_path: Path
) -> None:
    arguments = ("--model", tiny_folder, *SHORT, "--wall-tokens", "2", "--out", tmp_path / "out")
    code, out, err = run_cli("demo", *arguments, "--json")
    assert code == 1, err
    found = json.loads(out)
    assert "plain transformers does not give the answer" in " ".join(found["failures"])
    assert not any("tokens differ" in failure or "bound" in failure for failure in found["failures"])
    assert found["platform"] == "demo"
    assert [other["platform"] for other in found["others"]] == ["demo-wall", "demo-host"]
    assert [other["clock"] for other in found["others"]] == ["wall", "wall"]
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == found
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo.json", "report.html", "trace.json"]
    processes = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert {"demo: split-all", "demo-wall: split-all", "demo-host: split-all"} <= processes


def test_the_demo_checks_answers_and_refusals(run_cli: RunCli, tiny_folder: Path) -> None:
    _, out, _ = run_cli("compare", "--model", tiny_folder, *SHORT, "--policy", "split-all", "--json")
    from tierloop.runtime.results import PolicyResult

    found = json.loads(out)
    good = PolicyResult("split-all", equal_to_dense=True, answered=True, error_bound=1.0)
    main_run = Comparison("demo", "virtual", "m", found["prompt_tokens"], (good,), answer="7", dense_text="It is 7.")
    refused = replace(good, policy="all-gpu", refused="too small")
    assert demo_tool.failures([replace(main_run, policies=(refused, good))]) == []
    assert "not in its text" in demo_tool.failures([replace(main_run, policies=(replace(good, answered=False),))])[0]
    assert "was refused" in demo_tool.failures([replace(main_run, policies=(replace(good, refused="x"),))])[0]
    assert "does not fit" in demo_tool.failures([replace(main_run, policies=(replace(refused, refused=None),))])[0]
    silent = replace(main_run, policies=(replace(good, answered=False),), dense_text="I do not know.")
    assert demo_tool.failures([main_run, silent]) == []


def test_values_of_options_are_toml_or_text() -> None:
    given = ["a=1e9", "b=text", 'c="1"', "d = {x = 2}", "e=true", "f="]
    assert assignments(given, "--set") == {"a": 1e9, "b": "text", "c": "1", "d": {"x": 2}, "e": True, "f": ""}
    assert policy_options(["p.k=1"], ["p", "q"]) == {"p": {"k": 1}, "q": {}}


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["a=1", "a=2"]])
def test_an_assignment_that_is_none_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="--set"):
        assignments(texts, "--set")
