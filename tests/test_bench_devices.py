"""`bench devices`: what counts as met, what is said where fio is missing, and that every figure is there. Not timed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from tierloop.tools import bench_devices_measure, cli
from tierloop.tools.bench_devices import raise_for
from tierloop.tools.bench_devices_measure import DeviceFigure, drive_figures, transfer_cost

GOOD = DeviceFigure("copies", "GB/s", 9.5, "memcpy", 10.0, 0.95, "≥ 0.9 of memcpy", True)


def test_a_ratio_is_the_median_over_pairs() -> None:
    seen = bench_devices_measure._compared("x", [1.0, 9.0, 8.0], "peer", [10.0, 10.0, 10.0], 0.8, "≥ 0.8", "")
    assert (seen.ratio, seen.met) == (0.8, True)
    assert bench_devices_measure._compared("x", [7.0], "peer", [10.0], 0.8, "≥ 0.8", "").met is False


@pytest.mark.parametrize(
    ("figures", "strict", "code"),
    [
        ([GOOD], True, 0),
        ([GOOD, replace(GOOD, met=False)], True, 1),
        ([GOOD, replace(GOOD, met=None)], True, 3),
        ([replace(GOOD, met=False), replace(GOOD, met=None)], False, 0),
    ],
)
def test_only_a_strict_run_ends_by_its_targets(figures: list[DeviceFigure], strict: bool, code: int) -> None:
    if not code:
        raise_for(figures, strict)
        return
    with pytest.raises(typer.Exit) as ended:
        raise_for(figures, strict)
    assert ended.value.exit_code == code


def test_without_fio_a_figure_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    figures = drive_figures(tmp_path, 16 << 20, 1)
    missing = [figure for figure in figures if figure.peer == "fio"]
    assert len(missing) == 2
    assert all(figure.met is None and "apt install fio" in figure.note for figure in missing)
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_a_transfer_counts_every_span(tmp_path: Path) -> None:
    path = tmp_path / "drive"
    path.write_bytes(bytes(16 << 20))
    figure = transfer_cost(path, 16 << 20)
    assert figure.value is not None
    assert figure.value > 0
    assert "4,096 spans" in figure.note


def test_the_command_prints_every_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(bench_devices_measure, "COPY_NBYTES", 1 << 20)
    arguments = ["bench", "devices", "--folder", str(tmp_path), "--file-mib", "16", "--rounds", "1", "--json"]
    assert cli.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [figure["peer"] for figure in figures] == ["memcpy", "memcpy", "fio", "fio", ""]
    assert cli.main([*arguments, "--strict"]) in (1, 3)


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "devices", "--folder", "/no/such/folder"]) == 2
    assert "no folder" in capsys.readouterr().err
