"""What users of comparable software hit with drives, host memory, CXL memory and registration, and what happens here.

Most of these have tests beside the driver that they concern; here are those that hold for several kinds of devices, and
a check that the page of docs/ names every report, and that every one of them is named by a test or left out for a
reason. A number beside the name of a test says which report it shows.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import subprocess
import sys
import tokenize
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
from tierloop.firmware_models.nvme_engine import MediaOperation

Bytes = NDArray[np.uint8]
NBYTES = 8 * PAGE
FAR_NS = 60_000_000_000
TESTS = Path(__file__).resolve().parent
PAGE_OF_REPORTS = TESTS.parent / "docs" / "real_hardware.md"
REPORTS = {
    *("B1", "B3", "B4", "B6", "B7", "B9", "B10", "B12", "B13", "B15", "B16", "B18"),
    *("C1", "C3", "C4", "C6", "C7", "C9", "C10", "C12", "C13"),
    *("D1", "D2", "D4", "D5"),
    *("E1", "E2", "E4", "E5", "E7", "E8"),
}
"""Of drives and files (B), host memory (C), CXL and near memory (D), registration and remote memory (E)."""
REPORT = re.compile(r"\b[B-E]\d+\b")


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
def test_hundreds_of_commands_leave_no_objects_behind(bench: Bench) -> None:  # C9
    region, into = bench.device.alloc(PAGE), np.zeros(PAGE, dtype=np.uint8)

    def read(times: int) -> int:
        for _ in range(times):
            assert bench.error_of(bench.submit(Read(region.all(), into))) is None
        gc.collect()
        return sum(type(each) is not MediaOperation for each in gc.get_objects())  # a model remembers the latest

    before = read(100)
    assert read(500) < before + 50


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_tier_is_without_a_limit(kind: str, bench: Bench) -> None:  # B7, B9
    memory = bench.device.info.memories[0]
    assert 0 < memory.capacity < 1 << 40
    with pytest.raises(OutOfMemory, match=f"{kind}0: alloc: {memory.capacity + memory.alignment} bytes"):
        bench.device.alloc(memory.capacity + memory.alignment)
    bench.device.free(bench.device.alloc(memory.capacity // memory.alignment * memory.alignment))


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


WITHOUT_ROOT = """
import os
from tierloop.devices.clocks import WallClock
from tierloop.devices.self_test import self_test
from tierloop.devices.site import Site
from tierloop.emulators.modelled import open_modelled
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
with open_modelled(["cxl", "nvme"], Site(clock=WallClock())) as platform:
    found = self_test(platform)
    assert platform.provenance == "emulated"
    assert all(tested.good for tested in found), found
print(os.getuid(), sorted({tested.memory for tested in found}))
"""


def test_hardware_that_nobody_has_is_tried_without_root_and_without_a_module_of_the_kernel() -> None:  # D5
    done = subprocess.run([sys.executable, "-c", WITHOUT_ROOT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    user, memories = done.stdout.split(maxsplit=1)
    assert user != "0"
    assert memories.strip() == "['cpu0', 'cxl0', 'nvme0']"


def reports() -> dict[str, str]:
    """What the page says is done here about each report, by its number."""
    rows = [line.strip().strip("|").split("|") for line in PAGE_OF_REPORTS.read_text().splitlines()]
    return {row[0].strip(): row[-1].strip() for row in rows if len(row) == 3 and REPORT.fullmatch(row[0].strip())}


def shown(path: Path) -> set[str]:
    """Numbers in comments beside the names of a file's tests."""
    source = path.read_text()
    if not REPORT.search(source):
        return set()
    tests = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lines = {
        line for node in tests if node.name.startswith("test_") for line in range(node.lineno, node.body[0].lineno)
    }
    comments = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return {number for t in comments if t.start[0] in lines for number in REPORT.findall(t.string)}


def test_every_report_is_shown_by_a_test_or_left_out_for_a_reason() -> None:
    said = reports()
    left_out = {number for number, text in said.items() if text.startswith("left out: ")}
    named = set().union(*(shown(path) for path in TESTS.glob("test_*.py")))
    assert said.keys() == REPORTS
    assert named == said.keys() - left_out
    assert all(len(said[number]) > 40 for number in left_out), "a reason is a sentence"
