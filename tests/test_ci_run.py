"""What continuous integration runs: everything, then the guest; loud words where there is none. make is a script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
NOT_RUN = "NOT RUN: the real drivers on a real kernel"


def ran(folder: Path, **fails: int) -> tuple[int, list[str], str]:
    """Run it in a checkout where make ends with these statuses: the exit status, what was made, and the words."""
    (folder / "checkout/.ci").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(TOP / ".ci/run", folder / "checkout/.ci/run")
    cases = " ".join(f"{name.replace('_', '-')}) exit {status};;" for name, status in fails.items())
    make = folder / "bin/make"
    make.write_text(f'#!/bin/sh\necho "$PWD $*" >> {folder}/made\ncase "$1" in {cases} esac\n')
    make.chmod(0o755)
    tierloop = folder / "checkout/.venv/bin/tierloop"
    tierloop.parent.mkdir(parents=True)
    tierloop.write_text(f'#!/bin/sh\necho "$PWD $1-$2" >> {folder}/made\nexit {fails.get("guest_test", 0)}\n')
    tierloop.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [folder / "checkout/.ci/run"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    lines = (folder / "made").read_text().splitlines()
    assert all(line.startswith(f"{folder / 'checkout'} ") for line in lines)
    return done.returncode, [line.rpartition(" ")[2] for line in lines], done.stderr


def test_the_guest_is_run_after_everything_else(tmp_path: Path) -> None:
    assert ran(tmp_path) == (0, ["test", "guest-setup", "guest-test"], "")


def test_a_failing_suite_ends_it(tmp_path: Path) -> None:
    status, made, _ = ran(tmp_path, test=2)
    assert (status, made) == (2, ["test"])


def test_without_a_guest_it_is_good_and_says_loudly_what_did_not_run(tmp_path: Path) -> None:
    status, made, said = ran(tmp_path, guest_setup=2)
    assert (status, made) == (0, ["test", "guest-setup"])
    assert NOT_RUN in said


@pytest.mark.parametrize("status", [1, 2])
def test_a_failing_test_in_the_guest_fails_it(tmp_path: Path, status: int) -> None:
    ended, made, said = ran(tmp_path, guest_test=status)
    assert (ended, made[-1]) == (status, "guest-test")
    assert NOT_RUN not in said


def test_a_guest_that_time_ran_out_for_is_told_loudly_and_fails_nothing(tmp_path: Path) -> None:
    ended, made, said = ran(tmp_path, guest_test=3)
    assert (ended, made[-1]) == (0, "guest-test")
    assert f"{NOT_RUN} (make guest-test): this machine had not the time or the memory" in said
