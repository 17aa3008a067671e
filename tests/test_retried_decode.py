"""Decoding on devices that fail now and then and are tried again: every policy, the same tokens and the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding import Decoded, decode
from tests.tiny import tiny_model, tiny_workload
from tierloop.runtime.results import Comparison, DeviceUse, PolicyResult
from tierloop.runtime.served import ServingResult
from tierloop.tools.serving_table import serving_remarks
from tierloop.tools.table import remarks, use_remarks

MODEL = tiny_model()
PROMPT = tiny_workload(97).token_ids
POLICIES = sorted(point.name for point in entry_points(group="tierloop.policies"))
WRAPPED = ("gpu", "dram", "nvme", "pnm")
"""The devices of the demo machine that carry commands out."""


@cache
def whole(policy: str) -> Decoded:
    """The decode without failures."""
    return decode(MODEL, [PROMPT], policy, num_tokens=3)


def failing(rate: int, seed: int) -> Mapping[str, Any]:
    """Every device fails that many of a million commands, each its own, and tries them again."""
    return {
        f"devices.{device}.wrap": [
            {"kind": "faulty", "read_per_million": rate, "write_per_million": rate, "seed": seed + number},
            {"kind": "retried", "attempts": 40, "backoff_ns": 1_000},
        ]
        for number, device in enumerate(WRAPPED)
    }


@settings(max_examples=16)
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**31),
    rate=st.integers(100_000, 400_000),
)
def test_every_policy_decodes_the_same_bits_whatever_failed_and_was_tried_again(
    policy: str, seed: int, rate: int
) -> None:
    expected, got = whole(policy), decode(MODEL, [PROMPT], policy, num_tokens=3, overrides=dict(failing(rate, seed)))
    assert got.tokens == expected.tokens
    assert np.array_equal(got.outputs.view(np.uint32), expected.outputs.view(np.uint32))
    assert sum(use.retries for use in got.devices.values()) > 0, "nothing failed"
    for name, use in got.devices.items():
        before = expected.devices[name]
        assert 0 <= use.recovered <= use.retries
        assert (use.bytes_read, use.bytes_written, use.commands) == (
            before.bytes_read,
            before.bytes_written,
            before.commands,
        ), name
    assert got.placement == expected.placement
    assert got.elapsed_ns > expected.elapsed_ns


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_recovers_on_every_device_that_it_uses(policy: str) -> None:
    expected, got = whole(policy), decode(MODEL, [PROMPT], policy, num_tokens=3, overrides=dict(failing(400_000, 3)))
    assert got.tokens == expected.tokens
    assert np.array_equal(got.outputs.view(np.uint32), expected.outputs.view(np.uint32))
    for name, use in got.devices.items():
        moved = use.bytes_read + use.bytes_written
        assert use.commands < 10 or not moved or use.recovered > 0, f"nothing was recovered on {name}"
    assert len(use_remarks(got.devices)) == sum(use.retries > 0 for use in got.devices.values())


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            DeviceUse(commands=9, retries=1_234, recovered=7),
            "commands were tried again 1,234 times after a failure, and 7 recovered",
        ),
        (DeviceUse(commands=9, cached_bytes=900), "900 B were read from the page cache, not from the medium"),
    ],
)
def test_a_comparison_and_a_serving_run_say_what_numbers_of_devices_do_not(use: DeviceUse, said: str) -> None:
    devices = {"emu:gpu": use, "emu:dram": DeviceUse(commands=9)}
    result = PolicyResult("all-gpu", devices=devices, equal_to_dense=True)
    assert remarks(Comparison("small", "virtual", "tiny", 97, (result,))) == [f"all-gpu: emu:gpu: {said}"]
    assert serving_remarks([ServingResult("all-gpu", devices=devices)]) == [f"all-gpu: emu:gpu: {said}"]
