"""Setting the rig up: once, whole or not at all, and resumed where it broke off.

Packages are fetched into `packages/` and stay there until all is done, so that a second try fetches only what is
missing. Layers are made beside their place and appear by a rename; whoever runs a guest sees the old ones or the new.
One set-up works at a time; the second waits for the first and finds everything there.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tierloop.devices.errors import ConfigurationError
from tierloop.tools.guest.layers import add_kernel, finish_guest, merge_usr, unpack, write_first
from tierloop.tools.guest.packages import QEMU, TOOLS, Apt, RigError, release
from tierloop.tools.guest.places import FORMAT, Layers, Places, is_held, write_note

_SPACE_MIB = 1200
"""What packages, lists and layers take together while they are made, and a margin; about 450 MiB stay."""

Say = Callable[[str], None]


def set_up(places: Places, say: Say, again: bool = False) -> Layers:
    """Have the layers; returns what stands there. Raises ConfigurationError, RigError."""
    check_host(platform.machine())
    places.root.mkdir(parents=True, exist_ok=True)
    with FileLock(places.lock):
        standing = places.standing()
        if standing is not None and not again:
            return standing
        _nobody_runs(places)
        for left in places.root.glob("making-*"):  # of a set-up that was killed
            shutil.rmtree(left, ignore_errors=True)
        suite = release()
        _check_space(places)
        try:
            return _made(places, suite, say)
        except OSError as error:
            raise RigError(f"the rig in {places.root} could not be made: {error}") from error


def clean(places: Places) -> int:
    """Remove the rig; returns the bytes that it took. Raises ConfigurationError while guests run from it."""
    with FileLock(places.lock):
        _nobody_runs(places)
        nbytes = _nbytes(places.root)
        shutil.rmtree(places.root, ignore_errors=True)
    places.lock.unlink(missing_ok=True)
    return nbytes


def _nobody_runs(places: Places) -> None:
    running = [path.name for path in places.runs.glob("*") if is_held(path)]
    if running:
        raise ConfigurationError(f"guests run from {places.root}: {', '.join(sorted(running))}; end them first")


def check_host(machine: str) -> None:
    """Raises ConfigurationError for a host whose programs the guest could not run."""
    if machine not in ("x86_64", "AMD64"):
        raise ConfigurationError(f"the guest runs the host's own Python, and both need x86_64; this is {machine}")


def _check_space(places: Places) -> None:
    """What a set-up that broke off has fetched lies there already."""
    there = (_nbytes(places.packages) + _nbytes(places.apt)) >> 20
    free, needed = shutil.disk_usage(places.root).free >> 20, _SPACE_MIB - there
    if free < needed:
        raise ConfigurationError(f"{places.root}: {free} MiB free; the rig needs {needed} MiB while it is made")


def _nbytes(folder: Path) -> int:
    """What the files below a folder take."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _made(places: Places, suite: str, say: Say) -> Layers:
    began = time.monotonic()
    apt = Apt(places, suite)
    say(f"reading the indices of {', '.join(apt.suites)}")
    apt.update()
    kernel = apt.kernel()
    wanted = {
        "qemu": apt.missing(QEMU, newer=True),
        "guest": apt.missing(TOOLS),
        "kernel": [pair for pair in apt.missing([kernel], newer=True) if pair[0] == kernel],
    }
    found = {layer: apt.described(pairs) for layer, pairs in wanted.items()}
    every = list({one.file: one for packages in found.values() for one in packages}.values())
    nbytes = apt.fetch(every, places.packages)
    say(f"{len(every)} packages verified, {nbytes >> 20} MiB fetched; unpacking")
    with tempfile.TemporaryDirectory(dir=places.root, prefix="making-", ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "layers"
        for layer, packages in found.items():
            target = Path(scratch) / "kernel" if layer == "kernel" else new / layer
            unpack([places.packages / one.file for one in packages], target)
        merge_usr(new / "qemu")
        finish_guest(new)
        version = add_kernel(Path(scratch) / "kernel", new)
        write_first(new, version)
        qemu = next((one.version for one in found["qemu"] if one.name == QEMU[0]), "of the host")
        pairs = tuple((one.file, one.sha256) for one in every)
        layers = Layers(FORMAT, suite, version, qemu, round(time.monotonic() - began, 1), pairs)
        write_note(new, layers)
        _replace(new, places.layers, Path(scratch) / "old")
    shutil.rmtree(places.packages)
    shutil.rmtree(places.apt)
    return layers


def _replace(new: Path, place: Path, old: Path) -> None:
    if place.exists():
        os.replace(place, old)
    os.replace(new, place)
