"""The tests of a real kernel: one pytest process in a guest, its outcome outside.

One process, because starting Python with its libraries costs ten seconds on an emulated processor. pytest's own output
comes through as it is printed, its JUnit file is read when the guest has ended, and what it says is returned as data.
A guest that ends without a result is a failure with a reason, never a success; what its tests had said until then
(reporting.py) is known, and at which one it was.

Where the tests of two guests are among those that run, a second, small guest stands on a wire with the first one
(`machines/peer.toml`, `tests/guest/rdma_peer.py`); it ends when the first one does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET  # the name that its own documentation gives it
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.tools.guest import reporting
from tierloop.tools.guest.arguments import Choices, Wire
from tierloop.tools.guest.machine import Machine, load
from tierloop.tools.guest.packages import RigError
from tierloop.tools.guest.places import Places
from tierloop.tools.guest.running import INSIDE_RUN, Guest, Outcome, check, socket_folder, started, watch
from tierloop.tools.output import OutputError

TOP = Path(__file__).resolve().parents[2]
TESTS = ("tests/guest", "tests/test_numa_real.py")
PAIR = "tests/guest/test_rdma_pair.py"
PEER, PEER_PORT = "peer", 7471
HUNG_S = 240
"""A test that takes so long has hung: where each thread stands is shown, pytest ends, and that is a failure."""
JUNIT, REPORT = "junit.xml", "report"
PROCESSOR = "x86-64-v3"
"""What the emulated processor can do, in LLVM's words: AVX2 and FMA, no AVX-512."""


@dataclass(frozen=True)
class Found:
    """What a JUnit file says: how many tests passed, and (test, reason) of the others."""

    passed: int
    failed: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Progress:
    """What tests had said when the guest ended, and the one that had begun and said nothing yet (or nothing)."""

    found: Found = Found(0, (), ())
    at: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a test run ended; `found` is None where there is no JUnit file. `peer` are the second guest's last lines."""

    outcome: Outcome
    found: Found | None
    peer: tuple[str, ...] = ()
    progress: Progress = Progress()

    @property
    def good(self) -> bool:
        """At least one test passed, none failed, and pytest said so itself."""
        found = self.found
        return self.outcome.status == 0 and found is not None and found.passed > 0 and not found.failed

    @property
    def invalid(self) -> bool:
        """The host could not carry it out, and no test had failed until then."""
        return self.outcome.starved and not self.progress.found.failed


def run_tests(
    places: Places,
    machine: Machine,
    results: Path,
    *,
    limit_s: float,
    choices: Choices,
    arguments: Sequence[str] = (),
    silent: bool = False,
) -> Verdict:
    """Run pytest in a guest; `arguments` go to it, and name the tests where they name any. Raises as `run` does."""
    if any(word.startswith(("--junitxml", "--junit-xml")) for word in arguments):
        raise ConfigurationError(f"--junitxml: the JUnit file is {results / JUNIT}; choose its folder with --results")
    places.needed()
    check(machine, choices)
    (results / JUNIT).unlink(missing_ok=True)
    compiled = compile_ahead(places)
    tests = () if named_tests(arguments) else TESTS
    plugin = ("-p", reporting.__name__)
    command = [
        *(sys.executable, "-m", "pytest", "-n0", "-q", "-rsfE", *plugin, f"--junitxml={INSIDE_RUN / JUNIT}"),
        *("-o", f"faulthandler_timeout={HUNG_S}", "-o", "faulthandler_exit_on_timeout=true"),
    ]
    environment = {"HYPOTHESIS_PROFILE": "dev", reporting.WHERE: str(INSIDE_RUN / REPORT), **compiled}
    with ExitStack() as stack:
        second: Guest | None = None
        if machine.rdma and asks_for_a_pair(arguments):
            wire = Wire(stack.enter_context(socket_folder()), 0)
            second = stack.enter_context(_peer(places, wire.other, choices))
            choices = replace(choices, wire=wire)
            environment["TIERLOOP_GUEST_PEER"] = f"{wire.other.address}:{PEER_PORT}"
        first = stack.enter_context(
            started(places, machine, [*command, *arguments, *tests], choices, TOP, results, environment)
        )
        outcome = watch(first, limit_s, silent=silent)
        said = () if second is None else second.said()
        found, progress = read_junit(first.files.run / JUNIT), read_report(first.files.run / REPORT)
        if found is not None:
            _keep(first.files.run / JUNIT, results)
    return Verdict(outcome, found, said, progress)


def _keep(junit: Path, results: Path) -> None:
    """Copy the JUnit file to where the caller wants it, whole or not at all. Raises OutputError."""
    try:
        with tempfile.TemporaryDirectory(dir=results, prefix=".junit-") as beside:
            os.replace(shutil.copy(junit, beside), results / JUNIT)
    except OSError as error:
        raise OutputError(f"{results / JUNIT}: cannot be written: {error.strerror or error}") from error


def asks_for_a_pair(arguments: Sequence[str]) -> bool:
    """Whether the tests that need a second guest are among those that pytest is told to run."""
    named = named_tests(arguments)
    return not named or any((TOP / PAIR).is_relative_to(TOP / word) for word in named)


def named_tests(arguments: Sequence[str]) -> list[str]:
    """Files and folders that arguments of pytest name; a word such as that behind `-k` names none."""
    named = [word.partition("::")[0] for word in arguments if not word.startswith("-")]
    return [word for word in named if (TOP / word).exists()]


def _peer(places: Places, wire: Wire, choices: Choices) -> AbstractContextManager[Guest]:
    """The second guest: it serves until it is ended."""
    command = [sys.executable, "-m", "tests.guest.rdma_peer", wire.address, str(PEER_PORT), "rxe1"]
    plain = Choices(accelerator=choices.accelerator, qemu=choices.qemu, wire=wire)
    return started(places, load(PEER), command, plain, TOP)


def compile_ahead(places: Places) -> dict[str, str]:
    """Compile all kernels on the host for the guest's processor; returns the environment that finds them there.

    The guest would take a quarter of an hour. Processor and features are named, because what Numba would find out for
    itself differs between the two, and it looks for kernels by them.
    """
    environment = {
        "PYTHONPATH": str(TOP / "src"),
        "NUMBA_CACHE_DIR": str(places.root / "kernels"),
        "NUMBA_CPU_NAME": PROCESSOR,
        "NUMBA_CPU_FEATURES": "",
    }
    sources = sorted((TOP / "devices").rglob("*.py"))
    found = [
        path for path in sources if re.search(r"^ *@(kernel|entry)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    names = [".".join(("tierloop", *path.relative_to(TOP).with_suffix("").parts)) for path in found]
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RigError(f"the kernels do not compile for {PROCESSOR}: {done.stderr.strip()[-400:]}")
    return environment


def read_junit(path: Path) -> Found | None:
    """What a JUnit file says; None where there is none, or half of one."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError):
        return None
    passed, failed, skipped = 0, [], []
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}".lstrip(".")
        wrong = [one for kind in ("failure", "error") for one in case.findall(kind)]
        left = case.find("skipped")
        if wrong:
            failed.append((name, _reason(wrong[0])))
        elif left is not None:
            skipped.append((name, _reason(left)))
        else:
            passed += 1
    return Found(passed, tuple(failed), tuple(skipped))


def read_report(path: Path) -> Progress:
    """What the tests of a run have said so far; a line that was cut short is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return Progress()
    passed, failed, skipped, at = 0, [], [], ""
    for line in lines:
        try:
            told = json.loads(line)
            name, outcome, reason = told["test"], told["outcome"], told["reason"]
        except (ValueError, TypeError, KeyError):
            continue
        at = name if outcome == reporting.BEGINS else ""
        if outcome == "failed":
            failed.append((name, reason))
        elif outcome == "skipped":
            skipped.append((name, reason))
        elif outcome == "passed":
            passed += 1
    return Progress(Found(passed, tuple(failed), tuple(skipped)), at)


def as_json(verdict: Verdict, machine: Machine, kernel: str, qemu: str, setup_s: float) -> dict[str, Any]:
    """The verdict as programs read it."""
    found = verdict.found or verdict.progress.found
    return {
        "kernel": kernel,
        "qemu": qemu,
        "machine": machine.name,
        "setup_s": setup_s,
        "boot_s": verdict.outcome.boot_s,
        "wall_s": verdict.outcome.wall_s,
        "passed": found.passed,
        "failed": len(found.failed),
        "failures": [{"test": test, "reason": reason} for test, reason in found.failed],
        "skipped": [{"test": test, "reason": reason} for test, reason in found.skipped],
        "reason": verdict.outcome.reason,
        "console": list(verdict.outcome.last_lines) if verdict.outcome.status is None else [],
        "devices": described(machine),
    }


def described(machine: Machine) -> list[dict[str, Any]]:
    """The devices of a machine."""
    nodes = [{"kind": "node", "id": node.id, "mib": node.mib, "cpus": node.cpus} for node in machine.nodes]
    drives = [{"kind": "nvme", "serial": drive.serial, "mib": drive.mib} for drive in machine.drives]
    cxl = [
        {"kind": "cxl", "name": one.name, "serial": hex(one.serial), "mib": one.mib, "persistent": one.persistent}
        for one in machine.cxl
    ]
    return [*nodes, *drives, *cxl, *([{"kind": "rdma", "name": "rxe0"}] if machine.rdma else [])]


def _reason(element: ET.Element) -> str:
    return (element.get("message") or element.text or "").strip()[:500]
