"""The manifest never fails, and holds nothing that could not be published."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.timed_device import Bench
from tierloop.runtime import manifest as module
from tierloop.runtime.manifest import UNKNOWN, commit, cpu_model, manifest, version


def test_it_says_what_is_needed_to_get_a_number_again() -> None:
    record = manifest({"tokens": 3}, Bench(dilation=7).platform, seed=5)
    assert record["config"] == {"tokens": 3}
    assert record["seed"] == 5
    assert record["platform"]["dilation"] == 7
    assert record["platform"]["clock"] == "virtual"
    assert record["packages"]["numpy"] not in ("", UNKNOWN)
    assert json.loads(json.dumps(record)) == record


def test_it_holds_neither_paths_nor_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody-in-particular")
    text = json.dumps(manifest({}))
    assert str(Path(__file__).resolve().parent.parent) not in text
    assert "somebody-in-particular" not in text


def test_a_copy_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "tierloop" / "runtime" / "manifest.py"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert commit() == UNKNOWN


def test_changes_in_a_checkout_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "runtime" / "manifest.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = commit()
    assert len(clean) == 40
    (tmp_path / "pyproject.toml").write_text("changed")
    assert commit() == f"{clean}+changes"


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == UNKNOWN


def test_what_is_not_installed_is_unknown() -> None:
    assert version("no-such-distribution-of-ours") == UNKNOWN


def test_the_processor_is_read_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\nflags : a b\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"
    assert cpu_model(tmp_path / "missing")
