"""Commands around KVDrive: sizes of windows from a recorded selection, and what a drive keeps of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .decoding import SMALL
from .phantom_runs import MODEL, record
from .test_kvdrive_restart import PROMPT as KEPT_PROMPT
from .test_kvdrive_restart import run as running
from .tiny import tiny_workload

RunCli = Callable[..., tuple[int, str, str]]
PROMPT = tiny_workload(205).token_ids
OPTIONS: dict[str, Any] = {
    "budget": 0.1, "local_tokens": 8, "update_tokens": 64, "centroids": 24, "window": 6.0, "persistent": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selections") / "run.npz"
    record("kvdrive", [PROMPT], steps=12, **OPTIONS).selection.save(path)
    return path


def test_sizes_take_no_more_memory_and_hit_no_less(recorded: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "sizes.json"
    code, text, _ = run_cli("window-sizes", "--selection", recorded, "-o", out, "--window", "1.5", "--json")
    shown = json.loads(text)
    assert code == 0
    assert shown["k"] == 6, "a tenth of 205 + 13 tokens in entries of 4"
    assert shown["hit_rate"] >= shown["uniform_hit_rate"] > 0
    assert shown["moved"] <= 1
    layers, heads = MODEL.shape.num_layers, MODEL.shape.num_kv_heads
    assert sum(int(m * shown["k"] + 1e-9) for row in shown["multiples"] for m in row) <= layers * heads * 9
    assert json.loads(out.read_text())["multiples"] == shown["multiples"]


def test_a_policy_takes_the_sizes_from_the_file(recorded: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "sizes.json"
    assert run_cli("window-sizes", "--selection", recorded, "-o", out)[0] == 0
    same = {key: value for key, value in OPTIONS.items() if key != "window"}
    sized, equal = (
        record("kvdrive", [PROMPT], steps=12, **same, sizes=str(out)),
        record("kvdrive", [PROMPT], steps=12, **same, window=2.0),
    )
    moved = [run.links["pcie"].bytes_forward + run.links["pcie"].bytes_back for run in (sized, equal)]
    assert moved[0] <= moved[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--selection", "none.npz"), "none.npz: no recorded selection"),
        (("--method", "luck"), "--method 'luck'"),
        (("--out", "/nowhere/sizes.json"), "/nowhere/sizes.json"),
        (("--out", "."), "is not a file"),
        (("--window", "-1"), "--window"),
    ],
)
def test_what_is_wrong_with_sizes_is_said(
    recorded: Path, tmp_path: Path, run_cli: RunCli, arguments: tuple[str, str], message: str
) -> None:
    given = {"--selection": str(recorded), "--out": str(tmp_path / "sizes.json")}
    given.update(dict([arguments]))
    code, _, error = run_cli("window-sizes", *(part for pair in given.items() for part in pair))
    assert code == 2
    assert message in error


def test_a_selection_of_another_policy_has_no_windows(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "other.npz"
    record("topk-blocks", [PROMPT], steps=2).selection.save(path)
    code, _, error = run_cli("window-sizes", "--selection", path, "-o", tmp_path / "sizes.json")
    assert code == 2
    assert "select" in error


def test_archives_are_listed_found_damaged_and_taken_away(tmp_path: Path, run_cli: RunCli) -> None:
    drive = tmp_path / "drive"
    with running(drive) as kept:
        kept.end(kept.begin())
    command = ("archives", "--platform", SMALL, "--set", f"devices.nvme.keep={drive}", "--json")
    code, text, _ = run_cli(*command)
    (archive,) = json.loads(text)["archives"]
    assert code == 0
    assert archive["name"] == "r"
    assert archive["tokens"] == len(KEPT_PROMPT) + 1
    assert archive["intact"]
    with drive.open("r+b") as file:
        data = file.read()
        at = data.rindex(next(bytes([b]) for b in reversed(data) if b))
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    code, text, error = run_cli(*command)
    assert code == 1
    assert "DAMAGED" in error
    assert not json.loads(text)["archives"][0]["intact"]
    code, text, _ = run_cli(*command, "--remove", "r")
    assert code == 0
    assert json.loads(text)["archives"] == []
    assert json.loads(run_cli(*command)[1])["archives"] == []


def test_a_kept_file_that_somebody_has_is_wrong_input(tmp_path: Path, run_cli: RunCli) -> None:
    with running(tmp_path / "drive"):
        code, _, error = run_cli("archives", "--platform", SMALL, "--set", f"devices.nvme.keep={tmp_path / 'drive'}")
    assert code == 2
    assert "one device at a time" in error


def test_an_archive_that_is_not_there_is_not_removed(tmp_path: Path, run_cli: RunCli) -> None:
    code, _, error = run_cli(
        "archives", "--platform", SMALL, "--set", f"devices.nvme.keep={tmp_path / 'drive'}", "--remove", "x"
    )
    assert code == 2
    assert "no archive 'x'" in error


def test_a_platform_without_a_drive_has_no_archives(run_cli: RunCli) -> None:
    code, _, error = run_cli("archives", "--platform", "hybridgen-a100")
    assert code == 2
    assert "no persistent memory" in error
