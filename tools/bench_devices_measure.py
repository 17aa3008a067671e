"""What `tierloop bench devices` measures: pairs of the same work by a driver and by its peer, one after the other.

The ratio of a figure is the median of the ratios of its pairs, so what slows the machine down for a while slows both.
"""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy, Read
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait

COPY_NBYTES = 256 << 20
COPY_TARGET = 0.9
"""Of memcpy's rate, one thread."""
FIO_TARGET = 0.9
"""Of the rate that fio reaches with the same pattern and depth."""
COST_TARGET_US = 15.0
"""Of processor time in user mode per transfer, at depth 32."""
PATTERNS = (("sequential", 1 << 20), ("random", 128 << 10))
DEPTH = 16
_SECONDS = 2
_SMALL_NBYTES = 4096
_SMALL_SPANS = 4096
_COMMANDS = 50
"""Enough for processor time that is counted in ticks of some milliseconds."""


@dataclass(frozen=True)
class DeviceFigure:
    """One number beside its peer's. `target` is a sentence; `met` is None for what could not be measured."""

    name: str
    unit: str
    value: float | None = None
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def copy_figures(rounds: int) -> list[DeviceFigure]:
    """Copies within the memory of a cpu device, one command of one queue and one core, against memcpy."""
    site = Site(clock=WallClock())
    device = open_cpu("cpu", site, {"capacity": 3 * COPY_NBYTES, "queues": 1, "threads": 1})
    try:
        source, target = device.alloc(COPY_NBYTES), device.alloc(COPY_NBYTES)
        assert source.view is not None
        assert target.view is not None
        to, where = (int(view.__array_interface__["data"][0]) for view in (target.view, source.view))
        source.view[:] = 1
        figures = []
        for name, spans in (
            ("one span", Spans([(0, COPY_NBYTES)])),
            ("spans of 64 KiB", Spans.equal(np.arange(COPY_NBYTES >> 16, dtype=np.int64) << 16, 1 << 16)),
        ):
            command = Copy(Segment(source, spans), Segment(target, spans))
            ours, peer = _pairs(
                rounds,
                lambda command=command: wait(site.clock, device.submit(command)),  # type: ignore[misc]  # bound at once
                lambda: ctypes.memmove(to, where, COPY_NBYTES),
            )
            figures.append(_rate(f"cpu driver copies 256 MiB, {name}", COPY_NBYTES, ours, "memcpy", peer, COPY_TARGET))
        return figures
    finally:
        device.close()


def drive_figures(folder: Path, file_nbytes: int, rounds: int) -> list[DeviceFigure]:
    """Reads of a file through the nvme driver against fio's, and what a transfer costs the host."""
    with tempfile.TemporaryDirectory(prefix="tierloop-bench-", dir=folder) as inside:
        path = Path(inside) / "drive"
        with path.open("wb") as file:
            chunk = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
            for _ in range(file_nbytes >> 20):
                file.write(chunk)
        figures = [_beside_fio(path, file_nbytes, pattern, nbytes, rounds) for pattern, nbytes in PATTERNS]
        return [*figures, transfer_cost(path, file_nbytes)]


def transfer_cost(path: Path, file_nbytes: int) -> DeviceFigure:
    """User-mode processor time per transfer of 4 KiB at depth 32, with thousands of spans in each command."""
    site = Site(clock=WallClock())
    device = _drive(path, file_nbytes, 32, site, direct=False)
    try:
        region = device.adopt(0, file_nbytes)
        blocks = np.random.default_rng(1).permutation(file_nbytes // _SMALL_NBYTES)[:_SMALL_SPANS].astype(np.int64)
        spans = Spans.equal(blocks * _SMALL_NBYTES, _SMALL_NBYTES)
        command = Read(Segment(region, spans), np.zeros(spans.nbytes, dtype=np.uint8))
        wait(site.clock, device.submit(command))
        transfers, begun = device.counts.transfers, resource.getrusage(resource.RUSAGE_SELF).ru_utime
        for _ in range(_COMMANDS):
            wait(site.clock, device.submit(command))
        spent = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun
        cost = spent * 1e6 / (device.counts.transfers - transfers)
        return DeviceFigure(
            f"nvme driver, processor time per transfer ({device.info.notes['io']})",
            "µs",
            cost,
            ratio=cost / COST_TARGET_US,
            target=f"≤ {COST_TARGET_US:g} µs",
            met=cost <= COST_TARGET_US,
            note=f"{len(spans):,} spans of 4 KiB in a command, depth 32",
        )
    finally:
        device.close()


def _beside_fio(path: Path, file_nbytes: int, pattern: str, nbytes: int, rounds: int) -> DeviceFigure:
    name = f"nvme driver, {pattern} reads of {nbytes >> 10} KiB at depth {DEPTH}"
    target = f"≥ {FIO_TARGET:g} of fio"
    fio = shutil.which("fio")
    if fio is None:
        return DeviceFigure(name, "GB/s", peer="fio", target=target, note="fio is not installed (apt install fio)")
    site = Site(clock=WallClock())
    device = _drive(path, file_nbytes, DEPTH, site, direct=True)
    direct = device.info.notes["direct"] == "true"
    try:
        region = device.adopt(0, file_nbytes)
        order = np.arange(file_nbytes // nbytes, dtype=np.int64)
        if pattern == "random":
            order = np.random.default_rng(2).permutation(order)
        spans = Spans.equal(order * nbytes, nbytes)
        command = Read(Segment(region, spans), _aligned(spans.nbytes))
        wait(site.clock, device.submit(command))
        ours, peer = [], []
        for _ in range(rounds):
            ours.append(file_nbytes / _timed_s(lambda: wait(site.clock, device.submit(command))))
            peer.append(_fio(fio, path, pattern, nbytes, direct))
    finally:
        device.close()
    note = "" if direct else f"without O_DIRECT: {device.info.notes['why']}"
    return _compared(name, ours, "fio", peer, FIO_TARGET, target, note)


def _drive(path: Path, nbytes: int, depth: int, site: Site, direct: bool) -> NvmeDevice:
    options = {"path": str(path), "capacity": nbytes, "queues": 1, "depth": depth, "direct": direct}
    return open_nvme("nvme", site, options)


def _fio(fio: str, path: Path, pattern: str, nbytes: int, direct: bool) -> float:
    """Bytes/s of fio's io_uring engine on the same file."""
    command = [
        fio,
        "--name=peer",
        f"--filename={path}",
        "--ioengine=io_uring",
        f"--direct={int(direct)}",
        f"--rw={'randread' if pattern == 'random' else 'read'}",
        f"--bs={nbytes}",
        f"--iodepth={DEPTH}",
        "--time_based",
        f"--runtime={_SECONDS}",
        "--readonly",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * _SECONDS, check=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])


def _pairs(rounds: int, ours: Callable[[], Any], peer: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Seconds of each, in turn; both ran once before."""
    ours()
    peer()
    pairs = [(_timed_s(ours), _timed_s(peer)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _rate(
    name: str, nbytes: int, ours_s: Sequence[float], peer: str, peer_s: Sequence[float], wanted: float
) -> DeviceFigure:
    ours, others = ([nbytes / seconds for seconds in each] for each in (ours_s, peer_s))
    return _compared(name, ours, peer, others, wanted, f"≥ {wanted:g} of {peer}", "")


def _compared(
    name: str, ours: Sequence[float], peer: str, others: Sequence[float], wanted: float, target: str, note: str
) -> DeviceFigure:
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, others, strict=True))
    return DeviceFigure(
        name,
        "GB/s",
        statistics.median(ours) / 1e9,
        peer,
        statistics.median(others) / 1e9,
        ratio,
        target,
        ratio >= wanted,
        note,
    )


def _timed_s(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return max(time.perf_counter() - begun, 1e-9)


def _aligned(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory on a page, so that nothing has to go through a buffer."""
    whole = np.empty(nbytes + 4096, dtype=np.uint8)
    skew = -int(whole.__array_interface__["data"][0]) % 4096
    whole[:] = 0
    return whole[skew : skew + nbytes]
