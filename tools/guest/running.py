"""Running one command in a guest of its own.

What must hold: the caller gets the command's exit status, or a reason why there is none and the last lines of the
console; whatever ends the caller (an error, Ctrl-C, a signal that cannot be caught) ends QEMU, too, and the folder of
the run goes. Several guests run at once: each has a folder, drives and sockets of its own.

A results folder whose disk is full is a run without a status, whatever the command said: the guest's file system (9p)
tells it that all bytes were written when some were not.

The command's standard output and error come out as it prints them, each on its own; the kernel's console does not mix
with them. The command reads from nothing.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.errors import ConfigurationError
from tierloop.tools.guest.arguments import GUEST_QMP, PORT_MAC, Choices, Files, command_line
from tierloop.tools.guest.console import Tail, last_lines, panic
from tierloop.tools.guest.layers import INSIDE, PYVERBS
from tierloop.tools.guest.machine import Machine
from tierloop.tools.guest.packages import RigError
from tierloop.tools.guest.places import Places, is_held

NO_STATUS = 125
INSIDE_RUN = Path("/run/tierloop")
"""Where a guest has the folder of its run."""
_HIDDEN = ("/dev", "/proc", "/run", "/sys")
"""What a guest has of its own: files of the host below these are not seen there."""
_POLL_S = 0.05
_BOOT_S = 240
_GRACE_S = 5
_MARGIN_MIB = 512
_BEGINS_S = 60
_MOST_SOCKET_FOLDER = 70
"""Bytes: the path of a socket has 107 at most, and QEMU takes no longer one."""
_FULL_NBYTES = 1 << 16
"""Bytes that are free on a disk that is full: less than a few blocks."""


class TooLarge(ConfigurationError):
    """This host has not the memory that a machine may take."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the command's exit status, or None and why. Times are the host's, in seconds.

    `starved` says that the host's time or memory ran out and nothing else is known to be wrong: a busy or small host,
    or a command that does not end.
    """

    status: int | None
    reason: str
    last_lines: tuple[str, ...]
    boot_s: float | None
    wall_s: float
    starved: bool = False

    @property
    def exit_code(self) -> int:
        """The command's status; 125 where there is none."""
        return NO_STATUS if self.status is None else self.status


@dataclass
class Guest:
    """A guest that runs."""

    files: Files
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def qmp(self) -> Path:
        """The host's QMP socket."""
        return self.files.sockets / "host"

    def said(self) -> tuple[str, ...]:
        """The last lines of what it has printed so far, its console first."""
        return tuple(line for name in ("console", "stdout", "stderr") for line in last_lines(self.files.run / name, 10))


def run(
    places: Places,
    machine: Machine,
    command: Sequence[str],
    *,
    limit_s: float,
    choices: Choices,
    folder: Path,
    results: Path | None = None,
    environment: dict[str, str] | None = None,
    silent: bool = False,
    while_running: Callable[[Guest], None] | None = None,
) -> Outcome:
    """Boot, run the command, and wait for its end. Raises ConfigurationError, RigError."""
    with started(places, machine, command, choices, folder, results, environment) as guest:
        return watch(guest, limit_s, silent=silent or choices.interactive, while_running=while_running)


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for sockets: below the folder for temporary files where paths of sockets fit there, else below /tmp."""
    wanted = tempfile.gettempdir()
    fits = len(os.fsencode(wanted)) <= _MOST_SOCKET_FOLDER
    with _owned(Path(wanted if fits else "/tmp"), "tierloop-guest-") as folder:
        yield folder


@contextmanager
def _owned(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that goes with this process; those of processes that were killed go now."""
    _forget_the_dead(parent, prefix)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder, (Path(folder) / "owner").open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield Path(folder)


@contextmanager
def started(
    places: Places,
    machine: Machine,
    command: Sequence[str],
    choices: Choices,
    folder: Path,
    results: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Guest]:
    """A guest that boots and runs the command; it is killed where it still runs at the end."""
    places.needed()
    check(machine, choices)
    _check_seen(folder)
    places.runs.mkdir(parents=True, exist_ok=True)
    with (
        _owned(places.runs, "run-") as run_folder,
        socket_folder() as sockets,
    ):
        files = Files(places.layers, run_folder, sockets, results)
        _prepare(files, machine, command, choices, folder, environment or {})
        process = _start(command_line(machine, files, choices), files, choices)
        try:
            yield Guest(files, process)
        finally:
            end(process)


def watch(
    guest: Guest,
    limit_s: float,
    *,
    silent: bool = False,
    while_running: Callable[[Guest], None] | None = None,
) -> Outcome:
    """Wait for the end of a guest, passing on what its command prints."""
    run_folder, process = guest.files.run, guest.process
    tails = [
        Tail(run_folder / "stdout", None if silent else sys.stdout.buffer),
        Tail(run_folder / "stderr", None if silent else sys.stderr.buffer),
    ]
    ready_at: float | None = None
    while True:
        ended = process.poll() is not None
        for tail in tails:
            tail.copy()
        now = time.monotonic() - guest.began
        if ready_at is None and (run_folder / "ready").exists():
            ready_at = round(now, 1)
            if while_running is not None:
                while_running(guest)
        if ended:
            return _outcome(guest, ready_at, now)
        if now > limit_s:
            return _stopped(guest, f"still running after {limit_s:g} s", ready_at, now)
        if ready_at is None and now > _BOOT_S:
            return _stopped(guest, f"hangs: it did not get ready within {_BOOT_S:g} s", ready_at, now)
        time.sleep(_POLL_S)


def check(machine: Machine, choices: Choices) -> None:
    """Raises ConfigurationError for a host that cannot run this machine; TooLarge where it has not the memory."""
    free = _memory_mib()
    if free < machine.mib + _MARGIN_MIB:
        raise TooLarge(
            f"guest machine {machine.name}: takes up to {machine.mib + _MARGIN_MIB} MiB of memory, {free} MiB "
            "are free; describe a smaller one (--machine FILE)"
        )
    if choices.qemu and shutil.which(choices.qemu) is None:
        raise ConfigurationError(f"QEMU {choices.qemu}: there is no such program")
    if choices.accelerator not in ("tcg", "kvm"):
        raise ConfigurationError(f"accelerator {choices.accelerator!r}; allowed: tcg, kvm")
    if choices.accelerator == "kvm":
        reason = kvm_refused()
        if reason:
            raise ConfigurationError(f"accelerator kvm: {reason}; leave it out for tcg, which always works")


def _check_seen(folder: Path) -> None:
    hidden = next((one for one in _HIDDEN if folder.resolve().is_relative_to(one)), None)
    if hidden is not None:
        raise ConfigurationError(f"{folder} is not seen in a guest, which has a {hidden} of its own; go elsewhere")


def kvm_refused(device: str = "/dev/kvm", cpuinfo: str = "/proc/cpuinfo") -> str:
    """Why KVM cannot run a plain kernel here; empty where it can."""
    if not os.path.exists(device):
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"no permission for {device}"
    flags = {
        word for line in Path(cpuinfo).read_text().splitlines() if line.startswith("flags") for word in line.split()
    }
    if not flags & {"vmx", "svm"}:
        return (
            f"{device} is there, but the processor has neither vmx nor svm (nested in a machine that keeps them back)"
        )
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End QEMU: ask, then kill; it never outlives this."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _outcome(guest: Guest, boot_s: float | None, wall_s: float) -> Outcome:
    run_folder = guest.files.run
    console = last_lines(run_folder / "console")
    try:
        status = int((run_folder / "status").read_text())
        results = guest.files.results
        if results is not None and _is_full(results):
            reason = (
                f"the disk of {results} is full: what was written there is cut short (the command ended with {status})"
            )
            return Outcome(None, reason, tuple(console), boot_s, round(wall_s, 1))
        return Outcome(status, "", tuple(console), boot_s, round(wall_s, 1))
    except (OSError, ValueError):
        pass
    said = last_lines(run_folder / "qemu", 5)
    paniced = panic(last_lines(run_folder / "console", 400))
    killed = guest.process.returncode == -signal.SIGKILL
    if paniced:
        reason = f"kernel panic: {paniced}"
    elif killed:
        reason = "QEMU was killed (signal 9), as the kernel does where memory runs out"
    elif guest.process.returncode:
        reason = f"QEMU ended with {guest.process.returncode}: {' '.join(said) or 'it said nothing'}"
    elif _is_full(run_folder):
        reason = f"the disk of {run_folder} is full"
    else:
        reason = "the machine was switched off before the command ended"
    return Outcome(None, reason, tuple(console), boot_s, round(wall_s, 1), starved=killed and not paniced)


def _stopped(guest: Guest, reason: str, boot_s: float | None, wall_s: float) -> Outcome:
    end(guest.process)
    paniced = panic(last_lines(guest.files.run / "console", 400))
    told = f"{reason}; kernel panic: {paniced}" if paniced else reason
    console = tuple(last_lines(guest.files.run / "console"))
    return Outcome(None, told, console, boot_s, round(wall_s, 1), starved=not paniced)


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _FULL_NBYTES


def _forget_the_dead(parent: Path, prefix: str) -> None:
    """Remove what is left of runs whose process was killed; one that begins just now, or is another's, is spared."""
    for left in parent.glob(f"{prefix}*"):
        try:
            found = left.lstat()
        except FileNotFoundError:
            continue
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if mine and time.time() - found.st_mtime > _BEGINS_S and not is_held(left):
            shutil.rmtree(left, ignore_errors=True)


def _prepare(
    files: Files,
    machine: Machine,
    command: Sequence[str],
    choices: Choices,
    folder: Path,
    environment: dict[str, str],
) -> None:
    settings = {
        "RESULTS": str(files.results or ""),
        "FOLDER": str(folder),
        "RDMA": "yes" if machine.rdma else "",
        "CXL": str(len(machine.cxl)),
        "DRIVES": str(len(machine.drives)),
        "INTERACTIVE": "yes" if choices.interactive else "",
        "PORT_MAC": PORT_MAC,
        "WIRE_MAC": choices.wire.mac if choices.wire else "",
        "WIRE": choices.wire.address if choices.wire else "",
        "TERMINAL": "rows {0.lines} cols {0.columns}".format(shutil.get_terminal_size()),
    }
    exported = {
        "TIERLOOP_GUEST_QMP": GUEST_QMP,
        "TIERLOOP_GUEST_MACHINE": machine.origin,
        "TIERLOOP_GUEST_PYVERBS": f"/{PYVERBS}",
        "TIERLOOP_GUEST_WIRE": settings["WIRE"],
        **environment,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    _write_for_shell(files.run / "settings", "\n".join(lines))
    _write_for_shell(files.run / "command", shlex.join(command))
    shutil.copy(INSIDE / "begin", files.run / "begin")
    (files.run / "begin").chmod(0o755)
    for drive in machine.drives:
        with files.image(drive).open("wb") as image:
            image.truncate(drive.mib << 20)


def _write_for_shell(path: Path, text: str) -> None:
    """Words as the caller's bytes, whatever language this process speaks and whether they are text or not."""
    path.write_bytes(os.fsencode(text + "\n"))


def _start(words: list[str], files: Files, choices: Choices) -> subprocess.Popen[bytes]:
    """QEMU, which the kernel kills when this process dies of whatever cause (setpriv, where the host has it)."""
    if shutil.which("setpriv"):
        words = ["setpriv", "--pdeathsig", "KILL", *words]
    libraries = [str(files.layers / "qemu/usr/lib/x86_64-linux-gnu")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    with (files.run / "qemu").open("wb") as said:
        try:
            return subprocess.Popen(
                words,
                stdin=None if choices.interactive else subprocess.DEVNULL,
                stdout=None if choices.interactive else said,
                stderr=said,
                env=environment,
                start_new_session=not choices.interactive,
            )
        except OSError as error:
            raise RigError(f"{words[0]} does not start: {error}") from error


def _memory_mib() -> int:
    return available_nbytes() >> 20
