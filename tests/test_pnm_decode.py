"""A model decodes with a part of its cache behind the pnm driver: the tokens and the bits of attention on the host."""

from __future__ import annotations

import numpy as np
import pytest

from tests.decoding import Decoded, decode
from tests.pnm_rig import MIB, card_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.firmware_models.pnm_card import PnmCard

MODEL = tiny_model()
PROMPTS = [tiny_workload(210).token_ids, tiny_workload(97, seed=1).token_ids]


def platform_of(card: PnmCard | None) -> Platform:
    """A real cpu device, and the pnm driver on a card if there is one."""
    site = Site(clock=WallClock(), checker=HazardChecker())
    devices = {"dram": open_cpu("dram", site, {"capacity": 256 * MIB})}
    if card is None:
        return Platform("host alone", site, {**devices}, "dram")
    options = {"reaches": ["dram"], "deadline_ms": 60_000}
    pnm = open_pnm("pnm", site, options, window=card.bus())
    return Platform("host and pnm", site, {**devices, "pnm": pnm}, "dram")


@pytest.fixture(scope="module")
def on_the_host() -> Decoded:
    return decode(MODEL, PROMPTS, "cpu-attention", platform=platform_of(None))


@pytest.mark.parametrize("engines", [1, 4])
def test_split_attention_has_the_tokens_and_the_bits_of_the_host(on_the_host: Decoded, engines: int) -> None:
    card = card_of(engines=engines, capacity=64 * MIB, entries=8)
    card.shuffle(engines)
    decoded = decode(MODEL, PROMPTS, "split-all", platform=platform_of(card))
    assert decoded.tokens == on_the_host.tokens
    assert np.array_equal(decoded.outputs.view(np.uint32), on_the_host.outputs.view(np.uint32))
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.placement["pnm"] > 0
    assert decoded.devices["pnm"].bytes_read >= decoded.placement["pnm"], "rows of the card were not read in every step"
    assert all(engine.jobs_done for engine in card.dispatcher.engines), "an engine had nothing to do"
    assert card.stale_nbytes == 0


def test_all_of_the_cache_may_lie_on_the_card(on_the_host: Decoded) -> None:
    card = card_of(engines=3, capacity=64 * MIB)
    decoded = decode(MODEL, PROMPTS, "split-all", platform=platform_of(card), shares={"pnm": 1.0})
    assert decoded.tokens == on_the_host.tokens
    assert np.array_equal(decoded.outputs.view(np.uint32), on_the_host.outputs.view(np.uint32))
    assert decoded.placement["pnm"] > decoded.placement.get("dram", 0)
