"""The cpu driver: real memory, real threads, and the bits of the kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.attention_case import bytes_of
from tests.launches import carry_out, every_kernel
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Copy, Flush, Launch, Write
from tierloop.devices.drivers import cpu as cpu_module
from tierloop.devices.drivers.cpu import Cpu, open_cpu
from tierloop.devices.drivers.host_memory import available_nbytes
from tierloop.devices.drivers.numa import PAGE
from tierloop.devices.drivers.reference import open_reference
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    ConfigurationError,
    Gone,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Timeout,
    Unsupported,
)
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.kernels import MICROKERNEL, contract, run
from tierloop.devices.kernels.contract import DTYPES, Dense
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.system import HostSystem
from tierloop.devices.waiting import read_bytes, wait, write_bytes

SOON_S = 30.0
"""Longer than anything here takes; a test that waits so long has failed."""


@pytest.fixture
def site() -> Site:
    return Site(WallClock(), checker=HazardChecker())


@pytest.fixture
def device(site: Site) -> Iterator[Cpu]:
    opened = open_cpu("dram", site, {"capacity": 64 << 20, "threads": 2})
    yield opened
    opened.close()


def numbers(n: int) -> NDArray[np.uint8]:
    return np.arange(n, dtype=np.uint8)


def dense(function: Any) -> Launch:
    """A launch that calls a function of no arguments on a worker."""
    return Launch(Dense("test", 7, 0, 0, lambda reads, writes: function()), (), ())


def test_it_says_what_it_is(device: Cpu) -> None:
    info = device.info
    assert (info.kind, info.provenance) == ("cpu", "real")
    assert info.arithmetic is not None
    assert info.arithmetic.microkernel == MICROKERNEL
    assert info.memories[0].name == "dram"
    assert info.executors[0].kernels == contract.KERNELS
    assert info.executors[0].dtypes == DTYPES


def test_a_region_is_zeroed_host_memory_that_the_host_sees(site: Site, device: Cpu) -> None:
    region = device.alloc(5000)
    assert region.view is not None
    assert region.view.ctypes.data % PAGE == 0
    assert not region.view.any()
    write_bytes(site.clock, device, region.at(4990, 10), numbers(10))
    assert region.view[4990:].tolist() == list(range(10))


def test_regions_may_have_huge_pages(device: Cpu) -> None:
    # The system gives them to private mappings only, and a shared one asks in vain without an error.
    region = device.alloc(8 << 20)
    assert region.view is not None
    address = region.view.ctypes.data
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            low, high = (int(x, 16) for x in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            flags = line.split()[1:]
    assert flags, "the mapping is found"
    assert "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_workers_run_on_the_cores_that_were_asked_for(site: Site) -> None:
    core = max(os.sched_getaffinity(0))
    device = open_cpu("dram", site, {"cores": [core]})
    seen: list[set[int]] = []
    wait(site.clock, device.submit(dense(lambda: seen.append(os.sched_getaffinity(0)))))
    device.close()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) != {core} or len(os.sched_getaffinity(0)) == 1


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ([], "allowed: a list of core numbers"),
        ([True], "allowed: a list"),
        ("0", "allowed: a list"),
        ([4096], "may not use core 4096"),
    ],
)
def test_cores_that_cannot_be_used_are_refused(site: Site, cores: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_cpu("dram", site, {"cores": cores})


def test_a_view_that_outlives_its_region_is_harmless(device: Cpu) -> None:
    region = device.alloc(4096)
    view = region.view
    assert view is not None
    device.free(region)
    view[:] = 1
    assert region.view is None


def test_capacity_counts_whole_pages(site: Site) -> None:
    device = open_cpu("dram", site, {"capacity": 3 * PAGE})
    first = device.alloc(PAGE + 1)
    device.alloc(1)
    with pytest.raises(OutOfMemory):
        device.alloc(1)
    device.free(first)
    device.alloc(2 * PAGE)
    device.close()


def test_what_the_system_cannot_map_is_out_of_memory(site: Site) -> None:  # C10
    device = open_cpu("dram", site, {"capacity": 1 << 60})
    with pytest.raises(OutOfMemory) as caught:
        device.alloc(1 << 59)
    assert caught.value.errno is not None
    device.close()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_kernel_has_the_bits_of_the_kernels_package(site: Site, device: Cpu, dtype: Any) -> None:
    for kernel, launch in every_kernel(dtype).items():
        results = carry_out(site.clock, device, launch)
        flops = run(launch, bytes_of)
        for there, operand in zip(results, launch.writes, strict=True):
            here = np.concatenate([bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()])
            assert (there == here).all(), kernel
        assert flops == contract.flops(launch.args, [sum(s.nbytes for _, s in operand) for operand in launch.reads])


def test_completions_say_how_much_was_computed(site: Site, device: Cpu) -> None:
    completion = device.submit(dense(lambda: None))
    wait(site.clock, completion)
    assert completion.flops == 7
    assert completion.submitted_ns <= completion.started_ns <= completion.ended_ns


def test_queues_work_at_the_same_time(site: Site, device: Cpu) -> None:
    both = threading.Barrier(2, timeout=SOON_S)
    wait(site.clock, [device.submit(dense(both.wait), queue=queue) for queue in (0, 1)])
    assert both.broken is False


def test_a_command_begins_when_what_it_comes_after_has_ended(site: Site, device: Cpu) -> None:
    order: list[str] = []
    go = threading.Event()

    def first() -> None:
        assert go.wait(SOON_S)
        order.append("first")

    earlier = device.submit(dense(first), queue=0)
    later = device.submit(dense(lambda: order.append("later")), queue=1, after=[earlier])
    beside = device.submit(dense(go.set), queue=2)
    wait(site.clock, [earlier, later, beside])
    assert order == ["first", "later"]


def test_a_worker_that_fails_ends_the_command_and_the_device_goes_on(site: Site, device: Cpu) -> None:
    def fails() -> None:
        raise ZeroDivisionError("no")

    failed = device.submit(dense(fails))
    follower = device.submit(dense(lambda: None), queue=1, after=[failed])
    with pytest.raises(Cancelled):
        wait(site.clock, follower)
    with pytest.raises(ProtocolError, match="dram: dense: it failed while it ran: ZeroDivisionError: no") as caught:
        wait(site.clock, failed)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    wait(site.clock, device.submit(dense(lambda: None)))


def test_a_launch_that_does_not_fit_is_out_of_range(site: Site, device: Cpu) -> None:
    scores, indices = device.alloc(16), device.alloc(16)
    args = contract.Topk(1, np.array([-4, 8], dtype=np.int64))
    with pytest.raises(OutOfRange, match=r"dram: topk: .*lengths"):
        wait(site.clock, device.submit(Launch(args, ((scores.all(),),), ((indices.all(),),))))


def test_copies_flushes_and_reads_in_many_spans(site: Site, device: Cpu) -> None:
    one, other = device.alloc(100), device.alloc(100)
    write_bytes(site.clock, device, Segment(one, Spans([(90, 10), (0, 10)])), numbers(20))
    copied = device.submit(Copy(Segment(one, Spans([(95, 5), (0, 5)])), other.at(0, 10)))
    flushed = device.submit(Flush(other.all()), after=[copied])
    wait(site.clock, flushed)
    assert read_bytes(site.clock, device, other.at(0, 10)).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_it_refuses_a_virtual_clock() -> None:
    with pytest.raises(ConfigurationError, match="dram: the cpu driver is real and cannot run on a virtual clock"):
        open_cpu("dram", Site(VirtualClock()), {})


def test_it_refuses_phantoms(device: Cpu) -> None:
    with pytest.raises(Unsupported, match="no phantom regions"):
        device.alloc(8, phantom=True)


def test_memories_with_a_view_are_reached_when_named(site: Site, device: Cpu) -> None:
    near = open_cpu("near", site, {"capacity": 1 << 20, "reaches": ["dram"]})
    there, here = device.alloc(8), near.alloc(8)
    write_bytes(site.clock, device, there.all(), numbers(8))
    wait(site.clock, near.submit(Copy(there.all(), here.all())))
    assert read_bytes(site.clock, near, here.all()).tolist() == list(range(8))
    with pytest.raises(Unsupported, match="does not reach near"):
        device.submit(Copy(here.all(), there.all()))
    near.close()


def test_a_region_that_another_device_works_on_is_not_freed(site: Site, device: Cpu) -> None:
    near = open_cpu("near", site, {"capacity": 1 << 20, "reaches": ["dram"]})
    region, go_on = device.alloc(8), threading.Event()
    held = near.submit(dense(lambda: go_on.wait(SOON_S)))
    written = near.submit(Write(region.all(), numbers(8)))
    with pytest.raises(Busy, match=r"dram: free: <region .*> is used by a command that has not ended"):
        device.free(region)
    go_on.set()
    wait(site.clock, [held, written])
    device.free(region)
    near.close()


def test_memories_without_a_view_are_refused_at_submit(site: Site) -> None:
    hidden = open_reference("emu:ref", site, {})
    device = open_cpu("dram", site, {"capacity": 1 << 20, "reaches": ["emu:ref"]})
    with pytest.raises(Unsupported, match="the host has no view of"):
        device.submit(Write(hidden.alloc(4).all(), numbers(4)))
    device.close()


def test_estimates_come_from_what_was_measured(site: Site, device: Cpu) -> None:
    region = device.alloc(1 << 20)
    command = Write(region.all(), np.zeros(1 << 20, dtype=np.uint8))
    before = device.estimate(command)
    assert before.duration_ns > 0
    assert "measured once" in before.source
    wait(site.clock, device.submit(command))
    assert "1 completions of write" in device.estimate(command).source


def test_dense_stages_are_estimated_each_on_its_own(site: Site, device: Cpu) -> None:
    wait(site.clock, device.submit(dense(lambda: None)))
    other = Launch(Dense("other", 1000, 0, 0), (), ())
    assert "dense test" in device.estimate(dense(lambda: None)).source
    assert "measured once" in device.estimate(other).source


def test_close_waits_for_what_is_running_and_ends_the_rest(site: Site) -> None:
    device = open_cpu("dram", site, {"capacity": 1 << 20})
    began, done = threading.Event(), []

    def slow() -> None:
        began.set()
        done.append(sum(range(1_000_000)))

    running = device.submit(dense(slow))
    waiting = device.submit(dense(lambda: done.append(-1)))
    assert began.wait(SOON_S)
    device.close()
    assert done == [499999500000]
    assert isinstance(running.error, Gone)
    assert isinstance(waiting.error, Gone)
    site.clock.wait_until(site.clock.now())
    with pytest.raises(Gone):
        device.alloc(8)
    with pytest.raises(Gone):
        device.submit(dense(lambda: None))
    device.close()


def test_close_does_not_wait_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "CLOSE_TIMEOUT_S", 0.01)
    device = open_cpu("dram", site, {"capacity": 1 << 20})
    let_go, gone = threading.Event(), threading.Event()

    def stuck() -> None:
        let_go.wait(SOON_S)
        gone.set()

    device.submit(dense(stuck))
    with pytest.raises(Timeout, match=r"dram-queue-0 still ran a command after 0\.01 s"):
        device.close()
    let_go.set()
    assert gone.wait(SOON_S)


def test_an_error_that_nobody_looked_at_is_raised_at_close(site: Site) -> None:
    device = open_cpu("dram", site, {"capacity": 1 << 20})

    def fails() -> None:
        raise RuntimeError("unseen")

    completion = device.submit(dense(fails))
    assert site.clock.run_until(lambda: completion.done, site.clock.now() + round(SOON_S * 1e9))
    with pytest.raises(ProtocolError, match="unseen"):
        device.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 5}, "dram: capacity = 5"),
        ({"queues": 0}, "dram: queues = 0; allowed: an integer of at least 1"),
        ({"threads": 1.5}, "dram: threads = 1.5"),
        ({"reach": []}, "dram: option 'reach' is unknown: did you mean 'reaches'"),
        ({"reaches": [3]}, "dram: reaches = "),
        ({"reaches": 3}, "dram: reaches = 3; allowed: a list of names"),
        ({"queues": 10**7}, "dram: queues = 10000000; allowed: an integer from 1 to 1024"),
    ],
)
def test_wrong_options_are_named(site: Site, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_cpu("dram", site, options)


# -- how much memory there is ---------------------------------------------------------------------------------------

MEMINFO = "MemTotal:  8000 kB\nMemAvailable:  4000 kB\n"


def tree(root: Path, files: dict[str, str]) -> HostSystem:
    """A system whose /proc and /sys hold these files and no others."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return HostSystem(root)


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_nbytes(tree(tmp_path, {"proc/meminfo": MEMINFO})) == 4000 * 1024


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:  # B15
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/job",
        "sys/fs/cgroup/pod/memory.max": "1000000",
        "sys/fs/cgroup/pod/memory.current": "400000",
        "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 100000",
        "sys/fs/cgroup/pod/job/memory.max": "max",
        "sys/fs/cgroup/pod/job/memory.current": "300000",
    }
    assert available_nbytes(tree(tmp_path, files)) == 700_000


def test_version_1_groups_count_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/x",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "500000",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "600000",
    }
    assert available_nbytes(tree(tmp_path, files)) == 0


def test_nothing_known_is_nothing_available(tmp_path: Path) -> None:
    assert available_nbytes(tree(tmp_path, {})) == 0


def test_this_machine_has_some_memory() -> None:
    assert available_nbytes() > 0


def test_half_of_what_is_left_is_the_default_capacity(site: Site) -> None:
    device = open_cpu("dram", site, {})
    assert 0 < device.info.memories[0].capacity <= available_nbytes()
    device.close()
