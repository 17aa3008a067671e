"""The firmware model by its wire format: strict, and never hurt by what it is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_case import Case
from tests.launches import every_kernel
from tests.pnm_host import Host
from tests.pnm_rig import card_of
from tierloop.devices.commands import Launch
from tierloop.devices.drivers.pnm_arguments import KERNELS, pack_launch, pack_segment
from tierloop.devices.drivers.pnm_wire import (
    HELLO_BELL,
    Opcode,
    Place,
    Status,
    checksum,
    pack_drop,
    pack_hello,
)
from tierloop.devices.kernels.contract import Gather, Topk
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.firmware_models.pnm_card import PnmCard

CANARY = bytes(range(1, 65)) * 4


def small_card() -> PnmCard:
    """A card that is quick to make."""
    return card_of(capacity=1 << 16, arena_nbytes=1 << 14, largest_arguments=1 << 13, entries=8, most_spans=100)


def begun(card: PnmCard | None = None) -> Host:
    """A host with a session."""
    host = Host(card or small_card())
    assert host.hello().status == Status.OK
    return host


def launch_bytes(launch: Launch, number: int = 1) -> bytes:
    """A launch all of whose operands lie in one region."""
    return pack_launch(launch, lambda _: number)


def there(nbytes: int) -> Region:
    """A stand-in for a region of the card."""
    return Region("pnm", "pnm", 1, nbytes)


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_nothing_is_answered_before_a_hello() -> None:
    host = Host(small_card())
    host.send(Opcode.REGION_ADD, Place(1, 0, 64).pack())
    assert host.answers() == []
    assert host.card.processor.refused == 1


def test_a_hello_of_no_version_in_common_is_refused() -> None:
    host = Host(small_card())
    host.send(Opcode.HELLO, pack_hello(2, 9))
    (answer,) = host.answers()
    assert answer.status == Status.UNSUPPORTED
    assert host.reason(answer) == "versions 2 to 9; allowed: 1"


def test_a_second_hello_ends_the_first_session_with_its_regions() -> None:
    first = begun()
    first.region(1, 0, CANARY)
    second = Host(first.card, session=2)
    assert second.hello().status == Status.OK
    assert second.ask(Opcode.READ, pack_segment(1, Spans.one(0, 64))).status == Status.BAD_REGION


def test_operations_of_an_earlier_session_are_never_answered() -> None:
    first = begun()
    first.region(1, 0, CANARY)
    first.card.hold()
    first.send(Opcode.OP, launch_bytes(Launch(Gather(), ((there(256).at(0, 64),),), ((there(256).at(64, 64),),))))
    first.card.processor.advance()
    first.card.processor.held = False
    second = Host(first.card, session=2)
    second.hello()
    assert second.answers() == []
    assert second.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack()).answers == 2


def test_operations_of_an_earlier_session_are_not_even_carried_out() -> None:
    first = begun()
    first.region(1, 0, CANARY)
    first.card.stall()
    first.send(Opcode.OP, launch_bytes(Launch(Gather(), ((there(256).at(0, 64),),), ((there(256).at(64, 64),),))))
    assert first.answers() == []
    second = Host(first.card, session=2)
    second.hello()
    assert second.ask(Opcode.REGION_ADD, Place(1, 0, 256).pack()).status == Status.OK
    first.card.release()
    assert second.answers() == []
    assert not any(engine.jobs_done for engine in first.card.dispatcher.engines)


def test_a_command_of_another_session_is_refused() -> None:
    host = begun()
    assert host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack(), session=3).status == Status.NO_SESSION
    assert host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack(), nonce=4).status == Status.NO_SESSION
    assert not host.card.memory.numbers


def test_after_goodbye_there_is_no_session() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    assert host.ask(Opcode.GOODBYE).status == Status.OK
    assert not host.card.memory.numbers
    host.send(Opcode.READ, pack_segment(1, Spans.one(0, 64)))
    assert host.answers() == []


def test_after_a_reset_nothing_is_answered_until_a_hello() -> None:
    host = begun()
    host.card.reset()
    host.send(Opcode.REGION_ADD, Place(1, 0, 64).pack())
    assert host.answers() == []
    assert host.hello().status == Status.OK


# -- entries -----------------------------------------------------------------------------------------------------------


def test_rings_go_round() -> None:
    host = begun()
    for number in range(30):
        assert host.ask(Opcode.REGION_ADD, Place(number, 64 * number, 64).pack()).status == Status.OK
    assert host.card.memory.numbers == frozenset(range(30))


@pytest.mark.parametrize("changes", [{"phase": 0}, {"number": 9}, {"opcode": 77}, {"opcode": Opcode.HELLO}])
def test_an_entry_out_of_order_is_answered_by_its_number_alone(changes: dict[str, int]) -> None:
    host = begun()
    answer = host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack(), **changes)
    assert (answer.status, answer.answers, answer.op_id, answer.opcode) == (Status.BAD_ENTRY, 2, 0, 0)
    assert host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack()).status == Status.OK


def test_a_damaged_entry_is_answered_and_the_next_one_is_carried_out() -> None:
    host = begun()
    frame = bytearray(host.entry(Opcode.REGION_ADD, Place(1, 0, 64).pack()).pack())
    frame[20] ^= 1
    host.send_frame(bytes(frame))
    assert [a.status for a in host.answers()] == [Status.BAD_ENTRY]
    assert host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack()).status == Status.OK


@pytest.mark.parametrize("value", [0, 2, 12, 2**40, 2**63 - 1])
def test_a_doorbell_out_of_range_is_ignored_and_counted(value: int) -> None:
    host = begun()
    host.region(1, 0, CANARY)
    before = host.card.processor.refused
    host.ring(value)
    assert host.answers() == []
    assert host.card.processor.refused == before + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"args_offset": 8},
        {"args_offset": 1 << 14},
        {"args_offset": 2**64 - 64},
        {"args_nbytes": 2**63},
        {"room": 2**32 - 1},
        {"room": 0},
        {"args_check": 1},
    ],
)
def test_arguments_outside_the_arena_or_damaged_are_refused(changes: dict[str, int]) -> None:
    host = begun()
    assert host.ask(Opcode.REGION_ADD, Place(1, 0, 64).pack(), **changes).status == Status.BAD_ARGUMENTS
    assert not host.card.memory.numbers


def test_arguments_beyond_the_limit_of_hello_are_refused() -> None:
    host = begun()
    answer = host.ask(Opcode.ADD, bytes((1 << 13) + 8))
    assert answer.status == Status.TOO_LARGE
    assert "allowed: 8192" in host.reason(answer)


# -- regions and bytes -------------------------------------------------------------------------------------------------


def test_an_interleaved_region_is_refused_by_name() -> None:
    host = begun()
    answer = host.ask(Opcode.REGION_ADD, Place(1, 0, 1024, ways=4, granule=256).pack())
    assert answer.status == Status.INTERLEAVED
    assert host.reason(answer).startswith("region 1 is interleaved over 4 ways in granules of 256 bytes")


@pytest.mark.parametrize(
    ("place", "status"),
    [
        (Place(2, 0, 64), Status.NO_ROOM),
        (Place(2, 192, 128), Status.NO_ROOM),
        (Place(2, 1 << 16, 64), Status.NO_ROOM),
        (Place(2, (1 << 16) - 64, 128), Status.NO_ROOM),
        (Place(1, 1024, 64), Status.BAD_REGION),
        (Place(2, 1000, 64), Status.BAD_REGION),
        (Place(2, 1024, 60), Status.BAD_REGION),
        (Place(2, 1024, 64, ways=0), Status.INTERLEAVED),
    ],
)
def test_a_region_where_it_cannot_be_is_refused(place: Place, status: Status) -> None:
    host = begun()
    host.region(1, 0, CANARY)
    assert host.ask(Opcode.REGION_ADD, place.pack()).status == status
    assert host.card.peek(1, 0, 256) == CANARY


def test_a_region_is_zeroed_when_it_is_added() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    assert host.ask(Opcode.REGION_DROP, pack_drop(1)).status == Status.OK
    assert host.ask(Opcode.REGION_ADD, Place(2, 0, 256).pack()).status == Status.OK
    assert host.card.peek(2, 0, 256) == bytes(256)


def test_bytes_that_were_not_added_are_not_seen_by_the_engines() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    host.put(host.card.layout.memory_offset, b"\xaa" * 64)
    moved = Launch(Gather(), ((there(256).at(0, 64),),), ((there(256).at(64, 64),),))
    assert host.ask(Opcode.OP, launch_bytes(moved)).status == Status.OK
    assert host.card.peek(1, 64, 64) == CANARY[:64]
    assert host.card.stale_nbytes == 64
    assert host.ask(Opcode.ADD, pack_segment(1, Spans.one(0, 64)), checksum(b"\xaa" * 64)).status == Status.OK
    assert host.ask(Opcode.OP, launch_bytes(moved)).status == Status.OK
    assert host.card.peek(1, 64, 64) == b"\xaa" * 64
    assert host.card.stale_nbytes == 64


def test_what_engines_wrote_is_not_in_the_window_before_it_is_shown() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    host.card.poke(1, 0, b"\xbb" * 64)
    window = host.card.layout.memory_offset
    assert host.get(window, 64) == CANARY[:64]
    answer = host.ask(Opcode.READ, pack_segment(1, Spans.one(0, 64)))
    assert (answer.nbytes, answer.payload_check) == (64, checksum(b"\xbb" * 64))
    assert host.get(window, 128) == b"\xbb" * 64 + CANARY[64:128]


def test_bytes_that_arrive_as_others_are_not_taken_in() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    host.put(host.card.layout.memory_offset, b"\xaa" * 64)
    answer = host.ask(Opcode.ADD, pack_segment(1, Spans.one(0, 64)), checksum(b"\xab" * 64))
    assert answer.status == Status.BAD_PAYLOAD
    assert host.card.peek(1, 0, 64) == CANARY[:64]


@pytest.mark.parametrize("opcode", [Opcode.ADD, Opcode.READ])
def test_spans_outside_their_region_are_refused(opcode: Opcode) -> None:
    host = begun()
    host.region(1, 0, CANARY)
    answer = host.ask(opcode, pack_segment(1, Spans([(0, 8), (255, 2)])))
    assert answer.status == Status.OUT_OF_RANGE
    assert "is outside the 256 bytes of region 1" in host.reason(answer)


# -- launches ----------------------------------------------------------------------------------------------------------


def test_a_kernel_or_dtype_that_is_not_offered_is_refused() -> None:
    card = card_of(capacity=1 << 16, kernels=frozenset({"gather", "append"}), dtypes=frozenset({"float16"}))
    host = begun(card)
    host.region(1, 0, CANARY)
    for name, says in (("topk", "kernel topk"), ("append", "dtype bfloat16")):
        answer = host.ask(Opcode.OP, launch_bytes(every_kernel("bfloat16")[name]))
        assert (answer.status, host.reason(answer)) == (Status.UNSUPPORTED, f"{says} is not offered")


def test_too_many_spans_are_refused_with_the_limit() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    answer = host.ask(Opcode.READ, pack_segment(1, Spans([(0, 1)] * 101)))
    assert (answer.status, host.reason(answer)) == (Status.TOO_LARGE, "101 spans; allowed: 100")


def test_a_launch_that_does_not_fit_the_sram_is_refused_with_the_limit() -> None:
    host = begun(card_of(capacity=1 << 16, sram_nbytes=4096))
    host.region(1, 0, CANARY)
    source = there(256)
    big = Launch(Topk(2000, np.zeros(0, dtype=np.int64)), ((source.at(0, 0),),), ((source.at(0, 0),),))
    answer = host.ask(Opcode.OP, launch_bytes(big))
    assert answer.status == Status.TOO_LARGE
    assert host.reason(answer) == "a job takes 16004 bytes; the SRAM of an engine has 4096"


def test_operands_outside_their_region_are_refused_before_anything_is_done() -> None:
    host = begun()
    host.region(1, 0, CANARY)
    for source, target in (
        (there(999).at(250, 20), there(999).at(0, 20)),
        (there(999).at(0, 20), there(999).at(250, 20)),
    ):
        answer = host.ask(Opcode.OP, launch_bytes(Launch(Gather(), ((source,),), ((target,),))))
        assert answer.status == Status.OUT_OF_RANGE
        assert host.reason(answer) == "Spans([250, 270)) is outside the 256 bytes of region 1"
    assert host.card.peek(1, 0, 256) == CANARY
    assert not any(engine.jobs_done for engine in host.card.dispatcher.engines)


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_operands_of_other_sizes_are_refused(kernel: str) -> None:
    host = begun(card_of(capacity=1 << 16))
    host.region(1, 0, CANARY)
    launch = every_kernel()[kernel]
    short = Segment(there(256), Spans.one(0, 4))
    wrong = Launch(launch.args, tuple((short,) for _ in launch.reads), tuple((short,) for _ in launch.writes))
    if kernel in ("gather", "append"):
        wrong = replace(wrong, writes=((there(256).at(0, 8),),))
    assert host.ask(Opcode.OP, launch_bytes(wrong)).status == Status.OUT_OF_RANGE
    none = Launch(launch.args, (), ())
    assert host.ask(Opcode.OP, launch_bytes(none)).status == Status.OUT_OF_RANGE
    assert host.card.peek(1, 0, 256) == CANARY


# -- anything at all ---------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=64, max_size=64), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=60)
def test_frames_of_chance_change_no_region(frames: list[bytes], doorbell: int) -> None:
    host = begun()
    host.region(1, 0, CANARY)
    for frame in frames:
        host.send_frame(frame)
    assert {a.status for a in host.answers()} == {Status.BAD_ENTRY}
    host.ring(doorbell)
    host.answers()
    if not doorbell & HELLO_BELL:
        assert host.card.peek(1, 0, 256) == CANARY


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_commands_of_chance_are_answered_and_change_nothing_of_another_region(data: st.DataObject) -> None:
    """Right frames around arguments that are damaged: none of them names the other region."""
    other = 0x0123_4567_89AB
    host = begun(card_of(capacity=1 << 16, sram_nbytes=8192))
    host.region(1, 0, CANARY * 128)
    host.region(other, 1 << 15, CANARY)
    for _ in range(data.draw(st.integers(1, 4))):
        opcode = data.draw(st.sampled_from([Opcode.OP, Opcode.OP, Opcode.REGION_ADD, Opcode.ADD, Opcode.READ]))
        arguments = bytearray(data.draw(st.sampled_from(_SEEDS[opcode])))
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, max(len(arguments) - 8, 0) // 8)) * 8
            number = data.draw(st.one_of(st.sampled_from(_NASTY), st.integers(-(2**63), 2**63 - 1)))
            arguments[at : at + 8] = number.to_bytes(8, "little", signed=True)
        answer = host.ask(opcode, bytes(arguments), data.draw(st.sampled_from([0, checksum(CANARY * 128)])))
        assert answer.status in list(Status)
        assert answer.status != Status.FAILED, host.reason(answer)
    assert host.card.peek(other, 0, 256) == CANARY
    assert host.ask(Opcode.REGION_DROP, pack_drop(other)).status == Status.OK


_NASTY = [0, 1, -1, 3, 64, 255, 256, 257, 4096, 1 << 31, 1 << 47, (1 << 48) - 1, 1 << 48, (1 << 62) - 1, -(1 << 63)]


def _op_seeds() -> list[bytes]:
    """Launches over region 1 that are right, or nearly: small ones of every kernel."""
    found = []
    case = Case("float32", num_kv_heads=1, group=1, head_dim=4, head_dim_v=4, tokens=3, split_tokens=1)
    rows = case.all_rows()
    place, roots, source = case.layout(rows), case.roots_of(rows), there(256)
    keys = (Segment(source, Spans.one(16, 48)),)
    found.append(
        Launch(case.attend_args(place.runs, roots), ((source.at(0, 16),), keys, keys), ((source.at(128, 24),),))
    )
    found.append(Launch(Gather(), ((source.at(0, 8),),), ((source.at(8, 8),),)))
    found.append(Launch(Topk(1, np.array([3], dtype=np.int64)), ((source.at(0, 12),),), ((source.at(16, 8),),)))
    found += [launch for name, launch in every_kernel().items() if name in KERNELS]
    return [launch_bytes(launch) for launch in found]


_SEEDS = {
    Opcode.REGION_ADD: [Place(9, 1 << 14, 64).pack(), Place(2, 1 << 15, 64).pack(), bytes(32)],
    Opcode.ADD: [pack_segment(1, Spans.one(0, 1 << 15)), pack_segment(1, Spans([(0, 8), (8, 8)])), b""],
    Opcode.READ: [pack_segment(1, Spans.one(0, 1 << 15)), bytes(24), bytes(16)],
    Opcode.OP: _op_seeds(),
}
