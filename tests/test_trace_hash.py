"""Virtual runs are the same everywhere: one hash for a run, whatever the order, the threads or the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.machines import DEVICES, finish, open_machine
from tests.timed_device import Bench
from tierloop.devices.commands import Copy, Launch, Read
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.waiting import wait
from tierloop.runtime.trace_hash import TraceHash
from tierloop.tools.phantom_decode import DecodeShape, open_phantom
from tierloop.tools.tiered_decode import Size
from tierloop.tools.two_clocks import PLATFORM, run_on

SMALL = DecodeShape(num_layers=3, context=4096, batch=2)
GOLDEN = "14370c11140b0ef3dcb98ba3e52aa1cb730f66d0ba5213cb9616de5681a4e0c6"
"""The hash of `SMALL`. If a change of the model or of a profile is meant to change it, put the new one here."""


def phantom_hash() -> str:
    with open_phantom(SMALL) as scenario:
        trace = TraceHash(scenario.platform)
        scenario.run()
        return trace.end()


def busy_hash(platform: Platform, seed: int) -> str:
    """Seeded copies, reads and kernels on every device at once, with shared links and a drive in use."""
    order = np.random.default_rng(seed)
    devices = platform.devices
    trace = TraceHash(platform)
    regions = {name: devices[f"emu:{name}"].alloc(1 << 20, phantom=True) for name in sorted(DEVICES)}
    started: list[Completion] = []
    for _ in range(40):
        nbytes = 4096 * int(order.integers(1, 60))
        into = np.empty(nbytes, dtype=np.uint8)

        def at(name: str, nbytes: int = nbytes) -> Segment:
            return regions[name].at(4096 * int(order.integers(0, 100)), nbytes)

        after = [started[int(order.integers(len(started)))]] if started else []
        gpu, dram = devices["emu:gpu"], devices["emu:dram"]
        started += [
            gpu.submit(Copy(at("dram"), at("gpu")), 2, after),
            gpu.submit(Copy(at("gpu"), at("cxl")), 4),
            gpu.submit(Launch(Dense("mlp", nbytes, nbytes, 0), (), ()), 0),
            dram.submit(Copy(at("cxl"), at("dram")), int(order.integers(4)), after),
            devices["emu:nvme"].submit(Read(at("nvme"), into), int(order.integers(4))),
            devices["emu:pnm"].submit(Copy(at("pnm"), at("dram")), 2),
        ]
    finish(platform, *started)
    return trace.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def busy(folder: Path, seed: int, order: list[str] | None = None) -> str:
    with open_machine(folder, order or list(DEVICES)) as platform:
        platform.site.checker = None  # the script is not ordered on purpose
        return busy_hash(platform, seed)


def test_the_same_seed_gives_the_same_hash_and_another_seed_another(folder: Path) -> None:
    assert busy(folder, 1) == busy(folder, 1)
    assert busy(folder, 1) != busy(folder, 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_devices_in_the_file_does_not_matter(folder: Path, seed: int) -> None:
    expected = busy(folder, seed)
    for _ in range(3):
        order = np.random.default_rng(seed).permutation(list(DEVICES)).tolist()
        assert busy(folder, seed, order) == expected


def test_the_phantom_scenario_has_the_hash_that_it_always_had() -> None:
    assert phantom_hash() == GOLDEN


def in_a_process(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
    ).stdout.strip()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_hash_does_not_depend_on_the_seed_of_hashes(hash_seed: str) -> None:
    code = "from tests.test_trace_hash import phantom_hash; print(phantom_hash())"
    assert in_a_process(code, PYTHONHASHSEED=hash_seed) == GOLDEN


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the number of cores cannot be chosen here")
def test_real_bytes_on_any_number_of_threads_give_the_same_hash_and_the_same_bits() -> None:
    code = """
import os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[: int(sys.argv[1])] if len(sys.argv) > 1 else cores)
"""
    code = code.replace("sys.argv[1]", "os.environ['CORES']").replace("len(sys.argv) > 1", "'CORES' in os.environ")
    code += "from tests.test_trace_hash import real_hash; print(real_hash())"
    one, many = (in_a_process(code, CORES=cores) for cores in ("1", "64"))
    assert one == many
    assert len(one.split()) == 2


def real_hash() -> str:
    """Hash and digest of the outputs of a small decode with real bytes."""
    with open_platform(PLATFORM, clock="virtual") as platform:
        trace = TraceHash(platform)
        run = run_on(platform, Size(num_layers=1, num_steps=2, shrink=8))
        return f"{trace.end()} {run.digest}"


# -- what is in it ------------------------------------------------------------------------------------------------


def timed(**change: int) -> str:
    """Two commands on a machine where commands take as many ns as they have bytes."""
    bench = Bench()
    bench.site.clock.wait_until(change.get("begin", 0))
    trace = TraceHash(bench.platform)
    first = bench.near.submit(bench.copy("near", "far", 40 + change.get("longer", 0)), change.get("queue", 0))
    bench.near.failing = bool(change.get("failing"))
    bench.site.clock.wait_until(change.get("begin", 0) + change.get("later", 0))
    second = bench.far.submit(bench.copy("far", "near", 30))
    bench.run_to_end([first, second])
    return trace.end()


@pytest.mark.parametrize("change", [{"longer": 1}, {"queue": 1}, {"later": 1}])
def test_whatever_happens_otherwise_changes_the_hash(change: dict[str, int]) -> None:
    assert timed(**change) != timed()


def test_times_count_from_where_the_hash_began() -> None:
    assert timed(begin=12_345) == timed()


def test_a_failure_changes_the_hash() -> None:
    hashes = []
    for failing in (False, True):
        bench = Bench()
        trace = TraceHash(bench.platform)
        bench.near.failing = failing
        bench.run_to_end([bench.near.submit(bench.copy("near", "near", 10))])
        hashes.append(trace.end())
    assert hashes[0] != hashes[1]


def test_what_comes_after_the_end_is_not_in_it() -> None:
    bench = Bench()
    trace = TraceHash(bench.platform)
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10)))
    first = trace.end()
    wait(bench.site.clock, bench.near.submit(bench.copy("near", "near", 10)))
    assert trace.end() == first
