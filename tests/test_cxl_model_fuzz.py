"""Anything on the bus of a CXL card: it never fails, and no other byte changes."""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cxl_card_rig import LINE, ask, card, commit, decoding
from tierloop.devices.system import HOST
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.emulators.kernel_cxl_memdev import QUERY, SEND
from tierloop.firmware_models.cxl_card import CxlCard
from tierloop.firmware_models.cxl_codes import Code, Op
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart

MARK = bytes(range(64))
SPOTS = (0, LINE, GRAIN - LINE, GRAIN, 2 * GRAIN - LINE)

opcodes = st.one_of(st.sampled_from([int(op) for op in Op]), st.integers(0, 0xFFFF))
words = st.one_of(st.integers(0, (1 << 32) - 1), st.sampled_from([0, 1, 2, 0x10000000, 0x20000000, 0x1600, 0x1610]))
offsets = st.one_of(
    st.integers(-8, 0x1300),
    st.sampled_from([0x104, 0x108, 0x10C, 0x120, 0x1104, 0x1110, 0x1118, 0x1120, 0x1124, 0x1130, 0x1138, 0x1140]),
)
writes = st.tuples(st.sampled_from(["device", "device8", "component", "time"]), offsets, words)


def marked() -> CxlCard:
    """A card with marks in volatile and in persistent memory."""
    device = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN, partitionable_nbytes=GRAIN, sanitize_ns=1 << 40)
    for spot in SPOTS:
        device.poke(spot, MARK)
    return device


@settings(max_examples=300)
@given(opcodes, st.binary(max_size=200))
def test_any_command_is_answered(opcode: int, payload: bytes) -> None:
    device = marked()
    code, answer = ask(device, opcode, payload)
    assert code in list(Code)
    assert len(answer) <= device.part.payload_nbytes
    known = (Op.SET_PARTITIONS, Op.CLEAR_POISON, Op.SANITIZE)
    if opcode not in known:
        assert [device.peek(spot, LINE) for spot in SPOTS] == [MARK] * len(SPOTS)
    assert ask(device, Op.IDENTIFY)[0] == Code.SUCCESS


@settings(max_examples=200)
@given(st.lists(writes, max_size=40))
def test_any_writes_to_registers_leave_the_card_alive_and_its_bytes_alone(
    given_writes: list[tuple[str, int, int]],
) -> None:
    device, other = marked(), marked()
    for where, offset, word in given_writes:
        if where == "component":
            device.write_component(offset, word)
            device.read_component(offset)
        elif where == "time":
            device.advance(word)
        else:
            width = 8 if where == "device8" else 4
            device.write_device(offset, word, width)
            assert 0 <= device.read_device(offset, width) < 1 << 8 * width
        device.load(0)
        device.load(GRAIN + LINE)
    for decoder in device.state.decoders.committed:
        assert decoder.dpa + decoder.nbytes // decoder.ways <= device.part.capacity
    if not any(command.opcode in (Op.SANITIZE, Op.SET_PARTITIONS) for command in device.history):
        assert [device.peek(spot, LINE) for spot in SPOTS] == [MARK] * len(SPOTS)
    assert [other.peek(spot, LINE) for spot in SPOTS] == [MARK] * len(SPOTS)
    assert other.history == type(other.history)()


@given(
    st.one_of(st.integers(0, 1 << 46), st.integers(GRAIN // LINE, 2 * GRAIN // LINE - 1)).map(lambda line: line * LINE),
    st.integers(0, 63),
    st.binary(min_size=1, max_size=64),
)
def test_a_store_changes_its_bytes_and_no_others(hpa: int, first: int, data: bytes) -> None:
    device = decoding(nbytes=GRAIN)
    data = data[: LINE - first]
    device.store(hpa, data, first)
    inside = GRAIN <= hpa < 2 * GRAIN
    assert os.lseek(device.state.cells.fd, 0, os.SEEK_END) == device.part.capacity
    for near in (-LINE, 0, LINE):
        dpa = hpa - GRAIN + near
        if inside and 0 <= dpa < GRAIN:
            expected = (bytes(first) + data).ljust(LINE, b"\0") if near == 0 else bytes(LINE)
            assert device.peek(dpa, LINE) == expected
    if not inside:
        assert HOST.size(device.state.cells.fd) == device.part.capacity
        assert os.stat(device.state.cells.fd).st_blocks == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15), st.integers(0, 8), st.integers(0, 4)), max_size=12))
def test_committed_decoders_never_overlap(tries: list[tuple[int, int, int, int]]) -> None:
    device = card(volatile_nbytes=4 * GRAIN)
    for number, base, size, skip in tries:
        if number == len(device.state.decoders.committed):
            commit(device, number, base * GRAIN, size * GRAIN, skip * GRAIN)
    ends = [0, 0]
    for decoder in device.state.decoders.committed:
        assert (decoder.base, decoder.dpa) >= (ends[0], ends[1])
        assert decoder.dpa >= ends[1]
        ends = [decoder.base + decoder.nbytes, decoder.dpa + decoder.nbytes]
    assert ends[1] <= 4 * GRAIN


@settings(max_examples=200)
@given(
    st.one_of(st.sampled_from([QUERY, SEND]), st.integers(0, (1 << 32) - 1)),
    st.one_of(
        st.binary(max_size=64),
        st.builds(
            lambda *numbers: struct.pack("<IIIIIIQIIQ", *numbers),
            st.integers(0, 24),
            st.sampled_from([0, 1]),
            st.one_of(st.just(0), st.integers(0, 0x4FFF)),
            st.just(0),
            st.integers(0, 90),
            st.just(0),
            st.sampled_from([0, 8, 1 << 63]),
            st.integers(0, 4096),
            st.just(0),
            st.sampled_from([0, 8, 1 << 63]),
        ),
    ),
)
def test_any_request_to_a_memdev_is_answered_or_an_error(request: int, argument: bytes) -> None:
    kernel = cxl_machine([CxlPart()], mode="memdev", raw="all")
    kernel.cards[0].poke(0, MARK)
    fd = kernel.open("/dev/cxl/mem0", os.O_RDWR)
    with suppress(OSError):
        kernel.ioctl(fd, request, bytearray(argument))
    with suppress(OSError):
        kernel.pread(fd, memoryview(bytearray(8)), 0)
    assert kernel.cards[0].peek(0, LINE) == MARK


lengths = st.one_of(st.integers(-(1 << 30), 1 << 31), st.integers(-1, 260).map(lambda huge: huge * (2 << 20)))


@given(lengths, lengths)
def test_any_mapping_is_within_the_device_or_refused(nbytes: int, offset: int) -> None:
    kernel = cxl_machine()
    fd = kernel.open("/dev/dax0.0", os.O_RDWR)
    fits = nbytes > 0 <= offset and nbytes % (2 << 20) == offset % (2 << 20) == 0 and offset + nbytes <= 2 * GRAIN
    if fits:
        assert len(kernel.mmap(fd, nbytes, offset)) == nbytes
    else:
        with pytest.RaisesExc(OSError, check=lambda error: error.errno == errno.EINVAL):
            kernel.mmap(fd, nbytes, offset)
