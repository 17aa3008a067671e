"""Everything that has to be seen on a real GPU, in less than three minutes, as one JSON file.

    python -m tierloop.tools.gpu_check --device cuda:0 --out gpu_check.json

It runs the conformance suite on the gpu driver and then measures: transfers against a plain page-locked copy of torch,
copies of registered host memory, attention against what the memory gives a copy, the same with each fused kernel that
is there, which has to pass the checks of attention, too, what a launch costs by itself and in a chain, and what a
command costs the host. A part that fails, or for which no time was left, is named, on the terminal and in the file, and
the exit code is 1; without a GPU it is 2, with the reasons. Numbers of a stand-in are not called measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Copy, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance import run
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.gpu import GpuDevice, open_gpu
from tierloop.devices.drivers.gpu_options import ATTENTION
from tierloop.devices.drivers.gpu_probe import gpus
from tierloop.devices.drivers.gpu_runtime import Accelerator, CudaAccelerator
from tierloop.devices.errors import DeviceError, Unsupported
from tierloop.devices.kernels.contract import Attend, Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait

BUDGET_S = 170.0
LEVELS = ("identity", "memory", "ordering", "errors", "compute", "stateful")
FUSED_CHECKS = ("attend_is_attention", "attend_survives_extreme_logits", "one_token_gives_its_value")
"""Checks of conformance that have something to say of fused attention."""
MIB = 1 << 20
Numbers = dict[str, Any]


class CheckFailed(Exception):
    """What was measured is not what it should be."""


class Desk:
    """A GPU and the host's memory, opened for measuring; `nbytes` is what transfers move.

    `make` opens accelerators: one for the GPU, and others for whoever needs its memory for a while.
    """

    def __init__(self, make: Callable[[], Accelerator], nbytes: int) -> None:
        self.site = Site(clock=WallClock())
        self.nbytes = nbytes
        self.make = make
        self.accelerator = accelerator = make()
        self.cpu = open_cpu("dram", self.site, {"capacity": 4 * nbytes + MIB, "queues": 1, "threads": 1})
        options = {"capacity": 6 * nbytes, "reaches": ["dram"], "staging_buffers": 8}
        self.gpu: GpuDevice = open_gpu("gpu", self.site, options, accelerator=accelerator)
        self.to, self.back = (self.gpu.info.executors[i].queues[0] for i in (1, 2))

    def close(self) -> None:
        self.gpu.close()
        self.cpu.close()

    def wait(self, *completions: Completion) -> None:
        """For at most a minute."""
        wait(self.site.clock, completions, self.site.clock.now() + 60 * 10**9)

    def best_ns(self, command: Command, queue: int, times: int = 5, gpu: GpuDevice | None = None) -> int:
        """The shortest time, by the host's clock, of some runs after a first one."""
        took, device = [], gpu or self.gpu
        for _ in range(times + 1):
            before = time.perf_counter_ns()
            self.wait(device.submit(command, queue))
            took.append(time.perf_counter_ns() - before)
        return min(took[1:])

    def raw_ns(self, work: Callable[[], None], times: int = 5) -> int:
        """The same for work that is enqueued without the driver."""
        stream, took = self.accelerator.stream(), []
        for _ in range(times + 1):
            before = time.perf_counter_ns()
            self.accelerator.enqueue(stream, work)
            event = self.accelerator.record(stream)
            while not self.accelerator.done(event):
                pass
            took.append(time.perf_counter_ns() - before)
        return min(took[1:])


def transfers(desk: Desk) -> Numbers:
    """Bytes/s of Write and Read from pageable memory, and of one page-locked copy of as many bytes."""
    region, buffer = desk.gpu.alloc(desk.nbytes), np.ones(desk.nbytes, dtype=np.uint8)
    pinned, here = desk.accelerator.pinned(desk.nbytes), desk.accelerator.slab(desk.nbytes)
    found = {
        "write_bytes_per_s": _rate(desk.nbytes, desk.best_ns(Write(region.all(), buffer), desk.to)),
        "read_bytes_per_s": _rate(desk.nbytes, desk.best_ns(Read(region.all(), buffer), desk.back)),
        "pinned_h2d_bytes_per_s": _rate(desk.nbytes, desk.raw_ns(lambda: _copy(here, pinned))),
        "pinned_d2h_bytes_per_s": _rate(desk.nbytes, desk.raw_ns(lambda: _copy(pinned, here))),
    }
    desk.gpu.free(region)
    return found


def registered(desk: Desk) -> Numbers:
    """Bytes/s of copies from and to host memory where it lies."""
    region, host = desk.gpu.alloc(desk.nbytes), desk.cpu.alloc(desk.nbytes)
    found: Numbers = {
        "copy_in_bytes_per_s": _rate(desk.nbytes, desk.best_ns(Copy(host.all(), region.all()), desk.to)),
        "copy_out_bytes_per_s": _rate(desk.nbytes, desk.best_ns(Copy(region.all(), host.all()), desk.back)),
        "refused": desk.gpu.why_not_registered,
    }
    desk.gpu.free(region)
    desk.cpu.free(host)
    return found


def attention(desk: Desk) -> Numbers:
    """Bytes of keys and values per second in one step of decoding, against those of a copy in the memory."""
    source, target = desk.gpu.alloc(desk.nbytes), desk.gpu.alloc(desk.nbytes)
    copy_ns = desk.best_ns(Copy(source.all(), target.all()), 0)
    for region in (source, target):
        desk.gpu.free(region)
    return {**_decoding(desk, desk.gpu), "memory_bytes_per_s": _rate(2 * desk.nbytes, copy_ns)}


def fused(desk: Desk) -> Numbers:
    """The same with each fused kernel, and how often it ran; of one that is not there, why. Raises CheckFailed."""
    found: Numbers = {}
    for kernel in ATTENTION[1:]:
        try:
            gpu = open_gpu(f"gpu with {kernel}", desk.site, {"capacity": 3 * desk.nbytes, "reserve": 0,
                           "attention": kernel}, accelerator=desk.make())  # fmt: skip
        except Unsupported as error:
            found[kernel] = {"why_not": str(error)}
            continue
        try:
            found[kernel] = {"kernel": gpu.info.notes["attention"], **_decoding(desk, gpu)}
            found[kernel]["launches"] = gpu.fused_launches
        finally:
            gpu.close()
        if not found[kernel]["launches"]:
            raise CheckFailed(f"{kernel} was not used")
    return found


def wrong_states(make: Callable[[], Accelerator], kernel: str, checks: Sequence[str] = FUSED_CHECKS) -> dict[str, str]:
    """What the checks of attention find wrong with a fused kernel."""
    options = {"capacity": 4 * MIB, "reserve": 0, "attention": kernel}
    report = run(lambda site: open_gpu("gpu", site, options, accelerator=make()), only=checks)
    return {f"{kernel} {result.check}": result.reason for result in report.failed}


def _decoding(desk: Desk, gpu: GpuDevice) -> Numbers:
    """Bytes/s of keys and values in one step of decoding: dense, and in pages of 16 tokens in any order."""
    dim, heads, group = 128, 8, 4
    tokens = desk.nbytes // (heads * dim * 2) // 64 * 64
    keys, values = gpu.alloc(desk.nbytes), gpu.alloc(desk.nbytes)
    queries, states = gpu.alloc(heads * group * dim * 4), gpu.alloc(heads * group * (dim + 2) * 4)
    level = max(tokens // 64 - 1, 0).bit_length()
    per_head, found = tokens * dim * 2, {"kv_nbytes": 2 * heads * tokens * dim * 2}
    for name, page in (("attend", tokens), ("paged", 16)):
        runs = [(0, head, at) for head in range(heads) for at in range(0, tokens, page)]
        args = Attend(
            "float16", 1, heads, group, 1, dim, dim, dim**-0.5, 64,
            np.array(runs, dtype=np.int64),
            np.array([[tokens]], dtype=np.int64),
            np.array([(0, head, level, 0) for head in range(heads)], dtype=np.int64),
        )  # fmt: skip
        order = np.random.default_rng(1).permutation(len(runs)) if page < tokens else np.arange(len(runs))
        pages = Spans(np.stack([order * page * dim * 2, np.full(len(runs), page * dim * 2)], axis=1))
        rows = [(Segment(region, pages),) for region in (keys, values)]
        took = desk.best_ns(Launch(args, ((queries.all(),), *rows), ((states.all(),),)), 0, gpu=gpu)
        found[f"{name}_bytes_per_s"] = _rate(2 * heads * per_head, took)
    for region in (keys, values, queries, states):
        gpu.free(region)
    return found


def launches(desk: Desk) -> Numbers:
    """ns of a small kernel alone, of one in a chain of a hundred, and of the host's share of submitting it."""
    a, b = desk.gpu.alloc(4096), desk.gpu.alloc(4096)
    there, back = _gather(a, b), _gather(b, a)
    alone = desk.best_ns(there, 0, 50)
    before = time.perf_counter_ns()
    chain = [desk.gpu.submit(back if i % 2 else there, 0) for i in range(100)]
    submitted = time.perf_counter_ns() - before
    desk.wait(*chain)
    through = time.perf_counter_ns() - before
    desk.gpu.free(a)
    desk.gpu.free(b)
    return {"alone_ns": alone, "in_a_chain_ns": through // 100, "submit_ns": submitted // 100}


PARTS: dict[str, Callable[[Desk], Numbers]] = {
    "transfers": transfers,
    "registered": registered,
    "attention": attention,
    "fused": fused,
    "launches": launches,
}


def check(
    make: Callable[[], Accelerator],
    levels: tuple[str, ...] = LEVELS,
    nbytes: int = 256 * MIB,
    budget_s: float = BUDGET_S,
) -> Numbers:
    """Everything, on the accelerators that `make` opens; what fails is under `failed`, by the name of the part."""
    start = time.perf_counter()
    report = run(
        lambda site: open_gpu("gpu", site, {"capacity": 64 * MIB, "reserve": 0}, accelerator=make()),
        levels,
        examples=20,
    )
    failed = {f"conformance {result.check}": result.reason for result in report.failed}
    desk = Desk(make, nbytes)
    try:
        model = desk.gpu.info.model
        found: Numbers = {
            "provenance": f"a model: {model}" if model else "measured",
            "notes": dict(desk.gpu.info.notes),
            "conformance": {
                outcome: sum(result.outcome == outcome for result in report.results)
                for outcome in ("passed", "failed", "skipped")
            },
        }
        for name, part in PARTS.items():
            if time.perf_counter() - start > budget_s:
                failed[name] = f"left out: {budget_s:g} s were over"
                continue
            try:
                found[name] = part(desk)
            except (CheckFailed, DeviceError, RuntimeError) as error:
                failed[name] = f"{type(error).__name__}: {error}"
        for kernel in found.get("fused", {}) if "compute" in levels else ():
            if "why_not" not in found["fused"][kernel]:
                failed |= wrong_states(make, kernel)
    finally:
        desk.close()
    return {**found, "failed": failed, "seconds": round(time.perf_counter() - start, 1)}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tierloop.tools.gpu_check", description="Check and measure a GPU.")
    parser.add_argument("--device", default="cuda:0", help="which GPU, as torch calls it")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="the file to write")
    given = parser.parse_args(arguments)
    try:
        given.out.touch()
    except OSError as error:  # now, and not when everything has been measured
        parser.error(f"--out {given.out}: {error.strerror}")
    seen = gpus()
    found: Numbers = {
        "gpus": [gpu.to_json() for gpu in seen.found],
        "runtime": seen.runtime,
        "driver": seen.driver,
        "reasons": list(seen.reasons),
    }
    code = 2
    if given.device in [gpu.device for gpu in seen.found]:
        found |= check(lambda: CudaAccelerator(given.device))
        code = 1 if found["failed"] else 0
    else:
        found["failed"] = {"open": f"{given.device} is not there: {'; '.join(seen.reasons) or 'no reason is known'}"}
    given.out.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    for name, why in found["failed"].items():
        print(f"FAILED {name}: {why}", file=sys.stderr)
    print(f"{given.out}: {'good' if code == 0 else 'not good'}")
    return code


def _gather(source: Region, target: Region) -> Launch:
    return Launch(Gather(), ((source.all(),),), ((target.all(),),))


def _copy(target: Any, source: Any) -> None:
    target.copy_(source, non_blocking=True)


def _rate(nbytes: int, ns: int) -> int:
    return nbytes * 1_000_000_000 // max(ns, 1)


if __name__ == "__main__":
    sys.exit(main())
