"""Answers that are wrong, late, or missing: each fault has its error, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.pnm_rig import LAUNCHES, TRANSFERS, Rig, card_of
from tierloop.devices.commands import Command, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.drivers.pnm_wire import ENTRY_NBYTES, HELLO_BELL, Answer, Opcode, WireError, checksum, slot_of
from tierloop.devices.errors import Cancelled, DeviceError, Gone, MediaError, OutOfMemory, ProtocolError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Region
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait
from tierloop.firmware_models.pnm_card import Bus
from tierloop.firmware_models.pnm_processor import Fault

DATA = np.arange(256, dtype=np.uint8)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def commands(one: Region) -> dict[Opcode, Command]:
    """A command for each op code that the driver sends on a queue."""
    return {
        Opcode.ADD: Write(one.all(), DATA),
        Opcode.READ: Read(one.all(), np.zeros(256, dtype=np.uint8)),
        Opcode.OP: Launch(Gather(), ((one.at(0, 128),),), ((one.at(128, 128),),)),
    }


OPCODES = [Opcode.ADD, Opcode.READ, Opcode.OP]


@pytest.mark.parametrize("fault", ["truncate", "lengthen"])
@pytest.mark.parametrize("opcode", OPCODES)
def test_an_answer_of_another_length_fails_its_command_alone(rig: Rig, opcode: Opcode, fault: Fault) -> None:
    one = rig.region(DATA)
    rig.card.fail(fault, opcode)
    wrong = rig.submit(commands(one)[opcode])
    (error,) = rig.error_of(wrong)
    assert isinstance(error, ProtocolError)
    assert "expected:" in str(error)
    rig.run(commands(one)[opcode])


@pytest.mark.parametrize("call", ["alloc", "free"])
def test_a_region_whose_answer_was_odd_leaves_its_place_to_others(call: str) -> None:
    rig = Rig(card_of(capacity=4096))
    one = rig.device.alloc(1024)
    rig.card.fail("lengthen", Opcode.REGION_ADD if call == "alloc" else Opcode.REGION_DROP)
    with pytest.raises(ProtocolError, match=f"{call}: the answer is about 1 bytes; expected: 0"):
        rig.device.alloc(3072) if call == "alloc" else rig.device.free(one)
    if call == "alloc":
        rig.device.free(one)
    whole = rig.device.alloc(4096)
    assert rig.read(whole).tobytes() == bytes(4096)
    assert rig.card.memory.numbers == {whole.id}
    rig.close()


def test_a_place_that_the_device_may_still_have_is_not_given_to_another_region() -> None:
    rig = Rig(card_of(capacity=4096))
    one = rig.device.alloc(1024)
    for _ in range(2):
        rig.card.fail("lengthen", Opcode.REGION_DROP)
    with pytest.raises(ProtocolError):
        rig.device.free(one)
    with pytest.raises(OutOfMemory):
        rig.device.alloc(4096)
    other = rig.device.alloc(3072)
    assert rig.read(other).nbytes == 3072
    rig.close()


def test_bytes_that_are_not_those_that_were_shown_fail_the_read_alone(rig: Rig) -> None:
    one = rig.region(DATA)
    rig.card.fail("garble", Opcode.READ)
    (error,) = rig.error_of(rig.submit(commands(one)[Opcode.READ]))
    assert isinstance(error, ProtocolError)
    assert "checksum" in str(error)
    assert rig.read(one).tobytes() == DATA.tobytes()


@pytest.mark.parametrize(("fault", "says"), [("corrupt", "is damaged"), ("misdirect", "names operation")])
@pytest.mark.parametrize("opcode", OPCODES)
def test_an_answer_that_belongs_to_nobody_breaks_the_session(rig: Rig, opcode: Opcode, fault: Fault, says: str) -> None:
    one = rig.region(DATA)
    device = rig.device
    rig.card.fail(fault, opcode)
    (error,) = rig.error_of(rig.submit(commands(one)[opcode]))
    assert isinstance(error, ProtocolError)
    assert says in str(error)
    with pytest.raises(Gone, match=says):
        device.alloc(64)
    with pytest.raises(Gone, match=says):
        rig.submit(commands(one)[opcode])
    assert rig.open().alloc(64).nbytes == 64


def test_a_broken_session_fails_everything_that_is_in_flight(rig: Rig) -> None:
    one, other = rig.region(DATA), rig.region(DATA)
    rig.card.fail("corrupt")
    under_way = [rig.submit(commands(one)[Opcode.READ]), rig.submit(commands(other)[Opcode.OP])]
    for error in rig.error_of(*under_way):
        assert isinstance(error, ProtocolError)
        assert "is damaged" in str(error)


@pytest.mark.parametrize("opcode", OPCODES)
def test_an_answer_that_is_repeated_is_not_taken_for_the_next_one(rig: Rig, opcode: Opcode) -> None:
    one = rig.region(DATA)
    rig.card.fail("repeat", opcode)
    rig.run(commands(one)[opcode])
    into = np.zeros(256, dtype=np.uint8)
    (error,) = rig.error_of(rig.submit(Read(one.all(), into)))
    assert isinstance(error, ProtocolError)
    assert "which is not open; open: 5" in str(error)
    assert not into.any()


@pytest.mark.parametrize("opcode", OPCODES)
def test_an_answer_that_never_comes_makes_the_device_gone(rig: Rig, opcode: Opcode) -> None:
    one = rig.region(DATA)
    device, begun_ns = rig.device, rig.site.clock.now()
    rig.card.fail("lose", opcode)
    late = rig.submit(commands(one)[opcode])
    behind = device.submit(commands(one)[opcode], late.queue, [late])
    errors = rig.error_of(late, behind)
    assert isinstance(errors[0], Gone)
    assert "no answer" in str(errors[0])
    assert isinstance(errors[1], Cancelled)
    assert rig.site.clock.now() - begun_ns < 60_000_000
    with pytest.raises(Gone, match="within 50 ms"):
        device.alloc(64)
    device.close()


def test_an_answer_that_comes_late_but_in_time_is_taken(rig: Rig) -> None:
    one, other = rig.region(DATA), rig.region(DATA)
    rig.card.fail("delay", Opcode.READ)
    late = rig.submit(commands(one)[Opcode.READ])
    meanwhile = rig.run(commands(other)[Opcode.OP])
    assert meanwhile.done
    assert not late.done
    rig.card.release()
    wait(rig.site.clock, late)


@pytest.mark.parametrize("call", ["alloc", "free", "close"])
def test_calls_that_wait_have_a_deadline(rig: Rig, call: str) -> None:
    one = rig.region(DATA)
    rig.card.fail("lose")
    begun_ns = rig.site.clock.now()
    with pytest.raises(Gone, match="within 50 ms"):
        {"alloc": lambda: rig.device.alloc(64), "free": lambda: rig.device.free(one), "close": rig.device.close}[call]()
    assert rig.site.clock.now() - begun_ns < 60_000_000


def test_a_device_that_does_not_answer_a_hello_is_not_opened() -> None:
    rig = Rig()
    rig.card.fail("lose")
    with pytest.raises(Gone, match="no answer to open within 50 ms"):
        rig.open()
    rig.card.fail("truncate")
    with pytest.raises(ProtocolError):
        rig.open()
    rig.open()
    rig.close()


def test_lost_bytes_are_a_media_error_for_whoever_reads_them_until_they_are_written(rig: Rig) -> None:
    one, other = rig.region(DATA), rig.region(DATA)
    rig.card.poison(one.id, 100, 8)
    reading = rig.submit(Read(one.at(96, 8), np.zeros(8, dtype=np.uint8)))
    launch = rig.submit(Launch(Gather(), ((one.at(0, 128),),), ((other.at(0, 128),),)))
    for error in rig.error_of(reading, launch):
        assert isinstance(error, MediaError)
        assert "cannot be read" in str(error)
    assert rig.read(other).tolist() == list(DATA), "a launch that read lost bytes has written something"
    into = np.zeros(100, dtype=np.uint8)
    rig.run(Read(one.at(0, 100), into))
    assert into.tolist() == list(DATA[:100])
    rig.run(Write(one.at(100, 8), DATA[:8]))
    assert rig.read(one).tolist() == [*DATA[:100], *DATA[:8], *DATA[108:]]


def test_a_hello_that_is_found_by_an_old_doorbell_begins_one_session() -> None:
    rig = Rig()
    device = rig.open()
    region = rig.region(DATA)
    rig.card.processor.ring(HELLO_BELL | 1)  # firmware that starts beside a doorbell reads slot 0 twice
    assert rig.read(region).tolist() == list(DATA)
    assert device.info
    rig.close()


@pytest.mark.parametrize("opcode", OPCODES)
def test_a_card_that_leaves_the_bus_is_gone_at_once(rig: Rig, opcode: Opcode) -> None:
    one = rig.region(DATA)
    command = commands(one)[opcode]
    under_way = rig.submit(command)
    rig.card.lose()
    begun_ns = rig.site.clock.now()
    (error,) = rig.error_of(under_way)
    assert isinstance(error, Gone)
    assert "left the bus" in str(error)
    assert rig.site.clock.now() - begun_ns < 1_000_000
    with pytest.raises(Gone, match="left the bus"):
        rig.open()


def test_the_buffer_of_a_read_that_failed_is_the_hosts_again(rig: Rig) -> None:
    one = rig.region(DATA)
    into = np.zeros(256, dtype=np.uint8)
    rig.card.fail("delay", Opcode.READ)
    late = rig.submit(Read(one.all(), into))
    rig.device.poll()
    rig.error_of(late)
    into[:] = 0x5A
    rig.card.release()
    for _ in range(5):
        rig.device.poll()
    assert (into == 0x5A).all()


def test_a_failure_cancels_what_comes_after_it_on_other_queues(rig: Rig) -> None:
    one = rig.region(DATA)
    rig.card.fail("truncate", Opcode.ADD)
    first = rig.submit(Write(one.all(), DATA))
    then = rig.submit(Launch(Gather(), ((one.at(0, 8),),), ((one.at(8, 8),),)), after=[first])
    errors = rig.error_of(first, then)
    assert isinstance(errors[0], ProtocolError)
    assert isinstance(errors[1], Cancelled)
    assert errors[1].__cause__ is errors[0]


@pytest.mark.parametrize(
    ("changes", "says", "is_lost"),
    [
        ({"number": 5}, "answer 4 was expected, and answer 5 came", True),
        ({"answers": 9}, "answer 4 is to command 9, which is not open; open: 4", True),
        ({"op_id": 9}, "names operation 9 with op code 4; expected: 5 with 4", True),
        ({"opcode": 5}, "names operation 5 with op code 5; expected: 5 with 4", True),
        ({"nbytes": 255}, "the answer is about 255 bytes; expected: 256", False),
        ({"payload_check": 1}, "the answer's payload has the checksum 0x00000001; expected: ", False),
        ({"status": 4, "nbytes": 257}, "the answer has 257 bytes; at most 256 have room", False),
        ({"status": 4, "nbytes": 5}, "the answer's 5 bytes have another checksum than it says", False),
        ({"status": 99, "nbytes": 0, "payload_check": 0}, r"refused it \(status 99\): it gave no reason", False),
    ],
)
def test_every_field_of_an_answer_is_judged(rig: Rig, changes: dict[str, int], says: str, is_lost: bool) -> None:
    one = rig.region(DATA)
    device = rig.device
    rig.card.hold()
    completion = rig.submit(Write(one.all(), DATA))
    device.poll()
    right = Answer(Opcode.ADD, 1, 1, 0, 4, 5, 4, 256, checksum(DATA.tobytes()), 77, 0)
    rig.card.processor.post(replace(right, **changes).pack())
    device.poll()
    assert completion.done
    (error,) = rig.error_of(completion)
    assert isinstance(error, ProtocolError)
    assert re.search(says, str(error)), error
    if is_lost:
        with pytest.raises(Gone):
            device.alloc(64)
    with suppress(Gone):  # the ring of a device that forged an answer is one ahead
        device.close()


def test_an_answer_that_is_half_there_is_looked_at_again(rig: Rig) -> None:
    one = rig.region(DATA)
    rig.card.hold()
    completion = rig.submit(Write(one.all(), DATA))
    rig.device.poll()
    right = Answer(Opcode.ADD, 1, 1, 0, 4, 5, 4, 256, checksum(DATA.tobytes()), 77, 0).pack()
    for length in range(8, 56, 8):  # the last 8 bytes are 0 anyway
        rig.card.processor.post(right[:length] + bytes(ENTRY_NBYTES - length))
        rig.device.poll()
        assert not completion.done
    rig.card.release()
    wait(rig.site.clock, completion)


def test_the_answer_whose_fields_are_changed_is_taken_as_it_is(rig: Rig) -> None:
    one = rig.region(DATA)
    rig.card.hold()
    completion = rig.submit(Write(one.all(), DATA))
    rig.device.poll()
    rig.card.processor.post(Answer(Opcode.ADD, 1, 1, 0, 4, 5, 4, 256, checksum(DATA.tobytes()), 77, 0).pack())
    rig.device.poll()
    assert completion.result().done
    with suppress(Gone):
        rig.device.close()


class Flaky(Bus):
    """A bus that damages a byte of what is next written to one part of the window."""

    where: tuple[int, int] = (0, 0)

    def write(self, spans: Spans, data: NDArray[np.uint8]) -> None:
        start, end = self.where
        offset = int(spans.array[0, 0])
        if start <= offset < end and data.nbytes:
            self.where = (0, 0)
            data = data.copy()
            data[min(20, data.nbytes - 1)] ^= 0x40
        super().write(spans, data)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("submission", r"the device refused it \(BAD_ENTRY\): it gave no reason"),
        ("arena", r"the device refused it \(BAD_ARGUMENTS\): the arguments have the checksum"),
        ("memory", r"the device refused it \(BAD_PAYLOAD\): the 256 bytes have the checksum"),
    ],
)
def test_what_arrives_damaged_at_the_device_fails_its_command_alone(rig: Rig, part: str, says: str) -> None:
    bus = Flaky(rig.card)
    device = open_pnm("pnm1", rig.site, {"deadline_ms": 50}, window=bus)
    rig.opened.append(device)
    one = rig.region(DATA)
    start = getattr(rig.card.layout, f"{part}_offset")
    bus.where = (start, start + 2048)
    (error,) = rig.error_of(rig.submit(Write(one.all(), DATA[::-1].copy())))
    assert isinstance(error, ProtocolError)
    assert re.search(says, str(error)), error
    assert rig.read(one).tobytes() == DATA.tobytes()


def test_a_follower_that_raises_leaves_the_other_commands_polled(rig: Rig) -> None:
    one, other = rig.region(DATA), rig.region(DATA)
    first, second = rig.submit(commands(one)[Opcode.ADD]), rig.submit(commands(other)[Opcode.OP])

    def fail(_: Completion) -> None:
        raise LookupError("a mistake of the caller")

    first.on_done(fail)
    with pytest.raises(LookupError):
        wait(rig.site.clock, [first, second])
    wait(rig.site.clock, [first, second])


@given(st.lists(st.tuples(st.sampled_from(OPCODES), st.sampled_from(get_args(Fault))), max_size=4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_whatever_goes_wrong_every_command_ends_and_none_ends_well_with_wrong_bytes(
    faults: list[tuple[Opcode, Fault]], seed: int
) -> None:
    rig = Rig(card_of(engines=2, entries=4), options={"deadline_ms": 5})
    rig.card.shuffle(seed)
    regions = [rig.region(DATA + i) for i in range(3)]
    targets = [rig.device.alloc(256) for _ in range(3)]
    for opcode, fault in faults:
        rig.card.fail(fault, opcode)
    buffers = [np.zeros(256, dtype=np.uint8) for _ in range(3)]
    reads, copies = [], []
    try:
        for i in range(3):
            copies.append(
                rig.submit(Launch(Gather(), ((regions[i].all(),),), ((targets[i].all(),),)), LAUNCHES + i % 2)
            )
            reads.append(rig.submit(Read(targets[i].all(), buffers[i]), TRANSFERS + i % 2, after=[copies[-1]]))
    except Gone:
        assert faults
    clock = rig.site.clock
    assert clock.run_until(lambda: all(c.done for c in (*copies, *reads)), clock.now() + 10**10), "a command hangs"
    for i, (copied, read) in enumerate(zip(copies, reads, strict=False)):
        if read.error is None:
            assert copied.error is None
            assert buffers[i].tobytes() == (DATA + i).tobytes()
    for completion in (*copies, *reads):
        try:
            completion.result()
        except DeviceError:
            assert faults
    try:
        rig.close()
    except DeviceError:
        assert faults


@given(st.lists(st.binary(min_size=64, max_size=64), min_size=1, max_size=4), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_frames_of_chance_in_the_completion_ring_are_never_answers(
    frames: list[bytes], sealed: bool, data: st.DataObject
) -> None:
    rig = Rig(options={"deadline_ms": 2})
    one = rig.region(DATA)
    into = np.zeros(256, dtype=np.uint8)
    device = rig.device
    rig.card.hold()
    completion = rig.submit(Read(one.all(), into))
    device.poll()
    layout = rig.card.layout
    for frame in frames:
        number = len(rig.card.processor.posted) + 1
        if sealed:  # right in everything but one field
            _, phase = slot_of(number, layout.completion_entries)
            right = Answer(Opcode.READ, phase, 1, 0, number, 1 + number, number, 256, 0, 77, 0)
            name = data.draw(st.sampled_from(["session", "nonce", "number", "op_id", "answers", "opcode", "nbytes"]))
            wrong = replace(right, **{name: data.draw(st.integers(0, 2**16 - 1))})
            if wrong == right:
                continue
            frame = wrong.pack()
        slot, _ = slot_of(number, layout.completion_entries)
        start = layout.completion_offset + slot * ENTRY_NBYTES
        rig.card.window[start : start + ENTRY_NBYTES] = np.frombuffer(frame, dtype=np.uint8)
        for _ in range(12):
            device.poll()
        assert not completion.done or completion.error is not None
        if completion.done:
            break
    rig.card.release()
    clock = rig.site.clock
    assert clock.run_until(lambda: completion.done, clock.now() + 10**10)
    if completion.error is None:
        assert into.tobytes() == DATA.tobytes()
        completion.result()
    else:
        assert isinstance(rig.error_of(completion)[0], (ProtocolError, Gone))
    with suppress(Gone):  # the ring of a device that forged an answer is one ahead
        rig.close()


def test_a_damaged_frame_is_no_answer_of_another_kind() -> None:
    with pytest.raises(WireError):
        Answer.unpack(bytes(ENTRY_NBYTES - 1) + b"\1")
