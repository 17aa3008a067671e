"""What users of comparable software hit with drives, host memory, CXL memory and registration, and what happens here.

Most of these have tests beside the driver that they concern; here are those that hold for several kinds of devices.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.numa_rig import PAGE, machine
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Read, Write, verb
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import Busy, DeviceError, Gone, MediaError, OutOfMemory, OutOfRange, Timeout
from tierloop.devices.faulty_host import FaultyHost, of
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.emulators.modelled import KINDS, open_modelled

Bytes = NDArray[np.uint8]
NBYTES = 8 * PAGE
FAR_NS = 60_000_000_000


class Bench:
    """A real driver on a model of hardware, and a queue that reads and writes its memory."""

    def __init__(self, kind: str) -> None:
        self.platform = open_modelled([kind], Site(clock=WallClock()))
        self.device = self.platform.device(f"{kind}0")
        lanes = [
            (device, executor.queues[0])
            for device, executor in self.platform.executors()
            if executor.verbs >= {"read", "write"} and executor.path(f"{kind}0") is not None
        ]
        self._reacher, self._queue = min(lanes, key=lambda lane: lane[0] is not self.device)

    def submit(self, command: Command) -> Completion:
        return self._reacher.submit(command, self._queue)

    def error_of(self, completion: Completion) -> DeviceError | None:
        clock = self.platform.clock
        assert clock.run_until(lambda: completion.done, clock.now() + FAR_NS)
        try:
            completion.result()
        except DeviceError as error:
            return error
        return None

    def write(self, target: Segment, data: Bytes) -> None:
        assert self.error_of(self.submit(Write(target, data))) is None

    def read(self, source: Segment) -> Bytes:
        into = np.zeros(source.spans.nbytes, dtype=np.uint8)
        assert self.error_of(self.submit(Read(source, into))) is None
        return into

    @property
    def back_door(self) -> FaultyHost:
        found = of(self.platform.site, self.device.info.name)
        assert found is not None
        return found


@pytest.fixture
def bench(kind: str) -> Iterator[Bench]:
    made = Bench(kind)
    yield made
    with suppress(DeviceError):  # closing says what became of a device that was lost on purpose
        made.platform.close()


def data_of(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 4), st.booleans()), min_size=1, max_size=24))
def test_what_one_node_gave_back_is_never_handed_out_by_another(
    steps: list[tuple[int, int, bool]],
) -> None:  # C6: a cache of pinned blocks whose key has no node
    two, site = machine("two-sockets-cxl"), Site(WallClock())
    options = {"capacity": 16 * PAGE, "queues": 1, "threads": 1}
    devices = [open_cpu(f"node{node}", site, {**options, "node": node}, two.kernel) for node in (0, 1, 2)]
    held: dict[int, list[Region]] = {0: [], 1: [], 2: []}
    for node, pages, give_back in steps:
        if give_back and held[node]:
            devices[node].free(held[node].pop(0))
        elif len(held[node]) < 4:
            held[node].append(devices[node].alloc(pages * PAGE))
        for owner, regions in held.items():
            for region in regions:
                assert region.view is not None
                assert set(two.memory.pages_at(region.view.ctypes.data, region.nbytes)) <= {owner, None}
    for device in devices:
        device.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_command_that_has_ended_keeps_no_buffer_alive(bench: Bench) -> None:  # C9: views that hold their parents
    region = bench.device.alloc(NBYTES)
    kept = []
    for seed in range(10):
        written, into = data_of(NBYTES, seed), np.zeros(NBYTES, dtype=np.uint8)
        for command in (Write(region.all(), written), Read(region.all(), into)):
            assert bench.error_of(bench.submit(command)) is None
        assert np.array_equal(written, into)
        kept += [weakref.ref(written), weakref.ref(into)]
        del written, into, command
    gc.collect()
    alive = sum(ref() is not None for ref in kept)
    assert alive <= 2, f"{alive} of {len(kept)} buffers live on"  # the last may still be in a worker's hands


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_region_is_given_back_once_and_its_room_is_given_out_once(kind: str, bench: Bench) -> None:  # C13, D4
    device, memory = bench.device, bench.device.info.memories[0]
    half = memory.capacity // 2 // memory.alignment * memory.alignment
    first, second = device.alloc(half), device.alloc(half)
    device.free(first)
    with pytest.raises(OutOfRange, match=f"{kind}0: free"):
        device.free(first)
    third = device.alloc(half)
    with pytest.raises(OutOfMemory, match=f"{kind}0: alloc: {half} bytes"):
        device.alloc(half)
    bench.write(second.at(0, NBYTES), data_of(NBYTES))
    bench.write(third.at(0, NBYTES), data_of(NBYTES, 1))
    assert np.array_equal(bench.read(second.at(0, NBYTES)), data_of(NBYTES))


@pytest.mark.parametrize("kind", ["cxl", "nvme"])
def test_a_bad_block_is_an_error_every_time_and_its_room_can_be_used_again(kind: str, bench: Bench) -> None:  # B3
    region = bench.device.alloc(NBYTES)
    bench.write(region.all(), data_of(NBYTES))
    bench.back_door.unreadable(region, 2 * PAGE, PAGE)
    for _ in range(3):
        error = bench.error_of(bench.submit(Read(region.all(), np.zeros(NBYTES, dtype=np.uint8))))
        assert isinstance(error, MediaError)
        assert f"{kind}0" in str(error)
    assert np.array_equal(bench.read(region.at(4 * PAGE, PAGE)), data_of(NBYTES)[4 * PAGE : 5 * PAGE])
    bench.device.free(region)
    fresh = bench.device.alloc(NBYTES)
    bench.write(fresh.all(), data_of(NBYTES, 2))
    assert np.array_equal(bench.read(fresh.all()), data_of(NBYTES, 2))


@pytest.mark.parametrize("kind", ["gpu", "nvme", "pnm"])
def test_room_is_not_given_to_another_while_a_command_on_it_has_not_come_back(kind: str, bench: Bench) -> None:  # B16
    region = bench.device.alloc(NBYTES)
    bench.write(region.all(), data_of(NBYTES))
    bench.back_door.hang()
    hanging = bench.submit(Read(region.all(), np.zeros(NBYTES, dtype=np.uint8)))
    with pytest.raises(Busy, match=f"{kind}0: free"):
        bench.device.free(region)
    assert isinstance(bench.error_of(hanging), (Gone, Timeout))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_error_of_a_lost_device_names_it_and_what_was_asked(kind: str, bench: Bench) -> None:  # E2
    region = bench.device.alloc(NBYTES)
    bench.back_door.unplug()
    for command in (Read(region.all(), np.zeros(NBYTES, dtype=np.uint8)), Write(region.all(), data_of(NBYTES))):
        error: DeviceError | None
        try:
            error = bench.error_of(bench.submit(command))
        except DeviceError as refused:
            error = refused
        assert isinstance(error, (Gone, MediaError)), repr(error)
        assert f"{kind}0" in str(error)
        assert error.op == verb(command)
        assert len(error.detail) > 10, "nothing is said but that it failed"
