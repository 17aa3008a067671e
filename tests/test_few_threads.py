"""A process that may have no more threads: commands fail with a reason, or are done by who is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Write
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import OutOfMemory
from tierloop.devices.kernels import pool
from tierloop.devices.site import Site
from tierloop.devices.waiting import wait


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As under a limit on threads: what pthread_create refuses, Python makes a RuntimeError of."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield patch


def test_a_command_without_a_thread_for_its_queue_fails_and_the_next_one_tries_again(
    no_threads: pytest.MonkeyPatch,
) -> None:
    site = Site(WallClock())
    device = open_cpu("dram", site, {"capacity": 1 << 20})
    region = device.alloc(8)
    write = Write(region.all(), np.arange(8, dtype=np.uint8))
    with pytest.raises(OutOfMemory, match=r"dram: write: no further thread can be started: .*pids\.max"):
        wait(site.clock, device.submit(write))
    no_threads.undo()
    wait(site.clock, device.submit(write))
    assert region.view is not None
    assert region.view.tolist() == list(range(8))
    device.free(region)
    device.close()


def test_a_device_without_threads_closes(no_threads: pytest.MonkeyPatch) -> None:
    site = Site(WallClock())
    device = open_cpu("dram", site, {"capacity": 1 << 20})
    completion = device.submit(Write(device.alloc(8).all(), np.zeros(8, dtype=np.uint8)))
    assert isinstance(completion.error, OutOfMemory)
    with pytest.raises(OutOfMemory):
        device.close()  # nobody had looked at the error
    device.close()


def test_work_is_done_by_its_caller_where_nobody_can_help(
    no_threads: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CORES", 8)
    monkeypatch.setattr(pool, "_workers", [])
    done: list[int] = []
    for _ in range(20):  # a share of the cores that is not given back would be missing soon
        pool.share(8, lambda: done.append(1))
    assert len(done) == 20
    no_threads.undo()
    together = threading.Barrier(2, timeout=30)
    pool.share(2, together.wait)
