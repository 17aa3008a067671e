"""The cxl driver on a file in place of CXL memory: whose it is, what is found again, and what a flush keeps."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cxl_rig import MIB, PAGE, a_site, both, devdax, file_of, opened, pair, pair_with_file
from tierloop.devices.commands import Flush, Launch
from tierloop.devices.drivers import cache_lines
from tierloop.devices.errors import Busy, Gone, MediaError, OutOfRange
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.persistent import keeper
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.devices.system import HOST, HostSystem
from tierloop.devices.waiting import wait, write_bytes

site = a_site
file_pair = pair_with_file


def test_a_file_is_never_called_cxl_memory(file_pair: Platform) -> None:  # D2: a file
    info = file_pair.device("cxl0").info
    assert (info.kind, info.provenance, info.model) == ("cxl", "real", "a file in place of CXL memory")
    assert info.notes["mode"] == "file"
    assert "a file stands in place of CXL memory" in info.notes["why"]
    assert info.executors == ()


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    path = str(file_of(tmp_path))
    first = opened({"path": path})
    with pytest.raises(Busy, match="belongs to another owner"):
        opened({"path": path})
    first.close()
    opened({"path": path}).close()


def test_bytes_of_a_file_are_found_again(site: Site, tmp_path: Path) -> None:
    path = str(file_of(tmp_path))
    platform = pair(site, {"path": path})
    cpu, memory = both(platform)
    keeping = keeper(memory)
    assert keeping is not None
    assert memory.info.memories[0].persistent
    memory.alloc(PAGE)
    region = memory.alloc(2 * PAGE)
    write_bytes(site.clock, cpu, region.all(), np.full(2 * PAGE, 9, dtype=np.uint8))
    wait(site.clock, cpu.submit(Flush(region.all())))
    offset = keeping.offset_of(region)
    platform.close()
    again = opened({"path": path})
    found = again.adopt(offset, 2 * PAGE)
    assert found.view is not None
    assert (found.view == 9).all()
    with pytest.raises(Busy, match="belongs to another region"):
        again.adopt(offset, PAGE)
    again.free(found)
    again.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-PAGE, PAGE), (1, PAGE), (0, 0), (8 * MIB, 1), (0, 8 * MIB + 1)])
def test_only_what_was_there_is_adopted(tmp_path: Path, offset: int, nbytes: int) -> None:
    memory = opened({"path": str(file_of(tmp_path))})
    with pytest.raises(OutOfRange, match=r"cxl0: adopt: \["):
        memory.adopt(offset, nbytes)
    memory.close()


def test_what_is_lost_is_not_adopted(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    memory = opened({"path": str(path)})
    region = memory.adopt(0, 2 * PAGE)
    os.truncate(path, PAGE)
    assert region.view is not None
    assert region.view[PAGE] == 0
    memory.free(region)
    with pytest.raises(MediaError, match="has lost bytes"):
        memory.adopt(0, 2 * PAGE)
    assert memory.adopt(0, PAGE).view is not None
    memory.close()


class Synced(HostSystem):
    """This host, and how often a file was made durable."""

    count = 0

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.count += 1


def test_a_flush_of_a_file_is_carried_out_by_the_cores(site: Site, tmp_path: Path) -> None:
    system = Synced()
    platform = pair(site, {"path": str(file_of(tmp_path))}, system)
    cpu, memory = both(platform)
    wait(site.clock, cpu.submit(Flush(memory.alloc(PAGE).all())))
    assert system.count == 1
    wait(site.clock, cpu.submit(Flush(cpu.alloc(PAGE).all())))
    assert system.count == 1
    platform.close()


def _wait(go_on: threading.Event) -> None:
    assert go_on.wait(30)


@pytest.mark.parametrize("form", ["file", "devdax"])
def test_a_flush_that_comes_after_the_close_made_nothing_durable_and_says_so(
    site: Site, tmp_path: Path, form: str
) -> None:
    options, system = ({"path": "/dev/dax1.0"}, devdax("pmem", "dax1.0")[0]) if form == "devdax" else ({}, HOST)
    platform = pair(site, options or {"path": str(file_of(tmp_path))}, system)
    cpu, memory = both(platform)
    if not memory.info.memories[0].persistent:
        pytest.skip(memory.info.notes["why"])
    region, go_on = memory.alloc(PAGE), threading.Event()
    held = cpu.submit(Launch(Dense("held", 0, 0, 0, lambda reads, writes: _wait(go_on)), (), ()))
    flushed = cpu.submit(Flush(region.all()))
    memory.close()
    go_on.set()
    wait(site.clock, held)
    with pytest.raises(Gone, match="was closed before its bytes were made durable"):
        wait(site.clock, flushed)
    cpu.close()


def test_a_memory_that_keeps_nothing_is_flushed_after_one_of_its_name_that_did(site: Site, tmp_path: Path) -> None:
    kept = pair(site, {"path": str(file_of(tmp_path))})
    kept.close()
    platform = pair(site, {"path": "/dev/dax0.0"}, devdax()[0])
    cpu, memory = both(platform)
    wait(site.clock, cpu.submit(Flush(memory.alloc(PAGE).all())))
    platform.close()


@pytest.mark.parametrize("instruction", ["clflush", cache_lines.instruction()])
def test_lines_that_are_written_back_keep_their_bytes(instruction: str | None) -> None:
    if instruction is None or cache_lines.instruction() is None:
        pytest.skip("no instruction that writes cache lines back is known on this processor")
    array = np.arange(1000, dtype=np.uint8)
    spans = np.array([[3, 0], [60, 900], [999, 1]], dtype=np.int64)
    cache_lines.loop(instruction)(array.ctypes.data, spans)
    assert (array == np.arange(1000, dtype=np.uint8)).all()
