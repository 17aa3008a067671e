"""`tierloop guest`: set the rig up, run something in a guest, remove the rig.

`run` and `shell` end with the exit status of what ran in the guest; 125 where there is none, with the reason and the
console's last lines on stderr. All else ends as other commands do: 0 good, 1 a check failed, 2 the input was wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import results, say
from tierloop.tools.exits import FAILED, INVALID
from tierloop.tools.output import OutputError, prepare_folder

if TYPE_CHECKING:
    from tierloop.tools.guest.arguments import Choices
    from tierloop.tools.guest.running import Outcome
    from tierloop.tools.guest.testing import Verdict

guest = typer.Typer(
    no_args_is_help=True, help="A real kernel with emulated NUMA, NVMe, CXL and RDMA, for real drivers."
)

MachineName = Annotated[
    str, typer.Option("--machine", help="A shipped machine or a .toml file that describes one (see docs/guest.md).")
]
Accelerator = Annotated[
    str, typer.Option("--accel", help="tcg, which works everywhere, or kvm.", metavar="ACCELERATOR")
]
QemuWords = Annotated[
    list[str] | None,
    typer.Option("--qemu-arg", help="One more word for QEMU's command line; repeat it. PCI devices need bus=pcie.0."),
]
KernelWords = Annotated[
    list[str] | None, typer.Option("--kernel-arg", help="One more word for the kernel's command line; repeat it.")
]
Qemu = Annotated[str, typer.Option("--qemu", help="Another QEMU program, with a device model of yours in it.")]
LimitS = Annotated[float, typer.Option("--limit-s", min=1, help="End the guest after so many seconds.")]
ResultsFolder = Annotated[
    Path | None, typer.Option("--results", help="A folder that the guest may write to, under the same path.")
]


@guest.command("setup")
def setup(
    again: Annotated[bool, typer.Option("--again", help="Make it anew, with the newest packages.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Fetch and unpack what guests are made of, into a folder of this checkout; nothing is installed."""
    from tierloop.tools.guest.places import places
    from tierloop.tools.guest.setting_up import set_up

    with results(as_json) as shown:
        rig = places()
        layers = set_up(rig, say, again)
        shown.json(
            {
                "folder": str(rig.root),
                "suite": layers.suite,
                "kernel": layers.kernel,
                "qemu": layers.qemu,
                "setup_s": layers.setup_s,
                "packages": dict(layers.packages),
            }
        )
        shown.show(f"guest rig in {rig.root}: kernel {layers.kernel}, QEMU {layers.qemu}, made in {layers.setup_s:g} s")


@guest.command("run", context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    machine: MachineName = "three-nodes",
    limit_s: LimitS = 600,
    results_folder: ResultsFolder = None,
    accelerator: Accelerator = "tcg",
    kernel_words: KernelWords = None,
    qemu_words: QemuWords = None,
    qemu: Qemu = "",
) -> None:
    """Boot a guest, run a command in this folder there, and end with its exit status."""
    from tierloop.tools.guest import running
    from tierloop.tools.guest.machine import load
    from tierloop.tools.guest.places import places

    choices = _choices(accelerator, kernel_words, qemu_words, qemu)
    outcome = running.run(
        places(),
        load(machine),
        command,
        limit_s=limit_s,
        choices=choices,
        folder=Path.cwd(),
        results=_writable(results_folder),
    )
    _tell(outcome)
    raise typer.Exit(outcome.exit_code)


@guest.command("test", context_settings={"ignore_unknown_options": True})
def check(
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for pytest, after --.")] = None,
    machine: MachineName = "three-nodes",
    limit_s: LimitS = 900,
    results_folder: ResultsFolder = None,
    accelerator: Accelerator = "tcg",
    kernel_words: KernelWords = None,
    qemu_words: QemuWords = None,
    qemu: Qemu = "",
    as_json: options.AsJson = False,
) -> None:
    """Run the tests of real drivers in a guest.

    Exit codes: 0 good, 1 a test failed, none ran or the guest broke down, 2 the input was wrong, 3 the host had not the
    time or the memory.
    """
    from tierloop.tools.guest import testing
    from tierloop.tools.guest.machine import load
    from tierloop.tools.guest.places import places
    from tierloop.tools.guest.running import TooLarge

    rig, described = places(), load(machine)
    layers = rig.needed()
    choices = _choices(accelerator, kernel_words, qemu_words, qemu)
    folder = _writable(results_folder or rig.root / "results")
    assert folder is not None
    try:
        verdict = testing.run_tests(
            rig,
            described,
            folder,
            limit_s=limit_s,
            choices=choices,
            arguments=tuple(arguments or ()),
            silent=as_json,
        )
    except TooLarge as error:
        say(f"guest: {error}")
        raise typer.Exit(INVALID) from None
    _tell(verdict.outcome)
    _tell_progress(verdict)
    if not verdict.good and verdict.peer:
        say("guest: what the second guest said last:")
        for line in verdict.peer:
            say(f"  | {line}")
    if as_json:
        with results(as_json) as shown:
            shown.json(testing.as_json(verdict, described, layers.kernel, layers.qemu, layers.setup_s))
    elif verdict.found is None and verdict.outcome.status is not None:
        say(f"guest: pytest left no results (exit status {verdict.outcome.status})")
    raise typer.Exit(0 if verdict.good else INVALID if verdict.invalid else FAILED)


@guest.command("capture")
def capture(
    out: Annotated[Path, typer.Option("--out", help="The folder for the trees.")],
    machine: MachineName = "three-nodes",
    limit_s: LimitS = 300,
) -> None:
    """Write what a real kernel shows of the machine, as trees that tests replay without a guest."""
    from tierloop.tools.guest import running, testing
    from tierloop.tools.guest.arguments import Choices
    from tierloop.tools.guest.capturing import NAMES
    from tierloop.tools.guest.machine import load
    from tierloop.tools.guest.places import places

    folder = prepare_folder(out).resolve()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".capture-") as written:
        outcome = running.run(
            places(),
            load(machine),
            [sys.executable, "-m", "tierloop.tools.guest.capturing", written],
            limit_s=limit_s,
            choices=Choices(),
            folder=testing.TOP,
            results=Path(written),
            environment={"PYTHONPATH": str(testing.TOP / "src")},
        )
        _tell(outcome)
        if outcome.status != 0:
            raise typer.Exit(1)
        made = [name for name in NAMES if (Path(written) / f"{name}.tree").exists()]
        for name in made:
            os.replace(Path(written) / f"{name}.tree", folder / f"{name}.tree")
            say(f"guest: {folder / name}.tree")
    if set(NAMES) - set(made):
        missing = ", ".join(name for name in NAMES if name not in made)
        say(f"guest: no {missing}: no volatile CXL memory of this machine has a bridge for itself")


@guest.command("shell")
def shell(
    machine: MachineName = "three-nodes",
    accelerator: Accelerator = "tcg",
    results_folder: ResultsFolder = None,
    kernel_words: KernelWords = None,
    qemu_words: QemuWords = None,
    qemu: Qemu = "",
) -> None:
    """Boot a guest and give its shell to this terminal; leaving the shell switches the guest off."""
    from tierloop.tools.guest import running
    from tierloop.tools.guest.machine import load
    from tierloop.tools.guest.places import places

    if not sys.stdin.isatty():
        raise ConfigurationError("guest shell needs a terminal; `tierloop guest run -- COMMAND` needs none")
    choices = _choices(accelerator, kernel_words, qemu_words, qemu, interactive=True)
    outcome = running.run(
        places(),
        load(machine),
        ["/bin/bash", "-i"],
        limit_s=float("inf"),
        choices=choices,
        folder=Path.cwd(),
        results=_writable(results_folder),
    )
    _tell(outcome)
    raise typer.Exit(outcome.exit_code)


@guest.command("clean")
def clean(as_json: options.AsJson = False) -> None:
    """Remove the rig and all that was fetched for it."""
    from tierloop.tools.guest import setting_up
    from tierloop.tools.guest.places import places

    with results(as_json) as shown:
        rig = places()
        nbytes = setting_up.clean(rig)
        shown.json({"folder": str(rig.root), "nbytes": nbytes})
        shown.show(f"removed {rig.root}: {nbytes >> 20} MiB")


def _choices(
    accelerator: str,
    kernel_words: list[str] | None,
    qemu_words: list[str] | None,
    qemu: str,
    interactive: bool = False,
) -> Choices:
    from tierloop.tools.guest.arguments import Choices

    return Choices(accelerator, interactive, tuple(kernel_words or ()), tuple(qemu_words or ()), qemu)


def _tell(outcome: Outcome) -> None:
    """Why there is no exit status, on stderr."""
    if outcome.status is None:
        for line in outcome.last_lines:
            say(f"  | {line}")
        above = " (the console's last lines stand above)" if outcome.last_lines else ""
        say(f"guest: {outcome.reason}{above}")


def _tell_progress(verdict: Verdict) -> None:
    """What tests had said where no JUnit file says it, on stderr."""
    if verdict.found is not None:
        return
    so_far = verdict.progress.found
    if verdict.progress.at:
        say(f"guest: it was at {verdict.progress.at}")
    say(f"guest: until then {so_far.passed} passed, {len(so_far.failed)} failed, {len(so_far.skipped)} skipped")
    for test, reason in so_far.failed:
        say(f"  failed: {test}: {reason}")


def _writable(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    place = prepare_folder(folder).resolve()
    if place == Path("/"):
        raise OutputError(f"{folder}: the whole file system cannot be the results folder")
    return place
