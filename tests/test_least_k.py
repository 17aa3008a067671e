"""The offline search for K_min, on the recall model: what it finds is enough, and one row less is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.accuracy import Asked
from tierloop.runtime.least_k import LeastK, search_k_min
from tierloop.runtime.subjects import RecallSubject


def search(low: int, high: int, tolerance: float = 0.0, **options: Any) -> LeastK:
    asked = Asked(("hybridgen",), (0.5,), (640,), ("recall",), 4, 0, "float32", {"hybridgen": options})
    return search_k_min(RecallSubject(), asked, lambda: open_platform("laptop"), low, high, tolerance)


def test_one_row_is_enough_where_one_row_holds_the_answer() -> None:
    found = search(1, 16, timing="current")
    assert found.k_min == 1
    assert found.dense_score == 1
    assert [tried.k for tried in found.tried] == sorted({tried.k for tried in found.tried})


def test_more_rows_are_needed_where_most_of_the_choice_is_wrong() -> None:
    found = search(1, 512, timing="current", noise=0.9)
    assert found.k_min is not None
    assert found.k_min > 1
    scores = {tried.k: tried.score for tried in found.tried}
    assert scores[found.k_min] == 1
    assert scores[found.k_min - 1] < 1


def test_where_nothing_is_good_enough_it_says_so() -> None:
    found = search(1, 4, timing="current", noise=1.0)
    assert found.k_min is None
    assert "no K from 1 to 4" in found.reason


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search(5, 4), "K from 5 to 4"),
        (lambda: search(1, 4, tolerance=2), "--tolerance 2"),
        (lambda: search(1, 4, k=3), r"--option hybridgen\.k: the search sets it"),
        (lambda: search(1, 100_000), "--high 100000: more than the context, which is 640"),
    ],
)
def test_bad_input_is_named(call: Callable[[], LeastK], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_a_policy_without_k_is_refused() -> None:
    asked = Asked(("split-all",), (0.5,), (640,), ("recall",), 4)
    with pytest.raises(ConfigurationError, match="policy split-all has no option 'k'"):
        search_k_min(RecallSubject(), asked, lambda: open_platform("laptop"), 1, 4, 0.0)


def test_the_command_prints_what_was_tried(run_cli: Callable[..., Any]) -> None:
    code, out, err = run_cli(
        *("k-min", "--model", "recall", "--context", "640", "--task", "recall", "--prompts", "2", "--high", "4"),
        *("--low", "1", "--platform", "laptop", "--option", "hybridgen.timing=current", "--json"),
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["k_min"] == 1
    assert {"policy", "model", "k_min", "dense_score", "tolerance", "tried", "reason", "manifest"} == set(found)
