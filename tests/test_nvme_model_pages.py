"""Lists of pages, whatever the size of a page: data lies where the lists say, and a list goes on in its last place."""

from __future__ import annotations

import struct
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvme_bus import MIB, READ, WRITE, Bus, Memory, Pair
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin

ROOM = 16 * MIB
MOST_BLOCKS = 1024


def with_pages_of(page: int) -> Bus:
    """A controller whose host has pages of so many bytes, and one pair of queues."""
    bus = Bus(NvmeFigures(command_ns=0, admin_ns=0, mdts=0))
    bus.memory.bytes.extend(bytes(ROOM - len(bus.memory.bytes)))
    bus.pairs = {0: Pair(0, 16, 0x10000, 0x20000)}
    for register, nbytes, value in ((regs.AQA, 4, 0xF000F), (regs.ASQ, 8, 0x10000), (regs.ACQ, 8, 0x20000)):
        bus.controller.write(register, nbytes, value)
    shift = page.bit_length() - 13
    bus.controller.write(regs.CC, 4, regs.ENABLE | 6 << 16 | 4 << 20 | shift << 7)
    bus.settle()
    assert bus.admin(Admin.CREATE_CQ, 0x40000, cdw=(0xF0001, 1 << 16 | 3)).status == 0
    assert bus.admin(Admin.CREATE_SQ, 0x30000, cdw=(0xF0001, 1 << 16 | 1)).status == 0
    bus.pairs[1] = Pair(1, 16, 0x30000, 0x40000)
    return bus


def listed(memory: Memory, pages: list[int], at: int, free: list[int], page: int) -> None:
    """Write a list of pages from `at` on; where a page of it ends before they do, it goes on in a free one."""
    left = list(pages)
    while True:
        room = (page - at % page) // 8
        if len(left) <= room:
            memory.write(at, struct.pack(f"<{len(left)}Q", *left))
            return
        following = free.pop()
        memory.write(at, struct.pack(f"<{room}Q", *left[: room - 1], following))
        left, at = left[room - 1 :], following


@settings(max_examples=60)
@given(
    st.sampled_from([4096, 8192, 65536]),
    st.integers(1, MOST_BLOCKS),
    st.integers(0, 16383),
    st.integers(0, 8191),
    st.integers(0, 1 << 32),
)
def test_bytes_travel_through_any_list_of_pages(page: int, blocks: int, skew: int, place: int, seed: int) -> None:
    bus = with_pages_of(page)
    free = list(range(MIB // page, ROOM // page))
    Random(seed).shuffle(free)
    free = [number * page for number in free]
    nbytes, first = 512 * blocks, skew * 4 % page
    pages = [free.pop() for _ in range(-(-(first + nbytes) // page))]
    prp2 = pages[1] if len(pages) == 2 else 0
    if len(pages) > 2:
        prp2 = free.pop() + place * 8 % page
        listed(bus.memory, pages[1:], prp2, free, page)
    starts = [pages[0] + first, *pages[1:]]
    lengths = [min(page - first, nbytes)]
    while sum(lengths) < nbytes:
        lengths.append(min(page, nbytes - sum(lengths)))
    data = struct.pack(f"<{nbytes // 4}I", *range(nbytes // 4))
    for i, start in enumerate(starts):
        bus.memory.write(start, data[sum(lengths[:i]) :][: lengths[i]])
    assert bus.io(WRITE, 3, blocks, starts[0], prp2).status == 0
    assert bus.controller.peek(1, 3, blocks) == data
    for start, length in zip(starts, lengths, strict=True):
        bus.memory.write(start, bytes(length))
    assert bus.io(READ, 3, blocks, starts[0], prp2).status == 0
    assert b"".join(bus.memory.read(start, length) for start, length in zip(starts, lengths, strict=True)) == data
