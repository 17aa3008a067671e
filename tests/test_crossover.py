"""NELSSA's crossover: its numbers by hand, that the curves meet where it says, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.crossover import Constants, Pool, capacities, crossover, gpu_ns, pnm_time, search_ns
from tierloop.runtime.model_shapes import find_model

LLAMA = find_model("llama-3-8b")
H100 = 3.35e12
STEP_NS = 32 * 40_000
"""40 µs of communication in each of 32 layers."""


def constants(**change: Any) -> Constants:
    """Llama-3-8B on an H100 with NELSSA's devices."""
    given: dict[str, Any] = {"gpu_bytes_per_s": H100, "pnm_bytes_per_s": 200e9, "comm_ns": STEP_NS, **change}
    return Constants.of(LLAMA, **given)


def thousands(**change: Any) -> float:
    tokens = crossover(constants(**change)).tokens
    return math.inf if tokens is None else tokens / 1000


DEVICES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("selection_ratio", "bandwidth", "expected"),
    [
        (0.04, 200e9, (109.5, 52, 41, 37)),
        (0.04, 100e9, (math.inf, 109.5, 52, 41)),
        (0.018, 200e9, (49, 40, 37, 35)),
    ],
)
def test_the_thresholds_of_llama_3_8b_on_an_h100(
    selection_ratio: float, bandwidth: float, expected: tuple[float, ...]
) -> None:
    found = [thousands(selection_ratio=selection_ratio, pnm_bytes_per_s=bandwidth, num_devices=n) for n in DEVICES]
    assert found == pytest.approx(list(expected), abs=0.5)


def test_every_part_of_a_step_by_hand() -> None:
    # 131,072 bytes per token; 1,000,000 tokens; four devices.
    million = constants(num_devices=4)
    assert gpu_ns(million, 1e6) == pytest.approx(131_072e6 / 3350)
    time = pnm_time(million, 1e6)
    assert time.search_ns == pytest.approx(1e6 / 16 * 65_536 / 3350)
    assert time.attention_ns == pytest.approx(0.04 * 131_072e6 / 800)
    assert time.comm_ns == 1_280_000
    assert time.total_ns == time.search_ns + time.attention_ns + time.comm_ns
    assert search_ns(million, 1e6) == time.search_ns


def test_the_threshold_is_linear_in_what_communication_takes() -> None:
    assert thousands(comm_ns=STEP_NS / 2) == pytest.approx(thousands() / 2)
    assert thousands(comm_ns=2.5 * STEP_NS) == pytest.approx(2.5 * thousands())
    assert thousands(comm_ns=0) == 0


def test_wider_centroids_cost_more_to_search() -> None:
    wide = constants(centroid_element_nbytes=4)
    assert search_ns(wide, 1000) == 2 * search_ns(constants(), 1000)
    assert constants(element_nbytes=4).centroid_nbytes == constants().centroid_nbytes == 65_536


def test_communication_that_grows_with_the_context_is_taken_from_the_gain() -> None:
    grows = constants(comm_ns_per_token=5.0)
    assert pnm_time(grows, 100).comm_ns == STEP_NS + 500
    assert grows.gain_ns_per_token == pytest.approx(constants().gain_ns_per_token - 5)
    assert thousands(comm_ns_per_token=5.0) > thousands()


def test_a_pnm_that_never_wins_says_what_would_help() -> None:
    never = crossover(constants(pnm_bytes_per_s=100e9))
    assert never.tokens is None
    assert never.least_devices == 2
    assert never.bytes_per_s_above == pytest.approx(0.04 * H100 / (1 - 1 / 32))
    assert "each token costs the GPU 39.1 ns" in never.reason
    assert "2 devices would do, or more than 1.383e+11 B/s of each" in never.reason


def test_the_edge_itself_is_no_win() -> None:
    # 64 bytes; all rows of one device at the GPU's rate, less one centroid of 32 bytes for every 2 tokens: 48 of 64.
    edge = Constants(64, 1e9, 1e9, 1000, 0.75, 2)
    assert edge.gain_ns_per_token == 0
    found = crossover(edge)
    assert (found.tokens, found.least_devices, found.bytes_per_s_above) == (None, 2, 1e9)
    assert crossover(replace(edge, selection_ratio=0.5)).tokens == 1000 / 16


def test_the_largest_numbers_overflow_nothing() -> None:
    most = 2.0**62
    tokens = crossover(Constants(1 << 62, 1, most, most, 1e-300, most, comm_ns_per_token=most)).tokens
    assert tokens is not None
    assert math.isfinite(tokens)


def test_nothing_helps_where_search_or_communication_alone_take_as_long_as_the_gpu() -> None:
    for hopeless in (constants(cluster_tokens=1, centroid_element_nbytes=4), constants(comm_ns_per_token=100)):
        found = crossover(hopeless)
        assert (found.tokens, found.least_devices, found.bytes_per_s_above) == (None, None, None)
        assert "no number of devices and no bandwidth helps" in found.reason


@st.composite
def any_constants(draw: st.DrawFn) -> Constants:
    return Constants(
        kv_nbytes=draw(st.integers(1, 1 << 24)),
        gpu_bytes_per_s=draw(st.floats(1e9, 1e13)),
        pnm_bytes_per_s=draw(st.floats(1e9, 1e13)),
        comm_ns=draw(st.floats(1, 1e9)),
        selection_ratio=draw(st.floats(0.001, 1)),
        cluster_tokens=draw(st.floats(1, 1000)),
        num_devices=draw(st.integers(1, 64)),
        element_nbytes=draw(st.sampled_from([1, 2, 4])),
        centroid_element_nbytes=draw(st.sampled_from([1, 2, 4])),
        comm_ns_per_token=draw(st.sampled_from([0.0, 0.1, 10.0])),
    )


@given(any_constants())
def test_the_two_curves_meet_at_the_crossover_and_part_there(c: Constants) -> None:
    tokens = crossover(c).tokens
    assume(tokens is not None)
    assert tokens is not None
    gpu, pnm = gpu_ns(c, tokens), pnm_time(c, tokens).total_ns
    assert gpu == pytest.approx(pnm, rel=1e-9)
    assume(c.gain_ns_per_token > 1e-9 * c.gpu_ns_per_token)  # otherwise rounding hides which is faster
    assert gpu_ns(c, 2 * tokens) > pnm_time(c, 2 * tokens).total_ns
    assert gpu_ns(c, tokens / 2) < pnm_time(c, tokens / 2).total_ns


@given(any_constants(), st.floats(0, 1e12))
def test_without_a_gain_the_gpu_is_faster_at_every_length(c: Constants, tokens: float) -> None:
    assume(crossover(c).tokens is None)
    assert gpu_ns(c, tokens) < pnm_time(c, tokens).total_ns * (1 + 1e-12)


@given(any_constants())
def test_more_devices_cross_earlier(c: Constants) -> None:
    found = [crossover(c.on(n)).tokens for n in (1, 2, 3, 8)]
    known = [tokens for tokens in found if tokens is not None]
    assert found[len(found) - len(known) :] == known, "who wins with fewer devices wins with more"
    assert all(more < fewer for fewer, more in pairwise(known))


@given(any_constants())
def test_what_is_said_to_help_is_the_least_that_does(c: Constants) -> None:
    found = crossover(c)
    assume(found.least_devices is not None)
    assert found.least_devices is not None
    assert found.bytes_per_s_above is not None
    assume(found.least_devices < 1 << 60 and 2 < found.bytes_per_s_above < 1 << 60)  # constants that there can be
    assert crossover(c.on(found.least_devices)).tokens is not None
    if found.least_devices > 1:
        assert crossover(c.on(found.least_devices - 1)).tokens is None
    assert crossover(replace(c, pnm_bytes_per_s=found.bytes_per_s_above * (1 + 1e-6))).tokens is not None
    assert crossover(replace(c, pnm_bytes_per_s=found.bytes_per_s_above * (1 - 1e-6))).tokens is None
    assert (found.tokens is None) == (c.num_devices < found.least_devices) == bool(found.reason)


def test_every_constant_is_named_with_its_source() -> None:
    named = constants(sources={"pnm_bytes_per_s": "NELSSA: measured under sparse access"})
    rows = named.as_dict()
    assert set(rows) == {field.name for field in fields(Constants)} - {"sources"}
    assert rows["kv_nbytes"] == {
        "value": 131_072,
        "unit": "B/token",
        "source": "llama-3-8b: 2 · 32 layers · 8 KV heads · 128 elements of 2 B",
    }
    assert rows["pnm_bytes_per_s"]["source"] == "NELSSA: measured under sparse access"
    assert rows["selection_ratio"]["value"] == 0.04
    assert "NELSSA" in rows["selection_ratio"]["source"]
    assert rows["comm_ns"]["source"] == "given"
    assert constants(selection_ratio=0.04).as_dict()["selection_ratio"]["source"] == "given"
    lines = named.table().splitlines()
    assert len(lines) == len(rows)
    for line, (name, row) in zip(lines, rows.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(row["source"])
        assert f" {row['value']:,.15g}" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selection_ratio": 0}, "selection_ratio is 0; allowed: a number above 0 and at most 1, below"),
        ({"selection_ratio": 1.01}, "selection_ratio is 1.01"),
        ({"selection_ratio": float("nan")}, "selection_ratio is nan"),
        ({"cluster_tokens": 0.5}, "cluster_tokens is 0.5; allowed: a number at least 1, below"),
        ({"gpu_bytes_per_s": 0}, "gpu_bytes_per_s is 0; allowed: a number at least 1"),
        ({"pnm_bytes_per_s": -1}, "pnm_bytes_per_s is -1"),
        ({"pnm_bytes_per_s": float("inf")}, "pnm_bytes_per_s is inf"),
        ({"pnm_bytes_per_s": "200e9"}, "pnm_bytes_per_s is '200e9'"),
        ({"comm_ns": -1}, "comm_ns is -1; allowed: a number at least 0"),
        ({"comm_ns_per_token": -0.1}, "comm_ns_per_token is -0.1"),
        ({"num_devices": 0}, "num_devices is 0; allowed: a whole number from 1"),
        ({"num_devices": 1.5}, "num_devices is 1.5"),
        ({"num_devices": True}, "num_devices is True"),
        ({"element_nbytes": 0}, "element_nbytes is 0"),
        ({"centroid_element_nbytes": -2}, "centroid_element_nbytes is -2"),
        ({"sources": {"bandwidth": "a guess"}}, "sources of bandwidth; constants are kv_nbytes"),
    ],
)
def test_constants_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"crossover: {message}"):
        constants(**change)


@pytest.mark.parametrize("tokens", [-1, float("nan"), float("inf"), True, "many"])
@pytest.mark.parametrize("time", [gpu_ns, search_ns, pnm_time])
def test_lengths_that_cannot_be_are_refused(time: Any, tokens: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"crossover: tokens is .*; allowed: a number at least 0"):
        time(constants(), tokens)


# -- capacities -----------------------------------------------------------------------------------------------------

KV = LLAMA.kv_nbytes()


def test_tokens_of_llama_3_8b_that_fit() -> None:
    pools = {
        "prototype": Pool(32 << 30, 4),
        "projected": Pool(512 << 30, 4),
        "one H100": Pool(80_000_000_000, 1, 0.9, 16_000_000_000),
        "two H100": Pool(80_000_000_000, 2, 0.9, 16_000_000_000),
    }
    found = capacities(KV, pools)
    assert found == {"prototype": 1_048_576, "projected": 16_777_216, "one H100": 427_246, "two H100": 976_562}


def test_the_weights_of_the_known_shape_leave_as_much() -> None:
    weights = LLAMA.weight_nbytes()
    assert [round(Pool(80_000_000_000, n, 0.9, weights).tokens(KV) / 1000) for n in (1, 2)] == [427, 976]


def test_weights_that_do_not_fit_leave_no_token() -> None:
    assert Pool(1 << 30, weight_nbytes=1 << 31).tokens(KV) == 0


nbytes = st.integers(1, 1 << 40)


@given(nbytes, st.integers(1, 16), st.integers(1, 100), nbytes, st.integers(1, 1 << 20))
def test_what_fits_fits_and_one_more_does_not(nbytes: int, num: int, percent: int, weights: int, kv: int) -> None:
    tokens = Pool(nbytes, num, percent / 100, weights).tokens(kv)
    assert tokens >= 0
    if tokens:
        assert 100 * (weights + tokens * kv) <= percent * nbytes * num
    assert 100 * (weights + (tokens + 1) * kv) > percent * nbytes * num


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 0}, "nbytes is 0; allowed: a whole number from 1"),
        ({"num_devices": 0}, "num_devices is 0"),
        ({"utilisation": 0}, "utilisation is 0; allowed: a number above 0 and at most 1, below"),
        ({"utilisation": 1.5}, "utilisation is 1.5"),
        ({"weight_nbytes": -1}, "weight_nbytes is -1; allowed: a whole number from 0"),
    ],
)
def test_pools_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"crossover: {message}"):
        Pool(**{"nbytes": 1 << 30, **change})


def test_tokens_without_bytes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_nbytes is 0"):
        capacities(0, {"prototype": Pool(1 << 30)})
