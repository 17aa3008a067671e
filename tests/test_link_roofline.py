"""The roofline against a link: numbers by hand, and that the crossing is where the two machines are even."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.runtime.blocks import KVShape
from tierloop.runtime.link_roofline import (
    Rates,
    crossing,
    gpu_flops_per_s,
    host_flops_per_s,
    intensity,
    over_link,
    threshold,
)

A100 = Rates(25e9, 125e9, 2e12, 1.5e12, 300e12)
"""A link of 25 GB/s, host memory of 125 GB/s: round numbers near those of a server."""


def test_the_intensity_of_16_bit_rows_is_the_number_of_queries_that_share_them() -> None:
    assert intensity(KVShape(32, 8, 4, 128, 128, "float16")) == 4  # Llama-3-8B: 4·4·128 FLOP, 512 bytes
    assert intensity(KVShape(32, 32, 1, 128, 128, "bfloat16")) == 1
    assert intensity(KVShape(32, 8, 4, 128, 128, "float32")) == 2
    assert intensity(KVShape(32, 8, 4, 128, 128, "int8")) == 2048 / 260, "128 codes, and 128 codes and their scale"
    assert intensity(KVShape(32, 8, 8, 192, 128, "float16")) == 8


def test_a_hit_rate_of_four_fifths_makes_the_intensity_over_the_link_five_times_as_large() -> None:
    assert over_link(4, 0.8) == pytest.approx(20)
    assert over_link(4, 0) == 4
    assert over_link(4, 1) == math.inf


def test_what_each_side_attains_is_what_its_slowest_part_allows() -> None:
    assert host_flops_per_s(A100, 4) == 500e9  # 4 FLOP/B · 125 GB/s
    assert host_flops_per_s(A100, 32) == 2e12  # cores, not memory
    assert gpu_flops_per_s(A100, 4, 0) == 100e9  # 4 · 25 GB/s over the link
    assert gpu_flops_per_s(A100, 4, 0.5) == 200e9
    assert gpu_flops_per_s(A100, 4, 1) == 6e12  # 4 · 1.5 TB/s of its own memory
    assert gpu_flops_per_s(A100, 4, 0.99) == pytest.approx(6e12 / 1.01)  # what is missed is written there too
    assert gpu_flops_per_s(A100, 400, 1) == 300e12


def test_the_gpu_wins_from_four_fifths_of_hits_on_where_host_memory_is_five_times_as_fast_as_the_link() -> None:
    assert threshold(A100, 4) == 20  # 500 GFLOP/s over 25 GB/s
    assert crossing(A100, 4) == pytest.approx(0.8)  # 1 − 4 / 20
    assert crossing(A100, 16) == pytest.approx(0.8)
    assert threshold(A100, 32) == 80  # 2 TFLOP/s over 25 GB/s
    assert crossing(A100, 32) == pytest.approx(0.6)  # 1 − 32 / 80


def test_the_gpu_always_wins_against_a_host_no_faster_than_the_link() -> None:
    assert crossing(Rates(25e9, 20e9, 2e12, 1.5e12, 300e12), 4) == 0
    assert crossing(Rates(25e9, 125e9, 90e9, 1.5e12, 300e12), 4) == 0  # the host computes 90 GFLOP/s, the link lets 100


def test_the_gpus_own_memory_may_be_what_decides() -> None:
    # Host 500 GFLOP/s; GPU 4 · 150 GB/s = 600 GFLOP/s with all hits, and 600 / (2 − hit) ≥ 500 from 0.8 on.
    assert crossing(Rates(200e9, 125e9, 2e12, 150e9, 300e12), 4) == pytest.approx(0.8)
    assert crossing(Rates(200e9, 125e9, 2e12, 100e9, 300e12), 4) is None
    assert crossing(Rates(200e9, 125e9, 2e12, 1.5e12, 400e9), 4) is None


_ABOVE_0 = st.floats(1e6, 1e15)


@given(st.builds(Rates, *[_ABOVE_0] * 5), st.floats(0.1, 1000), st.floats(0, 1))
def test_the_gpu_is_faster_beyond_the_crossing_and_slower_before_it(rates: Rates, oi: float, hit: float) -> None:
    host, gpu, even = host_flops_per_s(rates, oi), gpu_flops_per_s(rates, oi, hit), crossing(rates, oi)
    if even is None or hit < even:
        assert gpu <= host * (1 + 1e-6)
    else:
        assert gpu >= host * (1 - 1e-6)
    above = over_link(oi, hit) > threshold(rates, oi) * (1 + 1e-9)
    if gpu > host * (1 + 1e-6):
        assert above or math.isclose(over_link(oi, hit), threshold(rates, oi), rel_tol=1e-6)


@given(st.builds(Rates, *[_ABOVE_0] * 5), st.floats(0.1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_more_hits_never_make_the_gpu_slower(rates: Rates, oi: float, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert gpu_flops_per_s(rates, oi, few) <= gpu_flops_per_s(rates, oi, many)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: over_link(4, 1.01), "the hit rate is 1.01; it must be from 0 to 1"),
        (lambda: gpu_flops_per_s(A100, 4, math.nan), "the hit rate is nan"),
        (lambda: threshold(A100, 0), "the operational intensity is 0; it must be above 0"),
        (lambda: Rates(0, 1, 1, 1, 1), "link_bytes_per_s is 0; it must be above 0, finite"),
        (lambda: Rates(1, math.inf, 1, 1, 1), "host_bytes_per_s is inf; it must be above 0, finite"),
        (lambda: Rates(1, 1, math.nan, 1, 1), "host_flops_per_s is nan; it must be above 0$"),
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
