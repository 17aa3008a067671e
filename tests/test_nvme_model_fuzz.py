"""The NVMe controller model under random input: nothing crashes it, and what belongs to others stays as it is.

Every command that is fetched gets exactly one completion with fields that fit, apart from event requests.
"""

from __future__ import annotations

import struct
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.nvme_bus import DATA, MIB, Bus
from tierloop.firmware_models import nvme_registers as regs
from tierloop.firmware_models.nvme_features import Feature
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.firmware_models.nvme_wire import Admin, Answer, Entry, Io

FIGURES = NvmeFigures(command_ns=10, admin_ns=10, queue_entries=64, mdts=3)
SECRET = bytes(range(1, 256)) * 2 + b"!!"

addresses = st.one_of(
    st.integers(0x20, (4 * MIB) // 4096).map(lambda page: page * 4096),
    st.integers(DATA, DATA + 0x10000),
    st.integers(4 * MIB - 64, (1 << 64) - 1),
)
"""Anywhere but in the queues, which a host may well tell a controller to overwrite."""
small = st.one_of(st.integers(0, 64), st.integers(0, 0xFFFFFFFF))
words = st.one_of(small, st.integers(0, 31).map(lambda bit: 1 << bit), st.sampled_from([0xFFFF, 0xFFFFFFFF]))
lists = st.lists(addresses, max_size=16).map(lambda places: struct.pack(f"<{len(places)}Q", *places))


@st.composite
def descriptors(draw: st.DrawFn) -> bytes:
    kind = draw(st.one_of(st.integers(0, 3), st.integers(0, 15))) << 4 | draw(st.sampled_from([0, 0, 0, 1]))
    return struct.pack("<QI3xB", draw(addresses), draw(st.sampled_from([0, 16, 512, 1024, 4096, 1 << 31])), kind)


@st.composite
def entries(draw: st.DrawFn, opcodes: type[Admin] | type[Io], nsids: tuple[int, ...]) -> Entry:
    opcode = draw(st.one_of(st.sampled_from(sorted(opcodes)), st.integers(0, 255)))
    flags = draw(st.sampled_from([0, 0, 0, 0, 0x40, 0x80, 0xC0, 1, 4]))
    data = draw(st.one_of(st.tuples(addresses, addresses).map(lambda p: struct.pack("<QQ", *p)), descriptors()))
    cdw = (draw(words), draw(words), draw(words), draw(words), draw(words), draw(words))
    return Entry(opcode, flags, 0, draw(st.sampled_from(nsids)), draw(words), draw(words), draw(addresses), data, cdw)


def guarded() -> Bus:
    """Two namespaces, the second one with bytes that nobody is told to touch."""
    bus = Bus(FIGURES, namespaces=2).enable(entries=32).with_queue(entries=32)
    bus.controller.poke(2, 0, SECRET * 4)
    bus.controller.poke(2, 2044, SECRET * 4)
    return bus


def untouched(bus: Bus) -> bool:
    return bus.controller.peek(2, 0, 4) == SECRET * 4 == bus.controller.peek(2, 2044, 4)


def check(answer: Answer, qid: int) -> None:
    assert answer.reserved == 0
    assert answer.sq_id == qid
    assert answer.sq_head < 32
    assert answer.status >> 8 & 7 in (0, 1, 2)


@given(
    st.lists(st.tuples(entries(Io, (1, 1, 1, 0, 3, 0xFFFFFFFF)), st.booleans()), max_size=25),
    st.lists(lists, max_size=4),
)
def test_random_commands_end_once_and_stay_in_their_namespace(
    script: list[tuple[Entry, bool]], places: list[bytes]
) -> None:
    bus = guarded()
    for i, raw in enumerate(places):
        bus.put(raw, DATA + 4096 * i)
    pushed = []
    for entry, ring in script:
        pushed.append(bus.push(entry, 1))
        if ring:
            bus.ring(1)
    if script and not script[-1][1]:
        bus.ring(1)
    bus.settle()
    assert bus.register(regs.CSTS) == regs.READY
    answers = bus.reap(1)
    assert Counter(answer.cid for answer in answers) == Counter(pushed)
    for answer in answers:
        check(answer, 1)
    assert untouched(bus)


@given(st.lists(entries(Admin, (0, 0, 1, 2, 0xFFFFFFFF)), max_size=25))
def test_random_admin_commands_end_once(script: list[Entry]) -> None:
    bus = guarded()
    listening: set[int] = set()
    pushed = []
    for entry in script:
        safe = struct.pack("<QQ", DATA + entry.prp1 % 0x40000, DATA + 0x80000)
        cid = bus.push(entry._replace(data=safe))
        pushed.append(cid)
        if entry.opcode == Admin.ASYNC_EVENT:
            listening.add(cid)
    if script:
        bus.ring()
    bus.settle()
    counts = Counter(answer.cid for answer in bus.reap())
    assert all(counts[cid] == 1 for cid in pushed if cid not in listening)
    assert max(counts.values(), default=0) <= 1
    assert untouched(bus)


@given(st.binary(min_size=64, max_size=64 * 20), st.integers(0, 1))
def test_random_bytes_in_a_queue_do_not_crash_it(raw: bytes, qid: int) -> None:
    bus = guarded()
    pair = bus.pairs[qid]
    count = len(raw) // 64
    bus.memory.write(pair.sq, (raw[: 64 * count] + bytes(64 * 32))[: 64 * 32])
    bus.doorbell(2 * qid, (pair.tail + count) % 32 or 1)
    bus.settle()


accesses = st.tuples(
    st.one_of(st.sampled_from([0x14, 0x24, 0x28, 0x30, 0x1000, 0x1004, 0x1008, 0x100C]), st.integers(-16, 0x1100)),
    st.sampled_from([4, 4, 4, 8, 1, 2, 3, 0]),
    st.one_of(st.integers(0, 64), st.integers(-1, (1 << 64) - 1), st.sampled_from([0x460001, 0x464001, 0x460801])),
)


@given(st.lists(st.tuples(accesses, st.integers(0, 2_000_000)), max_size=40))
def test_random_register_accesses_do_not_crash_it(script: list[tuple[tuple[int, int, int], int]]) -> None:
    bus = guarded()
    for (offset, nbytes, value), wait in script:
        bus.controller.write(offset, nbytes, value)
        assert 0 <= bus.controller.read(offset, nbytes) < 1 << 8 * max(nbytes, 1)
        bus.controller.advance(bus.controller.now_ns + wait)
    assert untouched(bus)
    bus.controller.write(regs.CC, 4, 0)
    bus.enable()
    assert bus.admin(Admin.GET_FEATURES, cdw=[Feature.ARBITRATION]).status == 0
