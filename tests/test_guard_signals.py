"""The guard among other users of SIGBUS: a handler of Python's, and threads that let no signal in."""

from __future__ import annotations

import pytest

from tests.forked_scripts import run_scripts

_PREAMBLE = """
import json, mmap, os, resource, signal, sys, tempfile, threading
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import numpy as np
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers import guard
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.errors import MediaError, OutOfMemory
from tierloop.devices.kernels import pool
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes
guard._prepare()
everything = set(signal.valid_signals())

def cut():
    file = tempfile.TemporaryFile()
    file.truncate(4096)
    array = guard.guarded("test", np.frombuffer(mmap.mmap(file.fileno(), 4096), dtype=np.uint8))
    file.truncate(0)
    return array
"""

_NOTED = """
noted = []
{before}
array = cut()
{after}
for _ in range(5):
    signal.raise_signal(signal.SIGBUS)
    os.kill(os.getpid(), signal.SIGBUS)
print(len(noted), array[0], len(guard.lost(array)))
"""
_TAKE = "signal.signal(signal.SIGBUS, lambda *_: noted.append(1))"

SCRIPTS = {
    "a handler of before": _NOTED.format(before=_TAKE, after=""),
    "a handler of later": _NOTED.format(before="cut()", after=f"{_TAKE}; cut()"),
    "the thread that opens": "signal.pthread_sigmask(signal.SIG_BLOCK, everything); print(cut()[0])",
    "the thread of a queue": """
with tempfile.NamedTemporaryFile() as file:
    file.truncate(1 << 20)
    site = Site(WallClock())
    memory = open_cxl("cxl0", site, {"path": file.name})
    cpu = open_cpu("cpu0", site, {"capacity": 4096, "reaches": ["cxl0"]})
    region = memory.alloc(4096)
    signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    file.truncate(0)
    try:
        read_bytes(site.clock, cpu, region.all())
    except MediaError as error:
        print(error)
""",
    "a thread that allocates": """
with tempfile.NamedTemporaryFile() as file:
    file.truncate(1 << 20)
    memory = open_cxl("cxl0", Site(WallClock()), {"path": file.name})
    file.truncate(4096)
    def allocate():
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        try:
            memory.alloc(8192)
        except OutOfMemory as error:
            print(error)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
""",
    "no mappings left": """
import ctypes
most = int(open("/proc/sys/vm/max_map_count").read())
if most > 100_000:
    print("many")
else:
    file = tempfile.TemporaryFile()
    file.truncate(16 * 4096)
    array = guard.guarded("test", np.frombuffer(mmap.mmap(file.fileno(), 16 * 4096), dtype=np.uint8))
    cut()
    room = mmap.mmap(-1, 2 * most * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    protect = ctypes.CDLL(None).mprotect
    address = ctypes.addressof(ctypes.c_char.from_buffer(room)) + 4096
    while protect(ctypes.c_size_t(address), ctypes.c_size_t(4096), 1) == 0:
        address += 2 * 4096
    file.truncate(8 * 4096)
    print(array[12 * 4096], len(guard.lost(array)))
""",
    "no data left": """
grain = 1 << 20
file = tempfile.TemporaryFile()
file.truncate(4 * grain)
whole = np.frombuffer(mmap.mmap(file.fileno(), 4 * grain), dtype=np.uint8)
first = -whole.ctypes.data % grain
array = guard.guarded("test", whole[first : first + 2 * grain], grain)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + grain // 4, used + grain // 4))
file.truncate(0)
print(array[grain], guard.lost(array)[:, 0].tolist() == [grain], array[0], len(guard.lost(array)))
""",
    "a thread that helps": """
array = cut()
signal.pthread_sigmask(signal.SIG_BLOCK, everything)
pool._CORES = 2
met, caller = threading.Barrier(2), threading.get_ident()
def work():
    met.wait(60)
    if threading.get_ident() != caller:
        print(array[0])
pool.share(2, work)
""",
}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """The exit status and output of processes that ran the scripts, each a child of one that has imported."""
    return run_scripts(_PREAMBLE, SCRIPTS, stream=1)


@pytest.mark.parametrize("name", ["a handler of before", "a handler of later"])
def test_a_handler_that_takes_note_gets_every_signal_that_is_sent(ended: dict[str, tuple[int, str]], name: str) -> None:
    assert ended[name] == (0, "10 0 1")


@pytest.mark.parametrize("name", ["the thread that opens", "a thread that helps"])
def test_a_thread_that_blocks_all_signals_outlives_a_lost_page(ended: dict[str, tuple[int, str]], name: str) -> None:
    assert ended[name] == (0, "0")


def test_a_lost_page_is_a_media_error_where_the_caller_blocks_all_signals(ended: dict[str, tuple[int, str]]) -> None:
    status, said = ended["the thread of a queue"]
    assert status == 0
    assert said.startswith("cpu0: read: <region 0 of 4096 B on cxl0>: byte 0 is lost")


def test_a_page_that_is_lost_where_a_process_has_no_mapping_left_costs_all_of_its_memory(
    ended: dict[str, tuple[int, str]],
) -> None:
    status, said = ended["no mappings left"]
    if said == "many":
        pytest.skip("this kernel allows a process more mappings than a test should make")
    assert (status, said) == (0, "0 16")


def test_a_process_that_may_have_no_more_data_outlives_a_lost_page(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["no data left"] == (0, "0 True 0 2")


def test_lost_pages_are_passed_over_by_a_thread_that_blocks_all_signals(ended: dict[str, tuple[int, str]]) -> None:
    status, said = ended["a thread that allocates"]
    assert status == 0
    assert said == f"cxl0: alloc: 8192 bytes; the largest piece that is free has 4096, {(1 << 20) - 4096} are lost"
