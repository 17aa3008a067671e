"""Decoding on devices that fail now and then: the same bits, or an end that says what failed; never a wrong result."""

from __future__ import annotations

import numpy as np
import pytest

from tests.decoding import Decoded, decode
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.errors import Cancelled, DeviceError, MediaError

MODEL = tiny_model()
PROMPT = tiny_workload(97).token_ids
RARE, OFTEN = 4_000, 200_000
"""Commands of a million that fail: few enough that some runs get through, and so many that none does."""


def decoded(policy: str, device: str, share: int, seed: int) -> Decoded:
    wrap = [{"kind": "faulty", "read_per_million": share, "write_per_million": share, "seed": seed}]
    return decode(MODEL, [PROMPT], policy, num_tokens=3, overrides={f"devices.{device}.wrap": wrap})


def what_failed(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, Cancelled) else error


def result_of(policy: str, device: str, share: int, seed: int) -> Decoded | DeviceError:
    try:
        return decoded(policy, device, share, seed)
    except DeviceError as error:
        return error


@pytest.mark.parametrize(
    ("policy", "device"),
    [("split-all", "dram"), ("stream-offload", "gpu"), ("kvdrive", "nvme"), ("hybridgen", "gpu"), ("nelssa", "pnm")],
)
def test_a_decode_has_the_bits_of_one_without_failures_or_ends_with_what_failed(policy: str, device: str) -> None:
    whole = decode(MODEL, [PROMPT], policy, num_tokens=3)
    for seed in range(4):
        got = result_of(policy, device, RARE, seed)
        if isinstance(got, DeviceError):
            assert isinstance(what_failed(got), MediaError), repr(got)
            assert f"emu:{device}" in str(got)
        else:
            assert got.tokens == whole.tokens
            assert np.array_equal(got.outputs.view(np.uint32), whole.outputs.view(np.uint32))


@pytest.mark.parametrize("policy", ["all-gpu", "hybridgen", "paged", "split-all"])
def test_what_failed_while_rows_were_placed_is_said_and_not_that_others_were_under_way(policy: str) -> None:
    for seed in range(4):
        got = result_of(policy, "gpu", OFTEN, seed)
        assert isinstance(got, DeviceError), "nothing failed"
        assert isinstance(what_failed(got), MediaError), repr(got)
