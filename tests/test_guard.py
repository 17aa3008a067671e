"""The guard: real SIGBUS of files that are cut while they are mapped, on real threads."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention_case import Case, bytes_of
from tests.cxl_rig import MIB, PAGE, devdax, file_of, pair
from tests.forked_scripts import run_scripts
from tests.pnm_rig import card_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy, Flush, Launch, Read, Write
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.errors import ConfigurationError, MediaError, Misaligned, OutOfMemory
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.host_accelerator import HostAccelerator

Bytes = NDArray[np.uint8]


def mapped(nbytes: int) -> tuple[Bytes, int]:
    """A mapped file, and the descriptor by which it may be cut; the caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8), os.dup(file.fileno())


@pytest.fixture
def cut() -> Iterator[tuple[Bytes, int]]:
    """A guarded array of 16 pages full of sevens, and its descriptor."""
    memory, fd = mapped(16 * PAGE)
    array = guard.guarded("test", memory)
    array[:] = 7
    yield array, fd
    os.close(fd)


def test_a_load_from_a_lost_page_gives_zeros_and_a_mark(cut: tuple[Bytes, int]) -> None:
    array, fd = cut
    os.ftruncate(fd, 3 * PAGE)
    assert len(guard.lost(array)) == 0, "nobody has looked yet"
    copied = array.copy()
    assert (copied[: 3 * PAGE] == 7).all()
    assert not copied[3 * PAGE :].any()
    assert guard.lost(array).tolist() == [[page * PAGE, PAGE] for page in range(3, 16)]


def test_only_what_was_touched_counts_as_lost(cut: tuple[Bytes, int]) -> None:
    array, fd = cut
    os.ftruncate(fd, 0)
    assert array[5 * PAGE + 17] == 0
    assert guard.lost(array).tolist() == [[5 * PAGE, PAGE]]
    assert guard.lost(array[5 * PAGE + 10 : 7 * PAGE]).tolist() == [[0, PAGE - 10]]
    assert len(guard.lost(array[: 5 * PAGE])) == 0
    assert len(guard.lost(np.zeros(8, dtype=np.uint8))) == 0


def test_a_store_to_a_lost_page_is_marked_too(cut: tuple[Bytes, int]) -> None:
    array, fd = cut
    os.ftruncate(fd, PAGE)
    array[2 * PAGE] = 1
    assert guard.lost(array).tolist() == [[2 * PAGE, PAGE]]


def test_a_whole_grain_is_lost_at_once() -> None:
    memory, fd = mapped(16 * PAGE)
    start = -memory.ctypes.data % (4 * PAGE)
    array = guard.guarded("test", memory[start : start + 12 * PAGE], 4 * PAGE)
    array[:] = 7
    os.ftruncate(fd, 0)
    assert array[6 * PAGE] == 0
    os.close(fd)
    assert guard.lost(array).tolist() == [[4 * PAGE, 4 * PAGE]]


def test_threads_may_fault_at_once() -> None:
    memory, fd = mapped(4 * MIB)
    array = guard.guarded("test", memory)
    array[:] = 7
    os.ftruncate(fd, 0)
    ready = threading.Barrier(8, timeout=30)
    sums: list[int] = []

    def reads(thread: int) -> None:
        ready.wait()
        sums.append(int(array[thread % 4 * MIB : (thread % 4 + 1) * MIB].sum()))

    threads = [threading.Thread(target=reads, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert sums == [0] * 8
    assert len(guard.lost(array)) == 4 * MIB // PAGE


def test_losses_in_more_places_than_a_process_has_mappings_for_cost_all_of_the_mapping_and_not_the_process() -> None:
    beside, other = mapped(PAGE)
    kept = guard.guarded("test", beside)
    kept[:] = 7
    memory, fd = mapped(2 * (guard.MOST_PIECES + 2) * PAGE)
    array = guard.guarded("test", memory)
    os.ftruncate(fd, 0)
    assert not array[: 2 * guard.MOST_PIECES * PAGE : 2 * PAGE].any()
    assert len(guard.lost(array)) == guard.MOST_PIECES
    assert array[-1] == 0
    assert len(guard.lost(array)) == 2 * (guard.MOST_PIECES + 2)
    assert (kept == 7).all()
    assert not len(guard.lost(kept))
    os.close(fd)
    os.close(other)


def test_losses_side_by_side_are_one_place() -> None:
    pages = guard.MOST_PIECES + 10
    memory, fd = mapped((pages + 2) * PAGE)
    array = guard.guarded("test", memory)
    os.ftruncate(fd, PAGE)
    array[0] = 7
    assert not array[2 * PAGE :: PAGE].any()
    assert guard.lost(array).tolist() == [[page * PAGE, PAGE] for page in range(2, pages + 2)]
    assert array[0] == 7
    os.close(fd)


@given(
    st.sets(st.integers(0, 15), max_size=8),
    st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 9000)), max_size=5),
)
def test_the_first_lost_byte_of_a_command_is_named(gone: set[int], spans: list[tuple[int, int]]) -> None:
    memory, fd = mapped(16 * PAGE)
    region = Region("test", "test", 0, 14 * PAGE, view=guard.guarded("test", memory)[PAGE : 15 * PAGE])
    os.ftruncate(fd, 0)
    os.close(fd)
    assert region.view is not None
    touched = [page for page in sorted(gone) if 1 <= page < 15]
    assert not region.view[[(page - 1) * PAGE for page in touched]].any()
    lost = [(page - 1) * PAGE for page in touched]
    named = [max(low, at) for low in lost for at, nbytes in spans if max(low, at) < min(low + PAGE, at + nbytes)]
    error = guard.loss("test", Flush(Segment(region, Spans(spans or [(0, 0)]))))
    assert (error is None) == (not named)
    if error is not None:
        assert f"byte {min(named)} is lost" in str(error)


def test_a_range_ends_with_the_last_view_of_it() -> None:
    for _ in range(guard.RANGES + 10):
        memory, fd = mapped(PAGE)
        os.close(fd)
        view = guard.guarded("test", memory)[5:9]
        assert view[0] == 0
        del memory, view


def test_more_ranges_than_there_is_room_for_are_refused() -> None:
    gc.collect()
    memory, fd = mapped(PAGE)
    os.close(fd)
    with pytest.raises(OutOfMemory, match=f"test: open: {guard.RANGES} mappings are guarded already"):
        assert [guard.guarded("test", memory) for _ in range(guard.RANGES + 1)]


@pytest.mark.parametrize(
    ("first", "nbytes", "grain", "kind"),
    [
        (0, PAGE, PAGE - 1, ConfigurationError),
        (0, PAGE, PAGE // 2, ConfigurationError),
        (0, 3 * PAGE, 3 * PAGE, ConfigurationError),
        (1, PAGE, PAGE, Misaligned),
        (0, PAGE + 1, PAGE, Misaligned),
        (0, 0, PAGE, Misaligned),
    ],
)
def test_memory_that_cannot_be_guarded_is_refused(first: int, nbytes: int, grain: int, kind: type[Exception]) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=np.uint8)
    with pytest.raises(kind, match="test: "):
        guard.guarded("test", memory[first : first + nbytes], grain)


# -- commands --------------------------------------------------------------------------------------------------------


class Rig:
    """A cpu device that reaches a cxl device on a file; `lose` cuts the file."""

    def __init__(self, folder: Path) -> None:
        self.path = file_of(folder)
        self.site = Site(WallClock())
        self.platform: Platform = pair(self.site, {"path": str(self.path)})
        self.cpu, self.cxl = self.platform.device("cpu0"), self.platform.device("cxl0")

    def lose(self, offset: int) -> None:
        os.truncate(self.path, offset)

    def filled(self, nbytes: int, value: int) -> Region:
        region = self.cxl.alloc(nbytes)
        write_bytes(self.site.clock, self.cpu, region.all(), np.full(nbytes, value, dtype=np.uint8))
        return region

    def read(self, segment: Segment) -> Bytes:
        return read_bytes(self.site.clock, self.cpu, segment)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.platform.close()


def test_a_copy_over_lost_pages_ends_with_a_media_error_and_the_rest_goes_on(rig: Rig) -> None:
    kept, gone = rig.filled(4 * PAGE, 3), rig.filled(4 * PAGE, 5)
    host = rig.cpu.alloc(4 * PAGE)
    rig.lose(6 * PAGE)
    assert gone.view is not None
    address = gone.view.ctypes.data + 2 * PAGE
    with pytest.raises(MediaError, match=f"cpu0: copy: <region 1 .*>: byte {2 * PAGE} is lost: .* behind {address:#x}"):
        wait(rig.site.clock, rig.cpu.submit(Copy(gone.all(), host.all())))
    wait(rig.site.clock, rig.cpu.submit(Copy(kept.all(), host.all())))
    assert (read_bytes(rig.site.clock, rig.cpu, host.all()) == 3).all()
    assert (rig.read(gone.at(0, 2 * PAGE)) == 5).all(), "bytes of the region that are not lost"


@pytest.mark.parametrize("verb", ["read", "write", "copy into", "flush", "many spans"])
def test_every_command_that_names_a_lost_byte_fails_from_then_on(rig: Rig, verb: str) -> None:
    region, host = rig.filled(4 * PAGE, 5), rig.cpu.alloc(4 * PAGE)
    rig.lose(3 * PAGE)
    with pytest.raises(MediaError):
        rig.read(region.all())
    buffer = np.ones(4 * PAGE, dtype=np.uint8)
    command = {
        "read": Read(region.all(), buffer),
        "write": Write(region.all(), buffer),
        "copy into": Copy(host.all(), region.all()),
        "flush": Flush(region.all()),
        "many spans": Read(Segment(region, Spans([(8, 8), (4 * PAGE - 8, 8)])), buffer[:16]),
    }[verb]
    with pytest.raises(MediaError, match=r"is lost"):
        wait(rig.site.clock, rig.cpu.submit(command))  # type: ignore[arg-type]  # one of the verbs
    beside = Segment(region, Spans([(8, 8), (2 * PAGE, 8), (4 * PAGE, 0)]))
    wait(rig.site.clock, rig.cpu.submit(Read(beside, buffer[:16])))


def test_attention_over_lost_rows_is_an_error_and_over_others_keeps_its_bits(rig: Rig) -> None:
    case = Case("float32", num_kv_heads=2, group=4, head_dim=64, head_dim_v=64, tokens=512)
    rows = case.all_rows()
    place, roots = case.layout(rows, "paged"), case.roots_of(rows)
    states = case.states(place, roots)
    queries = rig.cpu.alloc(case.queries.nbytes)
    write_bytes(rig.site.clock, rig.cpu, queries.all(), case.queries.reshape(-1).view(np.uint8))
    out = rig.cpu.alloc(states.nbytes)

    def there() -> tuple[Region, Region]:
        pair = []
        for operand in (place.keys, place.values):
            ((one, _),) = operand
            pair.append(rig.cxl.alloc(one.nbytes))
            write_bytes(rig.site.clock, rig.cpu, pair[-1].at(0, one.nbytes), bytes_of(one))
        return pair[0], pair[1]

    def attend(keys: Region, values: Region) -> Bytes:
        reads = ((queries.all(),), (Segment(keys, place.keys[0].spans),), (Segment(values, place.values[0].spans),))
        args = case.attend_args(place.runs, roots)
        wait(rig.site.clock, rig.cpu.submit(Launch(args, reads, ((out.at(0, states.nbytes),),))))
        return rig.read(out.at(0, states.nbytes))

    good, bad = there(), there()
    expected = attend(*good)
    rig.lose(3 * good[0].nbytes + 8 * PAGE)
    with pytest.raises(MediaError, match=r"cpu0: attend: .* is lost"):
        attend(*bad)
    assert (attend(*good) == expected).all()
    assert (expected == states.reshape(-1).view(np.uint8)).all()


def test_a_lost_host_buffer_is_found_as_well(rig: Rig, cut: tuple[Bytes, int]) -> None:
    region = rig.filled(PAGE, 5)
    array, fd = cut
    os.ftruncate(fd, 0)
    with pytest.raises(MediaError, match="cpu0: write: byte 0 of the host buffer is lost"):
        wait(rig.site.clock, rig.cpu.submit(Write(region.all(), array[:PAGE])))


def test_other_devices_that_copy_lost_bytes_by_themselves_see_it_too(rig: Rig, tmp_path: Path) -> None:
    gone, host = rig.filled(PAGE, 5), rig.cpu.alloc(PAGE)
    options = {"path": str(tmp_path / "drive"), "capacity": MIB, "create": True, "reaches": ["cpu0", "cxl0"]}
    drive = open_nvme("nvme0", rig.site, options)
    pnm = open_pnm("pnm0", rig.site, {"reaches": ["cpu0", "cxl0"]}, window=card_of(capacity=MIB).bus())
    gpu = open_gpu("gpu0", rig.site, {"capacity": MIB, "reaches": ["cpu0", "cxl0"]}, accelerator=HostAccelerator())
    rig.lose(0)
    for device in (drive, pnm, gpu):
        queue = next(executor.queues[0] for executor in device.info.executors if "copy" in executor.verbs)
        with pytest.raises(MediaError, match=f"{device.info.name}: copy: .* is lost"):
            wait(rig.site.clock, device.submit(Copy(gone.all(), host.all()), queue))
        device.close()


def test_lost_bytes_are_not_allocated_again_until_the_memory_is_opened_again(rig: Rig) -> None:
    gone = rig.filled(4 * PAGE, 5)
    rig.lose(2 * PAGE)
    with pytest.raises(MediaError):
        rig.read(gone.all())
    os.truncate(rig.path, 8 * MIB)
    rig.cxl.free(gone)
    largest = 8 * MIB - 4 * PAGE
    with pytest.raises(OutOfMemory, match=rf"the largest piece that is free has {largest}, {2 * PAGE} are lost"):
        rig.cxl.alloc(8 * MIB)
    first, rest = rig.cxl.alloc(2 * PAGE), rig.cxl.alloc(8 * MIB - 4 * PAGE)
    for region in (first, rest):
        assert not rig.read(region.all()).any()


def test_pages_that_are_lost_when_they_are_zeroed_are_passed_over(tmp_path: Path) -> None:
    kernel, node = devdax()
    site = Site(WallClock())
    platform = pair(site, {"path": "/dev/dax0.0"}, kernel)
    node.lose(4 * PAGE)
    memory = platform.device("cxl0")
    with pytest.raises(OutOfMemory, match="are lost"):
        memory.alloc(5 * PAGE)
    region = memory.alloc(4 * PAGE)
    assert not read_bytes(site.clock, platform.device("cpu0"), region.all()).any()
    platform.close()


# -- signals that are not ours ---------------------------------------------------------------------------------------

_PREAMBLE = """
import faulthandler, mmap, os, resource, signal, tempfile
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import numpy as np
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.drivers.pnm import open_pnm
def mapped():
    file = tempfile.TemporaryFile()
    file.truncate(4096)
    array = np.frombuffer(mmap.mmap(file.fileno(), 4096), dtype=np.uint8)
    return file, array
def ours():
    file, array = mapped()
    array = guard.guarded("test", array)
    file.truncate(0)
    assert array[0] == 0 and len(guard.lost(array)) == 1
def foreign():
    file, array = mapped()
    file.truncate(0)
    return array[0]
"""


SCRIPTS = {
    "by default": "ours(); foreign()",
    "faulthandler": "faulthandler.enable(); ours(); foreign()",
    "a signal that is sent": "faulthandler.enable(); ours(); os.kill(os.getpid(), signal.SIGBUS)",
    "a handler that comes later": "ours(); faulthandler.enable(); ours(); foreign()",
    "ignored": "signal.signal(signal.SIGBUS, signal.SIG_IGN); ours(); os.kill(os.getpid(), signal.SIGBUS); ours()",
}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """The exit status and standard error of processes that ran the scripts, each a child of one that has imported."""
    return run_scripts(_PREAMBLE + "\nguard._prepare()\n", SCRIPTS, stream=2)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("by default", False),
        ("faulthandler", True),
        ("a signal that is sent", True),
        ("a handler that comes later", True),
    ],
)
def test_a_foreign_signal_ends_the_process_and_reaches_its_owner(
    ended: dict[str, tuple[int, str]], name: str, reported: bool
) -> None:
    status, stderr = ended[name]
    assert status == -signal.SIGBUS
    assert stderr.count("Fatal Python error: Bus error") == reported


def test_an_ignored_signal_that_is_sent_stays_ignored(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["ignored"] == (0, "")


def test_errno_survives_a_lost_page() -> None:
    memory, fd = mapped(PAGE)
    array = guard.guarded("test", memory)
    os.ftruncate(fd, 0)
    os.close(fd)
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(errno.EXDEV)
    libc.memcpy(ctypes.create_string_buffer(8), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(8))
    assert ctypes.get_errno() == errno.EXDEV
    assert len(guard.lost(array)) == 1
