"""What has reached each tier: two counts that have to agree, and what is said where a tier stays empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding import SMALL
from tests.tiny import tiny_model, tiny_workload
from tests.wrapping import failed
from tierloop.devices.commands import Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.example import Example
from tierloop.devices.registry import discover, open_platform
from tierloop.devices.site import Site
from tierloop.devices.wrappers import Faulty, wrapped
from tierloop.devices.wrappers.faulty import MILLION
from tierloop.runtime.compare import PolicyRequest, compare
from tierloop.runtime.policy import Policy
from tierloop.runtime.results import Comparison
from tierloop.runtime.tier_writes import ENOUGH, TierUse, TierWrites, left_empty, unreached
from tierloop.tools.table import remarks

MODEL = tiny_model()


def compared(*policies: PolicyRequest) -> Comparison:
    return compare(MODEL, tiny_workload(300), lambda _: open_platform(SMALL), policies, num_tokens=3, oracle=False)


def test_every_policy_writes_to_every_memory_that_it_places_blocks_on() -> None:  # B13, C12
    policies = [PolicyRequest(found.name) for found in discover("policies")]
    for result in compared(*policies).policies:
        assert result.refused is None, result.refused
        assert unreached(result.tiers) == ()
        assert sum(tier.bytes_written for tier in result.tiers.values()) > 0
        assert set(result.placement) <= {memory for memory, tier in result.tiers.items() if tier.bytes_written}
        for memory, nbytes in result.placement.items():
            assert result.tiers[memory].bytes_written * 2 >= nbytes, f"{result.policy}: {memory}"


def test_a_run_whose_rows_never_arrive_fails_and_names_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:  # B13
    monkeypatch.setattr(Policy, "_write_rows", lambda *_: [])
    shares = {"emu:numa": 1, "emu:cxl": 1}
    comparison = compared(PolicyRequest("split-all", {"shares": shares}))
    lost = [failure for failure in comparison.failures if "nothing has reached" in failure]
    assert [each.split(": ")[1].removeprefix("nothing has reached ") for each in lost] == ["emu:cxl", "emu:numa"]
    assert "24 blocks were placed there" in lost[0]


def test_entries_of_kvdrive_are_counted_where_they_are_laid_down(monkeypatch: pytest.MonkeyPatch) -> None:  # B13
    wanted = PolicyRequest("kvdrive", {"dram_share": 0.2})
    tiers = compared(wanted).policies[0].tiers
    assert tiers["emu:nvme"].blocks_placed >= ENOUGH
    assert tiers["emu:nvme"].bytes_written > 0
    assert tiers["emu:dram"].blocks_placed > 0
    monkeypatch.setattr(TierWrites, "__call__", _passing_by("emu:nvme"))
    lost = [failure for failure in compared(wanted).failures if "nothing has reached" in failure]
    assert [each.split(": ")[1] for each in lost] == ["nothing has reached emu:nvme"]


def _passing_by(memory: str) -> Callable[[TierWrites, Completion], None]:
    """Counting as if no byte had come to a memory."""
    count = TierWrites.__call__

    def counted(self: TierWrites, completion: Completion) -> None:
        if memory not in completion.traffic.written:
            count(self, completion)

    return counted


def test_a_tier_that_was_asked_for_and_stays_empty_is_said_loudly() -> None:  # B13
    comparison = compared(PolicyRequest("split-all", {"shares": {"emu:nvme": 0.01, "emu:dram": 1}}))
    (loud,) = [line for line in remarks(comparison) if "NOTHING HAS REACHED" in line]
    assert loud.startswith("NOTHING HAS REACHED emu:nvme: the policy was told to keep rows there; ")
    assert comparison.failures == []


def test_an_archive_that_is_told_to_take_entries_takes_some() -> None:
    (result,) = compared(PolicyRequest("kvdrive", {"dram_share": 0.2})).policies
    assert result.refused is None, result.refused
    assert result.tiers["emu:nvme"].bytes_written > 0
    assert not any("NOTHING" in note for note in result.notes)


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(TierUse, st.integers(0, 2 * ENOUGH), st.integers(0, 1), st.integers(0, 1)),
    ),
    st.lists(st.sampled_from("abcdef")),
)
def test_a_tier_is_named_where_its_counts_do_not_agree_and_nowhere_else(use: dict[str, Any], tiers: list[str]) -> None:
    lost = {memory for memory in "abcdef" if any(memory in each.split(":")[0].split() for each in unreached(use))}
    assert lost == {m for m, tier in use.items() if tier.blocks_placed >= ENOUGH and tier.bytes_written == 0}
    empty = {memory for memory in "abcdef" if any(f"REACHED {memory}:" in each for each in left_empty(use, tiers))}
    enough = sum(tier.blocks_placed for tier in use.values()) >= ENOUGH
    assert empty == {m for m in tiers if enough and use.get(m, TierUse()) == TierUse()}
    assert not lost & empty


def test_only_commands_that_ended_well_count() -> None:
    site, writes = Site(), TierWrites()
    site.observers.append(writes)
    device = wrapped(site, lambda inside: Example(inside), [partial(Faulty, write_per_million=MILLION)])
    region = device.alloc(4096)
    for good in (False, True):
        completion = device.submit(Write(region.at(0, 512), np.ones(512, dtype=np.uint8)))
        assert (failed(site.clock, completion) is None) == good
        assert writes.use({}) == ({"emu:example": TierUse(0, 1, 512)} if good else {})
    device.close()
