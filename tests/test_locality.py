"""The locality model: what it finds in recorded selections, and that what it draws is like them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.blocks import KVShape
from tierloop.runtime.decisions import Grouping, Question
from tierloop.runtime.locality import FOLDER, PARTS, LayerLocality, LocalityModel, find_locality, fit_locality
from tierloop.runtime.locality_selection import LocalitySelection
from tierloop.runtime.selection import Origin, RecordedSelection, SelectionRecord

Int64 = NDArray[np.int64]
EVEN = (1 / PARTS,) * PARTS
OLD_AND_NEW = (*(0.125,) * 4, *(0.0,) * (PARTS - 8), *(0.125,) * 4)


def question(
    step: int, lengths: list[int], k: int, first: int = 0, unit: int = 1, layer: int = 0, label: str = "topk"
) -> Question:
    held = np.array(lengths, dtype=np.int64)
    return Question(label, layer, ("r",), step, held, np.full_like(held, first), unit, k)


def one_layer(persistence: float, run: float, positions: tuple[float, ...] = EVEN) -> LocalityModel:
    return LocalityModel((LayerLocality(persistence, run, positions),), 1, ("m",), 100)


def record(decisions: Any, steps: int, n: int, k: int, lists: int = 4) -> SelectionRecord:
    kept = RecordedSelection(Origin("m", "f", KVShape(1, 1, 1, 8, 8), "p", {}, (n,), steps), decisions)
    for step in range(steps):
        kept.answer(question(step, [n] * lists, k), None)
    return kept.record


@pytest.mark.parametrize(("persistence", "run"), [(0.0, 1.0), (0.5, 2.0), (0.8, 4.0), (0.9, 8.0), (1.0, 3.0)])
def test_a_fit_finds_the_numbers_that_a_selection_was_drawn_with(persistence: float, run: float) -> None:
    drawn = record(LocalitySelection(one_layer(persistence, run, OLD_AND_NEW), 1), 30, 8000, 256)
    (fitted,) = fit_locality([drawn]).layers
    assert fitted is not None
    assert fitted.persistence == pytest.approx(persistence, abs=0.03)
    assert fitted.run_tokens == pytest.approx(run, rel=0.25)
    assert sum(fitted.positions[4:-4]) < 0.02


def test_what_chance_does_is_not_taken_for_locality() -> None:
    class Chance:
        def answer(self, asked: Question, read: Int64 | None) -> Int64:
            random = np.random.default_rng(asked.step)
            return np.stack([random.permutation(n)[: asked.k] for n in asked.lengths.tolist()])

        def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
            return np.zeros((grouping.lists, grouping.candidates), dtype=np.int64)

    (fitted,) = fit_locality([record(Chance(), 40, 1000, 300)]).layers
    assert fitted is not None
    assert fitted.persistence < 0.03
    assert fitted.run_tokens == pytest.approx(1, abs=0.05)
    assert max(fitted.positions) < 1.2 / PARTS


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    k=st.integers(1, 400),
    persistence=st.floats(0, 1),
    run=st.floats(1, 200),
    grow=st.integers(0, 300),
)
def test_answers_name_every_candidate_at_most_once_and_fill_up(
    lengths: list[int], k: int, persistence: float, run: float, grow: int
) -> None:
    selection = LocalitySelection(one_layer(persistence, run), 1)
    for step in range(3):
        longer = [n + step * grow for n in lengths]
        answer = selection.answer(question(step, longer, k + step), None)
        assert answer.shape == (len(lengths), k + step)
        for mine, n in zip(answer, longer, strict=True):
            picked = mine[mine >= 0]
            assert len(set(picked.tolist())) == len(picked) == min(n, k + step)
            assert int(picked.max()) < n
            assert (mine[len(picked) :] == -1).all()


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    model = one_layer(0.7, 3.0)
    first, again, other = (record(LocalitySelection(model, 1, seed), 5, 4000, 100) for seed in (1, 1, 2))
    pairs = zip(first.answers.values(), again.answers.values(), other.answers.values(), strict=True)
    for mine, same, different in pairs:
        assert np.array_equal(mine.answer, same.answer)
        assert not np.array_equal(mine.answer, different.answer)


def test_what_is_kept_keeps_its_order_and_stands_first() -> None:
    selection = LocalitySelection(one_layer(0.6, 2.0), 1)
    before, after = (selection.answer(question(step, [1 << 20] * 3, 200), None) for step in (0, 1))
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        kept = [c for c in old if c in set(new)]
        assert 60 < len(kept) < 180
        assert new[: len(kept)] == kept


def test_candidates_are_followed_when_the_list_begins_elsewhere_or_has_another_unit() -> None:
    selection = LocalitySelection(one_layer(1.0, 1.0), 1)
    before = selection.answer(question(0, [1000], 50, first=0), None)
    moved = selection.answer(question(1, [1000], 50, first=100), None)
    assert set((before[before >= 100] - 100).tolist()) <= set(moved[0].tolist())
    blocks = selection.answer(question(2, [200], 20, first=100, unit=10), None)
    assert set(blocks[0].tolist()) <= set((moved[0] // 10).tolist()) or len(set((moved[0] // 10).tolist())) < 20


def test_layers_and_labels_are_drawn_independently_of_each_other() -> None:
    model = one_layer(0.5, 1.0)
    alone = LocalitySelection(model, 2)
    mixed = LocalitySelection(model, 2)
    for step in range(3):
        mixed.answer(question(step, [900], 30, layer=1), None)
        mixed.answer(question(step, [900], 30, label="other"), None)
        expected = alone.answer(question(step, [900], 30), None)
        assert np.array_equal(mixed.answer(question(step, [900], 30), None), expected)


def test_a_layer_that_nobody_recorded_has_the_numbers_of_the_nearest() -> None:
    low, high = LayerLocality(0.1, 1.0, EVEN), LayerLocality(0.9, 1.0, EVEN)
    model = LocalityModel((None, low, None, high), 1)
    assert [model.layer(i, 4) for i in range(4)] == [low, low, low, high]
    assert [model.layer(i, 8) for i in (0, 3, 7)] == [low, low, high]
    with pytest.raises(ConfigurationError, match="at least one layer"):
        LocalityModel((None,), 1)


def test_records_of_different_units_are_not_taken_together() -> None:
    kept = RecordedSelection(Origin("m", "f", KVShape(1, 1, 1, 8, 8), "p"), LocalitySelection(one_layer(0.5, 1), 1))
    kept.answer(question(0, [100], 10, unit=64), None)
    with pytest.raises(ConfigurationError, match=r"units \[1, 64\]"):
        fit_locality([kept.record, record(LocalitySelection(one_layer(0.5, 1), 1), 2, 100, 10)])


def test_a_model_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    model = fit_locality([record(LocalitySelection(one_layer(0.4, 2.5, OLD_AND_NEW), 1), 8, 500, 40)])
    path = tmp_path / "model.json"
    path.write_text(model.to_json())
    assert LocalityModel.load(path) == model
    assert "persistence 0." in model.lines()[1]


def good() -> dict[str, Any]:
    return dict(json.loads(one_layer(0.5, 2.0).to_json()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not say tierloop-locality, version 1"),
        ({"version": 2}, "does not say tierloop-locality, version 1"),
        ({"unit": 0}, "unit is 0; it must be a whole number from 1"),
        ({"unit": 1.5}, "unit is 1.5"),
        ({"longest": "x"}, "longest is 'x'"),
        ({"models": 3}, "models must be a list of texts"),
        ({"layers": 3}, "layers must be a list"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [None]}, "at least one layer"),
        ({"layers": [3]}, "layer 0 is no table"),
        ({"layers": [{"persistence": 2, "run_tokens": 1, "positions": list(EVEN)}]}, "persistence is 2"),
        ({"layers": [{"persistence": 0.5, "run_tokens": 0, "positions": list(EVEN)}]}, "run_tokens is 0"),
        ({"layers": [{"persistence": 0.5, "run_tokens": float("nan"), "positions": list(EVEN)}]}, "run_tokens is nan"),
        ({"layers": [{"persistence": 0.5, "run_tokens": 1, "positions": [1.0]}]}, "positions must be 32"),
        ({"layers": [{"persistence": 0.5, "run_tokens": 1, "positions": [1.0] * 32}]}, "positions sum to 32"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(good() | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        LocalityModel.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[" * 100_000, b"nothing", b"[]"])
def test_files_that_are_no_json_are_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="no locality model: ") as caught:
        LocalityModel.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        LocalityModel.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match=r"'smollm'.*did you mean 'smollm2-135m'"):
        find_locality("smollm")


def test_what_ships_is_fitted_to_smollm2_rows_and_is_local() -> None:
    model = LocalityModel.load(find_locality("smollm2-135m"))
    assert FOLDER.is_dir()
    assert (model.unit, model.models, len(model.layers)) == (1, ("smollm2-135m",), 30)
    layers = [layer for layer in model.layers if layer is not None]
    assert np.mean([layer.persistence for layer in layers]) > 0.3
    assert np.mean([layer.run_tokens for layer in layers]) > 1


def test_answers_for_another_model_or_a_longer_prompt_are_called_extrapolated() -> None:
    selection = LocalitySelection(one_layer(0.5, 1), 1)
    assert selection.beyond("other", 1000) == []
    selection.answer(question(0, [50], 5), None)
    assert selection.beyond("m", 100) == []
    reasons = selection.beyond("other", 101)
    assert [r.split(" of ")[0] for r in reasons] == ["the selection has the locality", "locality was fitted to prompts"]


def test_groups_are_equal_and_neighbours_are_never_in_one() -> None:
    labels = LocalitySelection(one_layer(0.5, 1), 1).group(Grouping("clusters r", 0, "r", 50, 3, 100, 7), None)
    assert labels.shape == (3, 100)
    assert set(np.bincount(labels[0]).tolist()) == {14, 15}
    assert (np.diff(labels) != 0).all()
    assert (labels == labels[0]).all()
