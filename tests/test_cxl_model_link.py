"""The link of a CXL card: credits, flits and load. Rates are worked out here from the bytes on the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierloop.firmware_models.cxl_link import Carried, CxlLink, DevLoad
from tierloop.firmware_models.cxl_part import CxlLinkPart

LINE = 64
WIDE = CxlLinkPart(bytes_per_s=64_000_000_000, channels=16, channel_ns=4, request_credits=256, data_credits=256)


def stream(part: CxlLinkPart, lines: int, write: bool = False, every_ns: int = 0) -> list[Carried]:
    """Lines at a steady pace (all at once without one), one after the other in address."""
    link = CxlLink(part)
    return [link.carry(i * every_ns, LINE * i, write) for i in range(lines)]


def bytes_per_s(carried: list[Carried]) -> float:
    """The rate of the second half of a stream: the first fills the queues."""
    half = carried[len(carried) // 2 :]
    return LINE * (len(half) - 1) * 1e12 / (half[-1].done_ps - half[0].done_ps)


def latency_ps(carried: list[Carried], pace_ns: int) -> float:
    """The mean time from a line's asking to its answer, of the second half."""
    half = range(len(carried) // 2, len(carried))
    return sum(carried[i].done_ps - 1000 * i * pace_ns for i in half) / len(half)


# -- legality


def test_one_line_on_an_idle_card_takes_wire_flight_and_medium() -> None:
    part = CxlLinkPart(bytes_per_s=17_000_000_000, flight_ns=10, media_ns=80)
    (read,), (write,) = stream(part, 1), stream(part, 1, write=True)
    slot_ps = 68 / 4 / 17e9 * 1e12  # a slot of a 68-byte flit
    assert read.done_ps == 1000 * (10 + 80 + 10) + slot_ps * (1 + 5)
    assert write.done_ps == 1000 * (10 + 80 + 10) + slot_ps * (5 + 0.5)
    assert read.load == DevLoad.LIGHT


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 1 << 20), st.booleans()), min_size=1, max_size=60),
)
def test_no_more_lines_are_under_way_than_credits_allow(
    requests: int, data: int, asked: list[tuple[int, int, bool]]
) -> None:
    link = CxlLink(replace(CxlLinkPart(), request_credits=requests, data_credits=data))
    at, carried = 0, []
    for wait, line, write in asked:
        at += wait
        carried.append((write, at, link.carry(at, line * LINE, write)))
    for write, credits in ((False, requests), (True, data)):
        ways = [way for kind, _, way in carried if kind is write]
        for way in ways:
            assert sum(other.left_ps <= way.left_ps < other.done_ps for other in ways) <= credits
    for write, at, way in carried:
        assert way.left_ps >= 1000 * at
        assert way.done_ps - way.left_ps >= link.part.idle_ps(write)


def test_lines_come_in_the_order_of_their_times() -> None:
    link = CxlLink(CxlLinkPart())
    link.carry(10, 0, False)
    with pytest.raises(ValueError, match="in order"):
        link.carry(9, 0, False)
    link.reset()
    assert link.carry(0, 0, False).left_ps == 0


@pytest.mark.parametrize(
    "wrong", [{"flit_nbytes": 64}, {"channels": 0}, {"light": 5, "moderate": 5}, {"severe": 9}, {"bytes_per_s": -1}]
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"flits|at least 1|eighths"):
        CxlLinkPart(**wrong)


# -- curves


@pytest.mark.parametrize(("flit", "slots"), [(68, 4), (256, 15)])
def test_a_wide_card_is_bound_by_its_wire(flit: int, slots: int) -> None:
    part = replace(WIDE, flit_nbytes=flit, bytes_per_s=32_000_000_000)
    expected = 32e9 * LINE / (5 * flit / slots)
    assert bytes_per_s(stream(part, 2000)) == pytest.approx(expected, rel=0.002)
    assert bytes_per_s(stream(part, 2000, write=True)) == pytest.approx(expected, rel=0.002)


def test_few_credits_bind_by_latency() -> None:
    part = replace(WIDE, request_credits=8)
    assert bytes_per_s(stream(part, 2000)) == pytest.approx(8 * LINE * 1e12 / part.idle_ps(False), rel=0.02)
    assert bytes_per_s(stream(replace(part, request_credits=16), 2000)) == pytest.approx(
        16 * LINE * 1e12 / part.idle_ps(False), rel=0.02
    )


def test_a_slow_medium_binds_by_its_channels() -> None:
    part = replace(WIDE, channels=2, channel_ns=10)
    assert bytes_per_s(stream(part, 2000)) == pytest.approx(2 * LINE / 10e-9, rel=0.01)


def test_one_channel_of_many_is_no_faster_than_one() -> None:
    link = CxlLink(replace(WIDE, channels=4, channel_ns=10))
    carried = [link.carry(0, 1024 * i, False) for i in range(2000)]
    assert bytes_per_s(carried) == pytest.approx(LINE / 10e-9, rel=0.01)


def test_reads_and_writes_together_carry_more_than_either() -> None:
    part = replace(WIDE, bytes_per_s=16_000_000_000)
    link = CxlLink(part)
    both = bytes_per_s(sorted((link.carry(0, LINE * i, i % 2 == 1) for i in range(2000)), key=lambda way: way.done_ps))
    alone = bytes_per_s(stream(part, 2000))
    assert 1.5 * alone < both < 2 * alone


@settings(max_examples=40)
@given(
    st.sampled_from([68, 256]),
    st.integers(4, 80),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 20),
    st.booleans(),
)
def test_what_the_card_states_of_itself_is_what_a_stream_reaches(
    flit: int, gb_per_s: int, credits: int, channels: int, channel_ns: int, write: bool
) -> None:
    part = CxlLinkPart(
        bytes_per_s=gb_per_s * 10**9,
        flit_nbytes=flit,
        request_credits=credits,
        data_credits=credits,
        channels=channels,
        channel_ns=channel_ns,
    )
    link = CxlLink(part)
    carried = [link.carry(0, 256 * i, write) for i in range(1000)]
    seconds = (carried[-1].done_ps - carried[499].done_ps) / 1e12
    assert (500 - credits) * LINE <= part.ceiling(write) * seconds  # a burst as long as the credits may come at once
    if credits >= 2 * channels:
        assert (500 + credits) * LINE >= 0.95 * part.ceiling(write) * seconds


def test_latency_and_load_rise_with_the_rate() -> None:
    part = replace(WIDE, channels=2, channel_ns=10, request_credits=64)
    paces = [40, 20, 10, 6, 5, 4, 2, 1]
    runs = [stream(part, 3000, every_ns=pace) for pace in paces]
    latencies = [latency_ps(run, pace) for run, pace in zip(runs, paces, strict=True)]
    loads = [max(way.load for way in run[1500:]) for run in runs]
    assert latencies == sorted(latencies)
    assert latencies[0] == pytest.approx(part.idle_ps(False), rel=0.02)
    assert loads == sorted(loads)
    assert (loads[0], loads[-1]) == (DevLoad.LIGHT, DevLoad.SEVERE)


def test_a_card_that_is_left_alone_is_lightly_loaded_again() -> None:
    link = CxlLink(replace(WIDE, channels=1, channel_ns=20, request_credits=32))
    last = [link.carry(0, LINE * i, False) for i in range(32)][-1]
    assert link.load_at(100) == DevLoad.SEVERE
    assert link.load_at(500) == DevLoad.OPTIMAL
    assert link.load_at(last.done_ps // 1000) == DevLoad.LIGHT


def test_a_full_way_back_is_a_load_too() -> None:
    part = replace(WIDE, bytes_per_s=2_000_000_000, request_credits=64)
    assert max(way.load for way in stream(part, 500)) == DevLoad.SEVERE
