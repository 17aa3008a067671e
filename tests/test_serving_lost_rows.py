"""Rows that a near memory cannot read any more: their request is computed again, a bounded number of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.decoding import SMALL, assert_nothing_is_left, dense_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices import faulty_host
from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.devices.wrappers.entries import Alloc, Free
from tierloop.devices.wrappers.reading import read_recording
from tierloop.runtime.arrivals import Arrival, Turn
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.served import ServingResult
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_model

NEAR: Path = SMALL.parent / "near.toml"
MODEL = tiny_model(num_layers=1, num_q_heads=16, num_kv_heads=8, context=1024)
OUTPUT = 20
OPTIONS = {"near": ["emu:pnm0"], "budget": 1.0, "threshold_tokens": 150, "segment_tokens": 64, "update_tokens": 16}
ARRIVALS = [
    Arrival(f"r{number}", 0, (Turn(length, OUTPUT),), tuple(tiny_workload(length, seed=number).token_ids))
    for number, length in enumerate((200, 60, 80))
]
"""The first is long enough to be attended near its memory, the others are not."""


@dataclass
class Spoils:
    """Makes a row unreadable that is about to be attended near the memory, `times` times."""

    platform: Platform
    times: int
    after: int = 3
    launches: int = 0
    spoilt: int = 0

    def __call__(self, completion: Completion) -> None:
        command = completion.command
        if completion.device != "emu:pnm0" or not isinstance(command, Launch) or command.args.kernel != "attend":
            return
        self.launches += 1
        if self.launches >= self.after and self.spoilt < self.times:
            self.launches, self.spoilt = 0, self.spoilt + 1
            region, spans = command.reads[1][0]
            host = faulty_host.of(self.platform.site, "emu:pnm0")
            assert host is not None
            host.unreadable(region, int(spans.array[0, 0]), 1)


def serve(
    times: int, recomputes: int, wrap: Sequence[dict[str, Any]] = (), **overrides: Any
) -> tuple[ServingResult, int]:
    """A run in which rows are lost so many times; how often they were."""
    wraps = {"devices.pnm0.wrap": [{"kind": "faulty"}, *wrap]}
    with open_platform(NEAR, overrides=wraps | overrides, check_hazards=True) as platform:
        spoils = Spoils(platform, times)
        platform.site.arrivals.append(spoils)
        how = Serving(ServingRules(4, 64, recomputes=recomputes), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("nelssa", dict(OPTIONS)), ARRIVALS, how)
        assert_nothing_is_left(platform)
    return result, spoils.spoilt


def said(number: int) -> list[int]:
    return list(dense_of(MODEL, ARRIVALS[number].tokens or (), OUTPUT).tokens)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_request_whose_rows_cannot_be_read_any_more_is_computed_again_and_says_the_same(times: int) -> None:
    result, spoilt = serve(times, recomputes=3)
    assert spoilt == times
    assert not result.failures
    assert [list(each.tokens) for each in result.requests] == [said(number) for number in range(3)]
    assert [each.losses for each in result.requests] == [times, 0, 0]
    assert result.losses == times
    assert result.requests[0].preemptions >= times
    assert (result.requests[0].recomputed_tokens > 0) == (times > 0)
    assert result.as_dict()["losses"] == times


@pytest.mark.parametrize("recomputes", [0, 1, 2])
def test_a_request_that_loses_its_rows_once_too_often_fails_alone_with_the_error(recomputes: int) -> None:
    result, spoilt = serve(recomputes + 1, recomputes)
    assert spoilt == recomputes + 1
    assert list(result.failures) == ["r0"]
    assert "emu:pnm0: attend" in result.failures["r0"]
    assert "cannot be read" in result.failures["r0"]
    first, *others = result.requests
    assert list(first.tokens) == said(0)[: len(first.tokens)]
    assert first.losses == recomputes
    assert [list(each.tokens) for each in others] == [said(1), said(2)]


def rooms(path: Path) -> list[str]:
    """What became of the room of the first request's rows on the near memory, region by region."""
    entries = read_recording(path).in_order()
    nbytes = next(entry.nbytes for entry in entries if isinstance(entry, Alloc))
    names: dict[int, str] = {}
    told = []
    for entry in entries:
        if isinstance(entry, Alloc) and entry.nbytes == nbytes:
            names[entry.region] = "abcdef"[len(names)]
            told.append(f"take {names[entry.region]}")
        elif isinstance(entry, Free) and entry.region in names:
            told.append(f"give {names[entry.region]}")
    return told


def test_room_that_cannot_be_read_is_given_back_when_its_request_has_other_room(tmp_path: Path) -> None:
    recorded = {"kind": "recorded", "file": str(tmp_path / "pnm.jsonl")}
    result, _ = serve(2, 3, [recorded])
    assert [list(each.tokens) for each in result.requests] == [said(number) for number in range(3)]
    assert rooms(tmp_path / "pnm.jsonl")[:5] == ["take a", "take b", "give a", "take c", "give b"]


def test_where_there_is_no_other_room_the_same_is_taken_again(tmp_path: Path) -> None:
    recorded = {"kind": "recorded", "file": str(tmp_path / "pnm.jsonl")}
    result, _ = serve(2, 3, [recorded], **{"devices.pnm0.capacity": 200_000})
    assert [list(each.tokens) for each in result.requests] == [said(number) for number in range(3)]
    assert rooms(tmp_path / "pnm.jsonl")[:5] == ["take a", "give a", "take b", "give b", "take c"]
