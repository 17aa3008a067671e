"""The command line. Every command sits in a file of its own; this one names them and turns errors into exit codes.

    0    good
    1    a check failed (or a device failed while it worked)
    2    the input was wrong: an argument, a model, a prompt, a platform, a device that cannot be opened, an output path
    3    the run was invalid: the host could not keep the promise of an emulated device, so its numbers mean nothing
    130  interrupted (143: terminated)

Results go to stdout, everything else to stderr. A user's mistake is one line and never a traceback; a traceback is a
bug of tierloop and says so.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from tierloop import __version__
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Misaligned,
    NoPermission,
    NotPresent,
    OutOfMemory,
    OutOfRange,
    Unsupported,
)
from tierloop.tools.ablate import ablate
from tierloop.tools.accuracy import accuracy
from tierloop.tools.archives import archives
from tierloop.tools.bench import bench
from tierloop.tools.bench_attention import attention
from tierloop.tools.bench_devices import devices
from tierloop.tools.bench_emulation import emulation
from tierloop.tools.calibrate import calibrate
from tierloop.tools.compare import compare
from tierloop.tools.conformance import conformance
from tierloop.tools.demo import demo
from tierloop.tools.doctor import doctor
from tierloop.tools.exits import FAILED, GOOD, WRONG_INPUT
from tierloop.tools.guest.cli import guest
from tierloop.tools.k_min import k_min
from tierloop.tools.listing import listing
from tierloop.tools.output import OutputError
from tierloop.tools.phantom import phantom
from tierloop.tools.reproduce import reproduce
from tierloop.tools.run import run
from tierloop.tools.serve_bench import serve_bench
from tierloop.tools.tune import tune
from tierloop.tools.verify import verify
from tierloop.tools.window_sizes import window_sizes

app = typer.Typer(
    name="tierloop",
    help="Long-context LLM attention over tiered memory, on real or emulated devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command, name in (
    (doctor, "doctor"),
    (run, "run"),
    (compare, "compare"),
    (demo, "demo"),
    (listing, "list"),
    (conformance, "conformance"),
    (calibrate, "calibrate"),
    (verify, "verify"),
    (accuracy, "accuracy"),
    (k_min, "k-min"),
    (window_sizes, "window-sizes"),
    (archives, "archives"),
    (ablate, "ablate"),
    (phantom, "phantom"),
    (reproduce, "reproduce"),
    (tune, "tune"),
    (serve_bench, "serve-bench"),
):
    app.command(name)(command)

benches = typer.Typer(invoke_without_command=True)
benches.callback()(bench)
benches.command("attention")(attention)
benches.command("emulation")(emulation)
benches.command("devices")(devices)
app.add_typer(benches, name="bench")
app.add_typer(guest, name="guest")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tierloop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Long-context LLM attention over tiered memory, on real or emulated devices.

    Exit codes: 0 good, 1 a check failed, 2 the input was wrong, 3 the run was invalid.
    """


class Stopped(BaseException):
    """A signal asked the process to stop. Not a KeyboardInterrupt, which the argument parser keeps for itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, after the reason was printed where it is not 0."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no σ shows a question mark
    try:
        with _signals():
            app(args=None if arguments is None else list(arguments), prog_name="tierloop")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else GOOD
    except Stopped as stopped:
        return _fail(stopped.code, "interrupted")
    except Exception as error:
        code = exit_code(error)
        if code is not None:
            return _fail(code, str(error))
        traceback.print_exc()
        return _fail(FAILED, "this is a bug in tierloop; please report it with the lines above")
    return GOOD


def _open_streams() -> None:
    """Let standard streams that the caller closed lead nowhere: Python has None for them, and a file that is opened
    later would get their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as the process lives


def exit_code(error: Exception) -> int | None:
    """The exit code that an expected error stands for; None for a bug."""
    if isinstance(error, (NotPresent, NoPermission, OutOfMemory, Misaligned, OutOfRange, Unsupported)):
        return WRONG_INPUT
    if isinstance(error, Busy) and error.op == "open":
        return WRONG_INPUT  # somebody else has what was named
    if isinstance(error, DeviceError):
        return FAILED
    return WRONG_INPUT if isinstance(error, (ConfigurationError, OutputError, *_input_errors())) else None


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors of modules that are slow to import: where one was raised, its module is there already."""
    names = {"models": "ModelError", "workloads": "WorkloadError", "modules": "UnsupportedModel"}
    modules = {name: sys.modules.get(f"tierloop.runtime.{name}") for name in names}
    return tuple(getattr(module, names[name]) for name, module in modules.items() if module is not None)


def _fail(code: int, message: str) -> int:
    print(f"tierloop: {message}", file=sys.stderr)
    return code


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Stopped`, so that temporary files are removed and devices closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> NoReturn:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


if __name__ == "__main__":
    sys.exit(main())
