"""Arrivals: streams that are what they say, the same everywhere, and checks that name what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.arrivals import (
    LATEST_NS,
    MOST_REQUESTS,
    MOST_TOKENS,
    Arrival,
    Fixed,
    Lengths,
    Lognormal,
    Mixture,
    Turn,
    Uniform,
    bursts,
    check,
    poisson,
    together,
)

S = 10**9
SHORT = Lengths(Fixed(500), Fixed(50), kind="short")
LONG = Lengths(Fixed(96_000), Fixed(200), kind="long")
ONE = Arrival("a", 5, (Turn(3, 2),))

lengths = st.builds(
    Lengths,
    st.one_of(
        st.builds(Fixed, st.integers(1, 1000)),
        st.builds(lambda least, more: Uniform(least, least + more), st.integers(1, 1000), st.integers(0, 1000)),
        st.builds(Lognormal, st.floats(1, 1000), st.floats(0, 2), most=st.just(5000)),
    ),
    st.builds(Fixed, st.integers(1, 100)),
    turns=st.integers(1, 3),
    after_ns=st.integers(0, S),
)
mixtures = st.lists(st.tuples(st.floats(0.1, 5), lengths), min_size=1, max_size=3).map(lambda p: Mixture(tuple(p)))
times = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(sorted)


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_poisson_stream_has_exponential_gaps_of_the_asked_rate() -> None:
    stream = poisson(SHORT, per_s=2, requests=20_000, seed=3)
    gaps = [b.at_ns - a.at_ns for a, b in pairwise(stream)]
    assert fmean(gaps) == pytest.approx(S / 2, rel=0.02)
    assert stdev(gaps) == pytest.approx(S / 2, rel=0.03)
    assert sum(gap > S for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.01)


def test_the_first_times_and_lengths_of_a_seed_are_those_that_they_have_always_been() -> None:
    stream = poisson(Lengths(Uniform(1, 1000), Lognormal(100, 1)), per_s=2, requests=3, seed=0)
    assert [(a.at_ns, a.turns) for a in stream] == [
        (1_431_804_523, (Turn(678, 50),)),
        (1_621_949_721, (Turn(424, 253),)),
        (2_262_633_350, (Turn(560, 159),)),
    ]


@given(lengths | mixtures, st.integers(0, 9), st.integers(1, 20), st.integers(1, 20))
def test_more_requests_leave_the_first_ones_as_they_are(
    drawn: Lengths | Mixture, seed: int, few: int, more: int
) -> None:
    stream = poisson(drawn, per_s=5, requests=few, seed=seed)
    assert poisson(drawn, per_s=5, requests=few + more, seed=seed)[:few] == stream


@given(lengths, lengths | mixtures, st.integers(0, 9))
def test_other_lengths_leave_the_times_as_they_are(one: Lengths, other: Lengths | Mixture, seed: int) -> None:
    streams = (poisson(drawn, per_s=5, requests=10, seed=seed) for drawn in (one, other))
    assert len({tuple(a.at_ns for a in stream) for stream in streams}) == 1


def test_another_seed_gives_other_times_and_lengths() -> None:
    drawn = Lengths(Uniform(1, 10**6), Fixed(1))
    one, other = (poisson(drawn, per_s=1, requests=5, seed=seed) for seed in (1, 2))
    assert not {a.at_ns for a in one} & {a.at_ns for a in other}
    assert not {a.prompt_tokens for a in one} & {a.prompt_tokens for a in other}


@given(lengths | mixtures, st.integers(0, 9), st.integers(1, 3 * S))
def test_a_stream_until_a_time_is_the_longer_one_cut_there(drawn: Lengths | Mixture, seed: int, until_ns: int) -> None:
    longer = poisson(drawn, per_s=20, requests=200, seed=seed)
    cut = tuple(a for a in longer if a.at_ns < until_ns)
    if cut:
        assert poisson(drawn, per_s=20, until_ns=until_ns, seed=seed) == cut
    else:
        with pytest.raises(ConfigurationError, match="there are 0 requests"):
            poisson(drawn, per_s=20, until_ns=until_ns, seed=seed)


def test_bursts_come_at_once_and_evenly_spaced() -> None:
    stream = bursts(LONG, every_ns=10 * S, bursts=3, size=2, name="long", start_ns=5)
    assert [(a.name, a.at_ns) for a in stream] == [
        ("long-0", 5), ("long-1", 5), ("long-2", 10 * S + 5), ("long-3", 10 * S + 5), ("long-4", 20 * S + 5),
        ("long-5", 20 * S + 5),
    ]  # fmt: skip
    assert {(a.kind, a.turns) for a in stream} == {("long", (Turn(96_000, 200),))}


@given(lengths | mixtures, st.integers(1, 5), st.integers(1, 5), st.integers(0, S), st.integers(0, 9))
def test_every_stream_can_be_served(drawn: Lengths | Mixture, count: int, size: int, every: int, seed: int) -> None:
    check(bursts(drawn, every_ns=every, bursts=count, size=size, seed=seed))
    check(poisson(drawn, per_s=0.1 + every / S, requests=count * size, seed=seed))


def test_later_turns_pause_and_the_first_does_not() -> None:
    (arrival,) = bursts(replace(SHORT, turns=3, after_ns=7), every_ns=0, bursts=1)
    assert arrival.turns == (Turn(500, 50), Turn(500, 50, 7), Turn(500, 50, 7))
    assert (arrival.prompt_tokens, arrival.total_tokens) == (500, 1650)


# -- lengths --------------------------------------------------------------------------------------------------------


def test_uniform_lengths_come_equally_often_with_both_ends() -> None:
    drawn = Counter(Uniform(3, 6).at((i + 0.5) / 4000) for i in range(4000))
    assert drawn == {3: 1000, 4: 1000, 5: 1000, 6: 1000}


def test_lognormal_lengths_have_their_median_and_spread_and_stay_within_their_ends() -> None:
    drawn = [Lognormal(1000, 0.5, 200, 4000).at((i + 0.5) / 9999) for i in range(9999)]
    assert median(drawn) == 1000
    assert stdev(math.log(n) for n in drawn) == pytest.approx(0.5, rel=0.02)
    assert (min(drawn), max(drawn)) == (200, 4000)


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), lengths)
def test_lengths_never_fall_as_u_grows(one: float, other: float, drawn: Lengths) -> None:
    assert drawn.prompt.at(min(one, other)) <= drawn.prompt.at(max(one, other))


def test_kinds_of_a_mixture_come_as_often_as_their_shares() -> None:
    mixture = Mixture(((3, SHORT), (0, replace(SHORT, kind="never")), (1, LONG)))
    kinds = Counter(a.kind for a in poisson(mixture, per_s=1, requests=8000, seed=1))
    assert set(kinds) == {"short", "long"}
    assert kinds["short"] / 8000 == pytest.approx(0.75, abs=0.015)


# -- merging --------------------------------------------------------------------------------------------------------


def test_a_short_and_a_long_stream_merge_by_time() -> None:
    short = bursts(SHORT, every_ns=S // 2, bursts=60, name="short")
    long = bursts(LONG, every_ns=10 * S, bursts=3, name="long")
    merged = together(short, long)
    assert [a.name for a in merged[:3]] == ["short-0", "long-0", "short-1"]
    assert sorted(merged, key=lambda a: a.at_ns) == list(merged)
    assert {a.name: a for a in merged} == {a.name: a for a in short + long}


def test_equal_names_are_numbered_and_a_name_that_somebody_has_is_not_taken() -> None:
    merged = together([replace(ONE, name="a")], [replace(ONE, name="a")], [replace(ONE, name="a.2")], [ONE])
    assert [a.name for a in merged] == ["a", "a.3", "a.2", "a.4"]


@given(st.lists(st.lists(st.tuples(st.sampled_from(["a", "a.2", "a.2.2", "b"]), st.integers(0, 9))), min_size=1))
def test_merged_streams_have_all_requests_once_under_names_of_their_own(given: list[list[tuple[str, int]]]) -> None:
    streams = [[Arrival(name, at, (Turn(i + 1, 1),)) for i, (name, at) in enumerate(stream)] for stream in given]
    if not any(streams):
        return
    merged = together(*streams)
    assert len({a.name for a in merged}) == len(merged)
    assert Counter((a.at_ns, a.turns) for a in merged) == Counter((a.at_ns, a.turns) for s in streams for a in s)
    assert {a.name for a in merged} >= {a.name for s in streams for a in s}, "the first of a name keeps it"


# -- what is refused ------------------------------------------------------------------------------------------------


@given(times)
def test_sorted_requests_with_names_pass(at: list[int]) -> None:
    check([Arrival(f"r{i}", at_ns, (Turn(1, 1),)) for i, at_ns in enumerate(at)])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "there are 0 requests"),
        ([ONE, replace(ONE, name="b", at_ns=4)], "b arrives at 4 ns, after one at 5 ns"),
        ([ONE, ONE], "two requests are named 'a'"),
        ([replace(ONE, name="")], "has a name of 0 characters"),
        ([replace(ONE, kind="x" * 201)], "a kind of 201"),
        ([replace(ONE, name="a\x1b[2J")], "must be printable"),
        ([replace(ONE, at_ns=-1)], "the arrival of a is -1 ns"),
        ([replace(ONE, at_ns=LATEST_NS + 1)], "the arrival of a"),
        ([replace(ONE, at_ns=0.5)], r"the arrival of a is 0\.5 ns"),  # type: ignore[arg-type]
        ([replace(ONE, turns=())], "a has 0 turns"),
        ([replace(ONE, turns=(Turn(1, 1),) * 1025)], "a has 1,025 turns"),
        ([replace(ONE, turns=(Turn(0, 1),))], "the prompt of turn 0 is 0 tokens"),
        ([replace(ONE, turns=(Turn(1, 1), Turn(1, 0)))], "the output of turn 1 is 0 tokens"),
        ([replace(ONE, turns=(Turn(True, 1),))], "the prompt of turn 0 is True tokens"),
        ([replace(ONE, turns=(Turn(1, 1), Turn(1, 1, -3)))], "the pause before turn 1 is -3 ns"),
        ([replace(ONE, turns=(Turn(1, 1, 3),))], "the first turn comes after 3 ns"),
        ([replace(ONE, turns=(Turn(MOST_TOKENS, 1),))], "a has 16,777,217 tokens in all turns"),
        ([replace(ONE, tokens=(1, 2))], "brings 2 tokens for a prompt of 3"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(wrong: list[Arrival], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check(wrong)


def test_a_request_may_be_as_large_as_the_limit_says() -> None:
    check([replace(ONE, turns=(Turn(MOST_TOKENS - 1, 1),))])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fixed(0), "a fixed length is 0 tokens"),
        (lambda: Uniform(5, 4), "from 5 to 4"),
        (lambda: Uniform(1, MOST_TOKENS + 1), "the most of uniform lengths"),
        (lambda: Lognormal(10, math.nan), "sigma of lognormal lengths is nan"),
        (lambda: Lognormal(10, 1, least=11), "the median of lognormal lengths is 10"),
        (lambda: replace(SHORT, turns=0), "turns are 0"),
        (lambda: replace(SHORT, after_ns=-1), "the pause between turns is -1 ns"),
        (lambda: Mixture(()), "the shares of a mixture are"),
        (lambda: Mixture(((0, SHORT),)), "one above 0"),
        (lambda: Mixture(((math.nan, SHORT),)), "the shares of a mixture are"),
        (lambda: poisson(SHORT, per_s=0, requests=1), "the rate is 0"),
        (lambda: poisson(SHORT, per_s=math.nan, requests=1), "the rate is nan"),
        (lambda: poisson(SHORT, per_s=1), "without an end"),
        (lambda: poisson(SHORT, per_s=1, requests=0), "requests of a stream are 0"),
        (lambda: poisson(SHORT, per_s=1e-9, requests=100), "the arrival of request-"),
        (lambda: poisson(SHORT, per_s=1, requests=1, seed=-1), "the seed is -1"),
        (lambda: poisson(SHORT, per_s=1, requests=1, start_ns=-1), "the start of a stream is -1 ns"),
        (lambda: bursts(SHORT, every_ns=-1, bursts=1), "the time between bursts is -1 ns"),
        (lambda: bursts(SHORT, every_ns=1, bursts=0), "bursts are 0"),
        (lambda: bursts(SHORT, every_ns=1, bursts=1, size=0), "requests of a burst are 0"),
        (lambda: bursts(SHORT, every_ns=1, bursts=MOST_REQUESTS, size=2), "requests of a stream are 2097152"),
        (lambda: bursts(SHORT, every_ns=LATEST_NS, bursts=3), "the last burst is"),
        (lambda: together([], []), "there are 0 requests"),
    ],
)
def test_a_stream_that_cannot_be_made_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()
