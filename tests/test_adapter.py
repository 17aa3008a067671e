"""Plain `generate` over devices: the same tokens as without, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierloop.devices.registry import open_platform
from tierloop.runtime.adapters.transformers_cache import AdapterRefusal, TieredCache
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.ledger import Ledger
from tierloop.runtime.models import Model

from .decoding import SMALL, assert_nothing_is_left
from .tiny import tiny_model, tiny_workload

IDS = torch.tensor([tiny_workload(200).token_ids])


@pytest.fixture
def model() -> Model:
    made = tiny_model()
    made.module.set_attn_implementation("tierloop")
    return made


def generate(module: Any, ids: torch.Tensor, num_tokens: int = 8, **arguments: Any) -> list[list[int]]:
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    out = module.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, **arguments)
    return [row[ids.shape[1] :].tolist() for row in out]


@pytest.mark.parametrize("policy", ["all-gpu", "cpu-attention", "split-all", "stream-offload"])
def test_generate_over_devices_gives_the_tokens_of_plain_generate(model: Model, policy: str) -> None:
    expected = generate(tiny_model().module, IDS)
    with open_platform(SMALL, check_hazards=True) as platform:
        ledger = Ledger(platform)
        platform.site.observers.append(ledger)
        with TieredCache(model.module, platform, policy, max_tokens=208) as cache:
            assert generate(model.module, IDS, **cache.generate_arguments()) == expected
        devices, _ = ledger.snapshot()
        assert devices["emu:gpu"].commands > 0
        assert sum(d.bytes_read for d in devices.values()) > 7 * 200 * 2 * 2 * 16 * 4 * 3
        assert_nothing_is_left(platform)


def test_a_conversation_goes_on_over_a_filled_cache(model: Model) -> None:
    plain = tiny_model().module
    more = torch.tensor([tiny_workload(30, seed=5).token_ids])
    with (
        open_platform(SMALL, check_hazards=True) as platform,
        TieredCache(model.module, platform, "split-all", max_tokens=300) as cache,
    ):
        first = generate(model.module, IDS, 6, **cache.generate_arguments())
        turn = torch.cat((IDS, torch.tensor(first), more), dim=1)
        second = generate(model.module, turn, 6, **cache.generate_arguments())
    assert first == generate(plain, IDS, 6)
    assert second == generate(plain, turn, 6)


def test_a_batch_of_equal_lengths_is_served(model: Model) -> None:
    ids = torch.cat((IDS, torch.tensor([tiny_workload(200, seed=3).token_ids])))
    with (
        open_platform(SMALL, check_hazards=True) as platform,
        TieredCache(model.module, platform, "split-all", max_tokens=208) as cache,
    ):
        assert generate(model.module, ids, **cache.generate_arguments()) == generate(tiny_model().module, ids)


def test_a_cache_can_be_reset_and_used_again(model: Model) -> None:
    expected = generate(tiny_model().module, IDS)
    with open_platform(SMALL) as platform, TieredCache(model.module, platform, max_tokens=208) as cache:
        for _ in range(2):
            assert generate(model.module, IDS, **cache.generate_arguments()) == expected
            cache.reset()


def test_padding_is_refused(model: Model) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    with (
        open_platform(SMALL) as platform,
        TieredCache(model.module, platform, max_tokens=208) as cache,
        pytest.raises(AdapterRefusal, match="padding"),
    ):
        generate(model.module, IDS, attention_mask=mask, **cache.generate_arguments())


def test_beam_search_is_refused(model: Model) -> None:
    with (
        open_platform(SMALL) as platform,
        TieredCache(model.module, platform, max_tokens=208) as cache,
        pytest.raises(AdapterRefusal, match="beam"),
    ):
        generate(model.module, IDS, num_beams=2, **cache.generate_arguments())


def test_more_tokens_than_the_cache_was_made_for_are_refused(model: Model) -> None:
    with (
        open_platform(SMALL) as platform,
        TieredCache(model.module, platform, max_tokens=203) as cache,
        pytest.raises(AdapterRefusal, match="204 tokens do not fit a cache made for max_tokens=203"),
    ):
        generate(model.module, IDS, **cache.generate_arguments())


def test_a_platform_that_is_too_small_is_said_before_anything_is_kept(model: Model) -> None:
    with open_platform(SMALL, overrides={"devices.gpu.capacity": 150_000}) as platform:
        with (
            TieredCache(model.module, platform, "all-gpu", max_tokens=4000) as cache,
            pytest.raises(TierTooSmall),
        ):
            generate(model.module, IDS, **cache.generate_arguments())
        assert_nothing_is_left(platform)


def test_the_attention_function_needs_its_cache(model: Model) -> None:
    with pytest.raises(AdapterRefusal, match="needs a TieredCache"):
        generate(model.module, IDS)


def test_a_model_with_a_sliding_window_is_refused(model: Model) -> None:
    model.module.config.sliding_window = 64
    with open_platform(SMALL) as platform, pytest.raises(AdapterRefusal, match="sliding_window"):
        TieredCache(model.module, platform)


@pytest.mark.parametrize("verb", ["crop", "batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_what_rewrites_the_cache_is_refused(model: Model, verb: str) -> None:
    with open_platform(SMALL) as platform, TieredCache(model.module, platform) as cache, pytest.raises(AdapterRefusal):
        getattr(cache, verb)(1)
