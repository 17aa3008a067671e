"""Sizes of windows from a trace: what a profile counts, how a budget is divided, and what a file may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.window_sizes import METHODS, SizeProfile, WindowSizes, chosen_sizes

Int64 = NDArray[np.int64]


def trace(steps: list[list[list[list[int]]]]) -> list[Int64]:
    return [np.array(step, dtype=np.int64) for step in steps]


def drifting(layers: int = 2, heads: int = 3, entries: int = 60, steps: int = 20) -> list[Int64]:
    """Rankings by scores that change slowly, in some heads more slowly than in others."""
    random = np.random.default_rng(7)
    persistence = np.linspace(0.2, 0.98, layers * heads).reshape(layers, heads, 1)
    scores = random.standard_normal((layers, heads, entries))
    ranked = []
    for _ in range(steps):
        noise = random.standard_normal(scores.shape)
        scores = persistence * scores + np.sqrt(1 - persistence**2) * noise
        ranked.append(np.argsort(-scores, axis=2)[:, :, :40])
    return ranked


def hits_by_hand(steps: list[Int64], k: int, capacity: int) -> Int64:
    """Look-ahead with all candidates ranked: what is held is the best of what was held and what was chosen."""
    layers, heads, _ = steps[0].shape
    hits = np.zeros((layers, heads), dtype=np.int64)
    for layer in range(layers):
        for head in range(heads):
            held: set[int] = set()
            for step in steps:
                ranked = step[layer, head].tolist()
                hits[layer, head] += len(held & set(ranked[:k]))
                held |= set(ranked[:k])
                held = set(sorted(held, key=ranked.index)[:capacity])
    return hits


def test_a_profile_counts_the_chosen_entries_that_were_held() -> None:
    """Two of four are chosen: first 0 and 1, then 1 and 2, then 3 and 0, then 2 and 1."""
    steps = trace([[[[0, 1, 2, 3]]], [[[1, 2, 0, 3]]], [[[3, 0, 1, 2]]], [[[2, 1, 0, 3]]]])
    profile = SizeProfile.measured(steps, 2, (0, 0.5, 1, 2))
    assert profile.chosen.tolist() == [[8]]
    assert profile.hits.tolist() == [[[0, 0, 1, 4]]]
    assert profile.capacities().tolist() == [0, 1, 2, 4]


def test_a_profile_agrees_with_sets_in_every_layer_and_head() -> None:
    steps = [np.argsort(-np.random.default_rng(step).standard_normal((2, 3, 30)), axis=2) for step in range(12)]
    profile = SizeProfile.measured(steps, 5, (0, 1, 1.5, 4))
    for number, capacity in enumerate((0, 5, 7, 20)):
        assert (profile.hits[:, :, number] == hits_by_hand(steps, 5, capacity)).all()


def test_a_profile_of_ranked_entries_is_made_with_the_rule_that_is_asked_for() -> None:
    by_rank = SizeProfile.measured(drifting(), 6, (1.5,), "la")
    by_age = SizeProfile.measured(drifting(), 6, (1.5,), "lru")
    assert (by_rank.eviction, by_age.eviction) == ("la", "lru")
    assert (by_rank.hits != by_age.hits).any()


def test_shorter_rankings_are_padded() -> None:
    profile = SizeProfile.measured(trace([[[[0, 1, -1]]], [[[1, -1, -1]]]]), 2, (1,))
    assert (profile.chosen.tolist(), profile.hits.tolist()) == ([[3]], [[[1]]])


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_is_never_exceeded(method: Any) -> None:
    profile = SizeProfile.measured(drifting(), 6, (0, 0.5, 1, 2, 3))
    for budget in (0, 1, 17, 36, 59, 108, 500):
        sizes = chosen_sizes(profile, budget, method)
        assert sizes.capacity(6).sum() <= budget
        assert sizes.capacity(6).shape == (2, 3)


def test_sizes_by_head_hit_more_often_than_one_size_and_never_less() -> None:
    profile = SizeProfile.measured(drifting(), 6, (0, 0.5, 1, 2, 3))
    hits = {
        method: [profile.hits_of(chosen_sizes(profile, budget, method)) for budget in (6, 36, 54, 72, 90)]
        for method in METHODS
    }
    assert hits["best"] == hits["optimum"]
    assert all(o >= g >= u for o, g, u in zip(hits["optimum"], hits["greedy"], hits["uniform"], strict=True))
    assert hits["greedy"][2] > hits["uniform"][2]


def test_heads_that_gain_nothing_get_nothing() -> None:
    """Head 0 chooses anew in every step, head 1 always the same."""
    steps = trace([[[[2 * step, 2 * step + 1], [0, 1]]] for step in range(8)])
    sizes = chosen_sizes(SizeProfile.measured(steps, 2, (0, 1)), 2)
    assert sizes.multiples == ((0.0, 1.0),)


def test_sizes_hold_for_another_k() -> None:
    sizes = WindowSizes(((2.0, 0.5), (0.7, 0.0)))
    assert sizes.capacity(51).tolist() == [[102, 25], [35, 0]]
    assert sizes.capacity(10).tolist() == [[20, 5], [7, 0]]
    assert sizes.capacity(10).dtype == np.int64


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    profile = SizeProfile.measured(drifting(), 6, (0, 0.5, 1, 2, 3), "lfu")
    sizes = chosen_sizes(profile, 40, made_from=("drifting, 20 steps",))
    sizes.save(tmp_path / "sizes.json")
    assert WindowSizes.load(tmp_path / "sizes.json") == sizes
    assert (sizes.k, sizes.eviction, sizes.made_from) == (6, "lfu", ("drifting, 20 steps",))
    assert [path.name for path in tmp_path.iterdir()] == ["sizes.json"]


def test_sizes_of_another_model_are_refused() -> None:
    sizes = WindowSizes.uniform(4, 2, 2)
    sizes.check(4, 2)
    with pytest.raises(ConfigurationError, match="of 4 layers and 2 KV heads; the model has 4 and 3"):
        sizes.check(4, 3)


# -- files that are wrong -----------------------------------------------------------------------------------------


def saved(path: Path) -> dict[str, Any]:
    WindowSizes(((1.0, 2.0), (0.5, 0.0)), 8, "la", ("x",)).save(path)
    table: dict[str, Any] = json.loads(path.read_text())
    return table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "tierloop-locality"}, "it does not say tierloop-window-sizes, version 1"),
        ({"version": 2}, "it does not say tierloop-window-sizes, version 1"),
        ({"multiples": None}, "multiples must be a list of lists"),
        ({"multiples": [1.0]}, "multiples must be a list of lists"),
        ({"multiples": []}, "window sizes of 0 layers; 1 to 4,096 are allowed"),
        ({"multiples": [[0.0]] * 4097}, "window sizes of 4097 layers"),
        ({"multiples": [[]]}, "window sizes of 0 heads"),
        ({"multiples": [[1.0], [1.0, 2.0]]}, "of 2 heads in layer 1 and 1 in layer 0"),
        ({"multiples": [[1.0, "2"]]}, "layer 0, head 1: '2' is no number"),
        ({"multiples": [[True]]}, "layer 0, head 0: 'True' is no number"),
        ({"multiples": [[1.0], [-0.5]]}, "layer 1, head 0: it must be from 0 to 1,048,576"),
        ({"multiples": [[10**400]]}, "layer 0, head 0: it must be from 0"),
        ({"multiples": [[float("nan")]]}, "layer 0, head 0: it must be from 0"),
        ({"multiples": [[float("inf")]]}, "layer 0, head 0: it must be from 0"),
        ({"k": 0}, "k is '0'; it must be a whole number from 1 on"),
        ({"k": 1.5}, "k is '1.5'"),
        ({"k": True}, "k is 'True'"),
        ({"eviction": "fifo"}, "eviction is 'fifo'; it must be one of la, lru, lfu"),
        ({"eviction": ["la"]}, "it must be one of la, lru, lfu"),
        ({"made_from": "x"}, "made_from must be a list of texts"),
        ({"made_from": [1]}, "made_from must be a list of texts"),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(saved(path) | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        WindowSizes.load(path)
    assert str(caught.value).startswith(f"{path}: no window sizes: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"k": ' + b"9" * 5000 + b"}"])
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "sizes.json"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="no window sizes: ") as caught:
        WindowSizes.load(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        WindowSizes.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        WindowSizes.load(tmp_path)
    saved(tmp_path / "sizes.json")
    monkeypatch.setattr("tierloop.runtime.checked_json.LARGEST_FILE", 20)
    with pytest.raises(ConfigurationError, match="it is larger than 20 bytes"):
        WindowSizes.load(tmp_path / "sizes.json")


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_has_sizes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "sizes.json"
    saved(path)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged))
    said = ""
    try:
        sizes = WindowSizes.load(path)
    except ConfigurationError as error:
        said = str(error)
    else:
        assert (sizes.capacity(8) >= 0).all()
    assert "\n" not in said


# -- other bad input ----------------------------------------------------------------------------------------------

ONE = trace([[[[0, 1]]]])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: SizeProfile.measured([], 1), "a trace without steps"),
        (lambda: SizeProfile.measured([ONE[0], ONE[0][0]], 1), r"step 1 of the trace is int64 \(1, 2\)"),
        (lambda: SizeProfile.measured([ONE[0], np.tile(ONE[0], (1, 2, 1))], 1), "of the same layers and heads"),
        (lambda: SizeProfile.measured([ONE[0].astype(np.int32)], 1), "step 0 of the trace is int32"),
        (lambda: SizeProfile.measured(trace([[[[0, 0]]]]), 2), "cannot be profiled: chosen of layer 0.*named twice"),
        (lambda: SizeProfile.measured(trace([[[[0, -3]]]]), 2), "cannot be profiled: .*-3 is none of 1 entries"),
        (lambda: SizeProfile.measured(ONE, 0), "K 0: at least one"),
        (lambda: SizeProfile.measured(ONE, 1, ()), "different multiples of K are needed"),
        (lambda: SizeProfile.measured(ONE, 1, (1, 0)), "the smallest first"),
        (lambda: SizeProfile.measured(ONE, 1, (1, 1)), "different multiples"),
        (lambda: SizeProfile.measured(ONE, 1, (-1, 1)), "different multiples"),
        (lambda: SizeProfile.measured(ONE, 1, (float("nan"),)), "different multiples"),
        (lambda: chosen_sizes(SizeProfile.measured(ONE, 2, (1,)), 1), "window sizes for 1 entries .*nothing fits"),
        (lambda: chosen_sizes(SizeProfile.measured(ONE, 1), 1, "lucky"), "method 'lucky': it must be one of best,"),  # type: ignore[arg-type]
        (lambda: SizeProfile.measured(ONE, 1, (1,)).hits_of(WindowSizes.uniform(1, 1, 2)), "were not all profiled"),
        (lambda: SizeProfile.measured(ONE, 1, (1,)).hits_of(WindowSizes.uniform(1, 2, 1)), "1 layers and 2 KV heads"),
        (lambda: WindowSizes(((1.0, float("nan")),)), "layer 0, head 1: a window of nan · K"),
        (lambda: WindowSizes.uniform(1, 1, 1).capacity(-1), "K -1: it must be at least 0"),
    ],
)
def test_bad_input_is_refused(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        act()
