"""A model decodes over real drivers on models of hardware, all at once: the tokens and the bits of the host alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.decoding import Decoded, decode
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.clocks import WallClock
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.emulators.modelled import KINDS, open_modelled

MODEL = tiny_model()
PROMPTS = [tiny_workload(210).token_ids, tiny_workload(97, seed=1).token_ids]
BIT_EQUAL = [kind for kind in sorted(KINDS) if kind != "gpu"]
"""Those whose rows are attended by this host's kernels, or by a model that has them."""


def platform_of(*kinds: str) -> Platform:
    return open_modelled(kinds, Site(clock=WallClock(), checker=HazardChecker()))


@pytest.fixture(scope="module")
def on_the_host() -> Decoded:
    return decode(MODEL, PROMPTS, "cpu-attention", platform=platform_of())


@pytest.mark.parametrize("kinds", [*([kind] for kind in BIT_EQUAL), BIT_EQUAL], ids="+".join)
def test_split_attention_over_real_drivers_has_the_bits_of_the_host(on_the_host: Decoded, kinds: list[str]) -> None:
    decoded = decode(MODEL, PROMPTS, "split-all", platform=platform_of(*kinds))
    assert decoded.tokens == on_the_host.tokens
    assert np.array_equal(decoded.outputs.view(np.uint32), on_the_host.outputs.view(np.uint32))
    assert decoded.verdict.worst_ratio <= 1
    for kind in kinds:
        assert decoded.placement[f"{kind}0"] > 0, f"no rows lay on {kind}0"
        reader = "cpu0" if kind == "cxl" else f"{kind}0"
        assert decoded.devices[reader].bytes_read >= decoded.placement[f"{kind}0"], f"{kind}0 was not read"


def test_selection_with_the_whole_budget_has_the_same_bits(on_the_host: Decoded) -> None:
    decoded = decode(MODEL, PROMPTS, "topk-blocks", platform=platform_of(*BIT_EQUAL), budget=1.0)
    assert decoded.tokens == on_the_host.tokens
    assert np.array_equal(decoded.outputs.view(np.uint32), on_the_host.outputs.view(np.uint32))


def test_a_gpu_that_sums_in_another_order_stays_within_its_bound(on_the_host: Decoded) -> None:
    decoded = decode(MODEL, PROMPTS, "split-all", platform=platform_of(*sorted(KINDS)))
    assert decoded.tokens == on_the_host.tokens
    assert decoded.verdict.worst_ratio <= 1
    assert all(decoded.placement[f"{kind}0"] > 0 for kind in KINDS)
    assert decoded.devices["gpu0"].bytes_read > 0


def test_rows_are_streamed_from_them_too(on_the_host: Decoded) -> None:
    decoded = decode(MODEL, PROMPTS[:1], "stream-offload", platform=platform_of(*BIT_EQUAL))
    assert decoded.tokens == on_the_host.tokens[:1]
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.placement["nvme0"] > 0
