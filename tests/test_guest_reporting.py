"""What tests say while they run: every outcome, with its reason, under the name that JUnit gives the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tierloop.tools.guest import reporting, testing

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such drive")

@pytest.fixture
def messy():
    yield
    raise OSError("not tidied")

@pytest.mark.parametrize("path", ["a/b", "c::d", "e.py"])
def test_good(path): pass
def test_bad(): assert 1 == 2, "why"
def test_without(broken): pass
def test_left(messy): pass
def test_skipped(): pytest.skip("no such device")
class TestClass:
    def test_inside(self): pass
def test_last():
    import os
    os._exit(9)
"""


def ran(folder: Path, leave: bool) -> None:
    (folder / "deep").mkdir()
    text = TESTS if leave else TESTS.replace("os._exit(9)", "pass")
    (folder / "deep/test_it.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-p", reporting.__name__, "-p", "no:cacheprovider", "-n0"]
    environment = {**os.environ, reporting.WHERE: str(folder / "report"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*words, "--rootdir", str(folder), f"--junitxml={folder / 'junit.xml'}", "deep"],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == (9 if leave else 1)


def test_the_lines_say_what_junit_says(tmp_path: Path) -> None:
    ran(tmp_path, leave=False)
    progress, junit = testing.read_report(tmp_path / "report"), testing.read_junit(tmp_path / "junit.xml")
    assert junit is not None
    assert progress.at == ""
    assert {name for name, _ in progress.found.failed} == {name for name, _ in junit.failed}
    assert [name for name, _ in progress.found.skipped] == [name for name, _ in junit.skipped]
    assert dict(progress.found.failed)["deep.test_it.test_bad"].startswith("AssertionError: why")
    assert "no such drive" in dict(progress.found.failed)["deep.test_it.test_without"]
    assert "no such device" in progress.found.skipped[0][1]


def test_a_process_that_died_is_known_by_the_test_that_it_was_at(tmp_path: Path) -> None:
    ran(tmp_path, leave=True)
    progress = testing.read_report(tmp_path / "report")
    assert progress.at == "deep.test_it.test_last"
    assert len(progress.found.failed) == 3
    assert testing.read_junit(tmp_path / "junit.xml") is None


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert testing.read_report(tmp_path / "report") == testing.Progress()
