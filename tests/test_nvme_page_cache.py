"""What the page cache serves of buffered reads is counted, byte for byte, where the kernel says so."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_system import FakeSystem
from tests.nvme_rig import host_memory, on_fake, on_file
from tests.seeded import bytes_of
from tierloop.devices.commands import Copy, Read
from tierloop.devices.drivers.page_cache import PAGE, PageCache
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans

NUM_PAGES = 6


@given(
    gone=st.sets(st.integers(0, NUM_PAGES - 1)),
    cuts=st.lists(st.integers(0, NUM_PAGES * PAGE), min_size=2, max_size=6, unique=True).map(sorted),
)
def test_bytes_of_pages_that_are_there_are_counted(gone: set[int], cuts: list[int]) -> None:
    """Also where pieces end within pages, as they do on hosts whose pages are larger than the medium's grid."""
    system = FakeSystem()
    system.add("/medium", "file", bytes(NUM_PAGES * PAGE))
    fd = system.open("/medium", os.O_RDWR)
    system.pread(fd, memoryview(bytearray(NUM_PAGES * PAGE)), 0)
    system.drop_caches("/medium", gone)
    pieces = [(begin, 0, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    there = np.array([page not in gone for page in range(NUM_PAGES)]).repeat(PAGE)
    asked = np.concatenate([there[offset : offset + nbytes] for offset, _, nbytes in pieces])
    assert PageCache(system, fd).of(np.array(pieces, dtype=np.int64)) == asked.sum()


@pytest.mark.parametrize("io", ["io_uring", "posix"])
def test_a_read_counts_what_lay_there_before_it(io: str) -> None:
    rig = on_fake(FakeSystem(direct=False), io=io)
    region = rig.device.alloc(NUM_PAGES * PAGE)
    rig.write(region.all(), bytes_of(1, NUM_PAGES * PAGE))
    first = rig.device.offset_of(region) // PAGE
    rig.fake.drop_caches(rig.path, [first + 1, first + 2])
    several = Segment(region, Spans([(0, PAGE), (PAGE, 2 * PAGE), (5 * PAGE, PAGE)]))
    done = rig.run(Read(several, np.empty(4 * PAGE, dtype=np.uint8)))
    assert (done.media_nbytes, done.cached_nbytes) == (4 * PAGE, 2 * PAGE)
    rig.run(Read(several, np.empty(4 * PAGE, dtype=np.uint8)))
    assert rig.device.counts.cached_nbytes == 6 * PAGE
    rig.close()


@pytest.mark.parametrize("io", ["io_uring", "posix"])
def test_a_copy_to_host_memory_counts_as_well(io: str) -> None:
    rig = on_fake(FakeSystem(direct=False), io=io, reaches=["dram"])
    region, host = rig.device.alloc(4 * PAGE), host_memory(4 * PAGE)
    rig.write(region.all(), bytes_of(2, 4 * PAGE))
    rig.fake.drop_caches(rig.path, [rig.device.offset_of(region) // PAGE])
    rig.run(Copy(region.all(), host.all()))
    assert rig.device.counts.cached_nbytes == 3 * PAGE
    rig.run(Copy(region.at(0, 2 * PAGE), region.at(2 * PAGE, 2 * PAGE)))  # through a window of host memory
    assert rig.device.counts.cached_nbytes == 5 * PAGE
    rig.close()


def test_writes_and_direct_reads_count_nothing() -> None:
    buffered, direct = on_fake(FakeSystem(direct=False)), on_fake()
    for rig in (buffered, direct):
        region = rig.device.alloc(PAGE)
        rig.write(region.all(), bytes_of(3, PAGE))
        rig.write(region.all(), bytes_of(4, PAGE))
    direct.read(region.all())
    assert buffered.device.counts.cached_nbytes == direct.device.counts.cached_nbytes == 0
    buffered.close()
    direct.close()


def test_a_kernel_that_does_not_say_is_named_as_the_reason() -> None:
    rig = on_fake(FakeSystem(direct=False, cachestat=False))
    region = rig.device.alloc(PAGE)
    rig.write(region.all(), bytes_of(5, PAGE))
    rig.read(region.all())
    assert rig.device.counts.cached_nbytes == 0
    assert rig.device.info.notes["cache"].endswith("how many of their bytes were is not known")
    assert "cachestat: Function not implemented; Linux has it from 6.5 on" in rig.device.info.notes["why"]
    rig.close()


def test_what_was_just_written_to_a_real_file_is_read_from_the_cache(tmp_path: Path) -> None:
    rig = on_file(tmp_path, direct=False)
    if "not known" in rig.device.info.notes["cache"]:
        pytest.skip(rig.device.info.notes["why"])
    region = rig.device.alloc(16 * PAGE)
    rig.write(region.all(), bytes_of(6, 16 * PAGE))
    rig.read(region.at(PAGE, 9 * PAGE))
    assert rig.device.counts.cached_nbytes == 9 * PAGE
    rig.close()
