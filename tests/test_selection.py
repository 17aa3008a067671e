"""Recorded selections: they come back from files as they were, and nothing else is taken for one."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
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
from tierloop.runtime.model_shapes import ShapeStages, find_model
from tierloop.runtime.selection import Origin, RecordedSelection, ReplayedSelection, SelectionRecord

SHAPE = KVShape(2, 2, 3, 8, 8, "bfloat16", 128, 64)
STAGES = replace(ShapeStages.of_shape(find_model("opt-125m")), projections=[], queries=[], finishes=[])
COSTS = [ShapeStages.of_shape(find_model("opt-125m")).head_cost] * 2
ORIGIN = Origin(
    "tiny",
    "ab" * 32,
    SHAPE,
    "topk-blocks",
    {"budget": 0.5, "shares": {"emu:dram": 1.0}},
    (100, 70),
    2,
    7,
    replace(STAGES, projections=COSTS, queries=COSTS, finishes=COSTS),
)


def question(step: int = 100, layer: int = 0, label: str = "topk", k: int = 3, unit: int = 64) -> Question:
    lengths = np.array([5, 9, 2, 4], dtype=np.int64)
    return Question(label, layer, ("a", "b"), step, lengths, np.array([0, 0, 64, 64], dtype=np.int64), unit, k)


def answer_of(asked: Question, seed: int = 0) -> NDArray[np.int64]:
    random = np.random.default_rng((seed, asked.step, asked.layer))
    answer = np.full((len(asked.lengths), asked.k), -1, dtype=np.int64)
    for row, length in zip(answer, asked.lengths.tolist(), strict=True):
        picked = random.permutation(length)[: asked.k]
        row[: len(picked)] = picked
    return answer


def grouping(step: int = 99, layer: int = 0, name: str = "a", groups: int = 4) -> Grouping:
    return Grouping(f"clusters {name}", layer, name, step, 3, 7, groups)


def labels_of(asked: Grouping) -> NDArray[np.int64]:
    random = np.random.default_rng((asked.step, asked.layer, len(asked.request)))
    return random.integers(0, asked.groups, (asked.lists, asked.candidates))


def recorded() -> SelectionRecord:
    selection = RecordedSelection(ORIGIN)
    for name in ("a", "bb"):
        for layer in (0, 1):
            taken = selection.group(grouping(layer=layer, name=name), labels_of(grouping(layer=layer, name=name)))
            assert np.array_equal(taken, labels_of(grouping(layer=layer, name=name)))
    for step in (100, 101):
        for layer in (0, 1):
            asked = question(step, layer)
            assert selection.answer(asked, answer_of(asked)) is not None
            selection.answer(asked, answer_of(asked, 1))
            other = question(step, layer, "hot", 2, 1)
            selection.answer(other, answer_of(other))
    return selection.record


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "selection.npz"
    recorded().save(path)
    return path


def test_a_record_comes_back_from_its_file_as_it_was(file: Path) -> None:
    kept, loaded = recorded(), SelectionRecord.load(file)
    assert loaded.origin == kept.origin
    assert list(loaded.answers) == list(kept.answers)
    for mine, theirs in zip(kept.answers.values(), loaded.answers.values(), strict=True):
        assert np.array_equal(mine.answer, theirs.answer)
        assert np.array_equal(mine.lengths, theirs.lengths)
        assert np.array_equal(mine.first, theirs.first)
        assert mine.unit == theirs.unit
    assert list(loaded.groups) == list(kept.groups)
    assert len(kept.groups) == 4
    for held, read in zip(kept.groups.values(), loaded.groups.values(), strict=True):
        assert np.array_equal(held.labels, read.labels)
        assert held.groups == read.groups == 4
    again = file.with_name("again.npz")
    loaded.save(again)
    assert again.read_bytes() == file.read_bytes()
    assert {path.name for path in file.parent.iterdir()} == {"selection.npz", "again.npz"}


def test_a_record_without_answers_or_stages_comes_back_too(tmp_path: Path) -> None:
    path = tmp_path / "empty.npz"
    SelectionRecord(replace(ORIGIN, stages=None)).save(path)
    assert SelectionRecord.load(path) == SelectionRecord(replace(ORIGIN, stages=None))


def test_a_replay_answers_what_was_answered_in_the_order_of_asking(file: Path) -> None:
    replayed = ReplayedSelection(SelectionRecord.load(file))
    for step in (100, 101):
        for layer in (1, 0):
            asked = question(step, layer)
            assert np.array_equal(replayed.answer(asked, None), answer_of(asked))
            assert np.array_equal(replayed.answer(asked, None), answer_of(asked, 1))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question(102), "no answer for topk, layer 0, position 102"),
        (question(100, 2), "no answer for topk, layer 2"),
        (question(100, 0, "top"), "no answer for top, layer 0"),
        (question(k=4), r"has \(4, 3\) \(lists, k\) for topk, layer 0, position 100, and not \(4, 4\)"),
        (question(unit=32), "has other units for topk"),
        (replace(question(), lengths=np.array([5, 9, 2, 5])), "has other lengths"),
        (replace(question(), first=np.array([0, 0, 64, 65])), "has other first positions"),
        (replace(question(), lengths=np.array([5]), first=np.array([0])), r"and not \(1, 3\)"),
    ],
)
def test_what_was_not_recorded_is_not_answered(asked: Question, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayedSelection(recorded()).answer(asked, None)


def test_a_question_is_answered_as_often_as_it_was_recorded() -> None:
    replayed = ReplayedSelection(recorded())
    replayed.answer(question(), None)
    replayed.answer(question(), None)
    with pytest.raises(ConfigurationError, match="no answer for topk"):
        replayed.answer(question(), None)


@pytest.mark.parametrize("names", [("a", "bb"), ("request0", "request1"), ("row 1", "1")])
def test_a_replay_groups_as_it_was_recorded_whatever_the_requests_are_called(
    file: Path, names: tuple[str, str]
) -> None:
    replayed = ReplayedSelection(SelectionRecord.load(file))
    for name, then in zip(names, ("a", "bb"), strict=True):
        for layer in (1, 0):
            labels = replayed.group(grouping(layer=layer, name=name), None)
            assert labels.dtype == np.int64
            assert np.array_equal(labels, labels_of(grouping(layer=layer, name=then)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (grouping(98), "no groups for clusters a, layer 0, position 98"),
        (grouping(layer=2), "no groups for clusters a, layer 2"),
        (grouping(groups=5), r"has \(3, 7, 4\) \(lists, candidates, groups\) for clusters a.*not \(3, 7, 5\)"),
        (replace(grouping(), candidates=8), r"and not \(3, 8, 4\)"),
        (replace(grouping(), label="others a"), "no groups for others a"),
    ],
)
def test_what_was_not_grouped_then_is_not_grouped(asked: Grouping, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayedSelection(recorded()).group(asked, None)


def test_nobody_groups_where_nothing_is_read() -> None:
    with pytest.raises(ConfigurationError, match="clusters a: a phantom run reads nothing"):
        RecordedSelection(ORIGIN).group(grouping(), None)


RIGHT: dict[str, Any] = {
    "shape": SHAPE,
    "policy": "topk-blocks",
    "options": {"shares": {"emu:dram": 1}, "budget": 0.5},
    "prompt_tokens": [100, 70],
    "steps": 2,
    "model": "tiny",
    "fingerprint": "ab" * 32,
}


def test_a_record_of_the_same_run_is_taken() -> None:
    ReplayedSelection(recorded()).check(**RIGHT)
    ReplayedSelection(recorded()).check(**(RIGHT | {"steps": 1, "model": None, "fingerprint": None}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "another run: model: other is asked for, tiny is recorded"),
        ({"fingerprint": "cd"}, "another run: weights"),
        ({"policy": "hybridgen"}, "another run: policy: hybridgen is asked for, topk-blocks is recorded"),
        ({"options": {"budget": 0.4}}, "another run: options"),
        ({"shape": replace(SHAPE, dtype="float16")}, "another run: shape: dtype: float16"),
        ({"shape": replace(SHAPE, block_tokens=64)}, "another run: shape: block_tokens: 64"),
        ({"shape": replace(SHAPE, num_kv_heads=4)}, "another run: shape: num_kv_heads"),
        ({"prompt_tokens": [100]}, r"another run: prompt tokens: \[100\] is asked for, \[100, 70\]"),
        ({"steps": 3}, "has 2 steps; 3 are asked for"),
    ],
)
def test_a_record_of_another_run_is_refused_with_what_differs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplayedSelection(recorded()).check(**(RIGHT | change))


# -- files that are none ------------------------------------------------------------------------------------------


def parts(file: Path) -> dict[str, NDArray[Any]]:
    with np.load(file) as held:
        return {name: held[name] for name in held.files}


def changed(header: NDArray[Any], **changes: Any) -> NDArray[Any]:
    table = json.loads(header.tobytes()) | changes
    return np.frombuffer(json.dumps(table).encode(), dtype=np.uint8)


def with_entry(
    place: tuple[int, int], value: int, name: str = "entries"
) -> Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]:
    def change(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        entries = arrays[name].copy()
        entries[place] = value
        return arrays | {name: entries}

    return change


def with_header(**changes: Any) -> Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]:
    return lambda arrays: arrays | {"header": changed(arrays["header"], **changes)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {k: v for k, v in a.items() if k != "lists"}, "its parts are .*; it must have header"),
        (lambda a: a | {"more": a["lists"]}, "its parts are"),
        (lambda a: a | {"entries": a["entries"].astype(np.int32)}, "entries is int32 of 2 dimensions; it must be <i8"),
        (lambda a: a | {"answers": a["answers"][None]}, "answers is int32 of 2 dimensions"),
        (lambda a: a | {"answers": a["answers"].astype(object)}, "answers is object of 1 dimensions"),
        (lambda a: a | {"entries": np.asfortranarray(a["entries"])}, "entries is int64 of 2 dimensions"),
        (lambda a: a | {"lists": np.zeros((4, 3), dtype=np.int64)}, "they must be"),
        (lambda a: a | {"lists": a["lists"][:-1]}, "counts of entries|more lists"),
        (lambda a: a | {"answers": a["answers"][:-1]}, "counts of entries"),
        (lambda a: a | {"answers": a["answers"] + 100}, "name candidates that there are not"),
        (lambda a: a | {"answers": a["answers"] - 9}, "name candidates that there are not"),
        (lambda a: a | {"lists": -a["lists"]}, "numbers below 0"),
        (with_entry((0, 0), -1), "numbers below 0"),
        (with_entry((0, 1), 1 << 62), "beyond reason"),
        (with_entry((0, 2), 9), "a label that the header has not"),
        (with_entry((0, 3), 1 << 30), "more lists or answers than there are"),
        (with_entry((0, 5), 0), "a unit of 0"),
        (with_entry((1, 6), 5), "counts of entries"),
        (with_entry((0, 4), 1 << 20), "more lists or answers than there are"),
        (lambda a: a | {"groupings": a["groupings"][:, :5]}, r"it must be \(n, 6\)"),
        (lambda a: a | {"groupings": -a["groupings"]}, "groupings has numbers below 0"),
        (with_entry((0, 0), 1 << 50, "groupings"), "groupings has numbers below 0 or beyond reason"),
        (with_entry((1, 2), 5, "groupings"), "groupings names a label that the header has not"),
        (with_entry((1, 3), 1 << 39, "groupings"), "more candidates than there are in grouped"),
        (with_entry((1, 4), 60, "groupings"), "more candidates than there are in grouped"),
        (with_entry((1, 4), 8, "groupings"), "the counts of groupings are not those of grouped"),
        (with_entry((1, 5), 2, "groupings"), "grouped of step 99, layer 1 names groups that there are not"),
        (lambda a: a | {"grouped": a["grouped"] - 4}, "names groups that there are not"),
        (lambda a: a | {"grouped": a["grouped"].astype(np.int64)}, "grouped is int64 of 1 dimensions"),
        (lambda a: a | {"header": np.frombuffer(b"\xff{", dtype=np.uint8)}, "header is no JSON"),
        (lambda a: a | {"header": np.frombuffer(b"[" * 99_999, dtype=np.uint8)}, "header is no JSON"),
        (lambda a: a | {"header": np.frombuffer(b"[]", dtype=np.uint8)}, "does not say tierloop-selection"),
        (with_header(version=1), "version 1; this program reads 2"),
        (with_header(labels=[1]), "labels must be a list of texts"),
        (with_header(model=3), "model must be of type str"),
        (with_header(steps=True), "steps must be of type int"),
        (with_header(prompt_tokens=[-1]), "prompt_tokens must be"),
        (with_header(shape=None), "shape must be a table"),
        (with_header(shape={"num_layers": 2}), "shape: "),
        (with_header(stages={"hidden": 3}), "stages: "),
        (with_header(stages={"projections": [3], "queries": [], "finishes": []}), "stages: "),
    ],
)
def test_malformed_files_are_refused_in_one_line(
    file: Path, change: Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]], message: str
) -> None:
    np.savez(file, **change(parts(file)))  # type: ignore[arg-type]  # numpy types its keywords together
    with pytest.raises(ConfigurationError, match=message) as caught:
        SelectionRecord.load(file)
    assert str(caught.value).startswith(f"{file}: no recorded selection: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_says_it_is_huge_is_refused_before_anything_is_allocated(file: Path, tmp_path: Path) -> None:
    arrays = parts(file)
    bomb = io.BytesIO()
    np.lib.format.write_array_header_1_0(bomb, {"descr": "<i4", "fortran_order": False, "shape": (1 << 40,)})
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("header", "entries", "lists", "groupings", "grouped"):
            held = io.BytesIO()
            np.save(held, arrays[name])
            archive.writestr(f"{name}.npy", held.getvalue())
        archive.writestr("answers.npy", bomb.getvalue())
    with pytest.raises(ConfigurationError, match="answers says that it has 4398046511104 bytes, but has 0"):
        SelectionRecord.load(path)


def test_a_file_that_unpacks_to_more_than_is_allowed_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierloop.runtime.selection.LARGEST_FILE", 1000)
    with pytest.raises(ConfigurationError, match=r"unpacks to .* bytes; at most 1,000 are allowed"):
        SelectionRecord.load(file)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.npz"
    for data in (b"", b"PK\x03\x04" + b"\0" * 50, b"hello", b"\x93NUMPY\x01\0"):
        path.write_bytes(data)
        with pytest.raises(ConfigurationError, match=r"not a readable \.npz file"):
            SelectionRecord.load(path)
    with pytest.raises(ConfigurationError, match="there is no such file"):
        SelectionRecord.load(tmp_path / "nowhere.npz")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        SelectionRecord.load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_is_a_record(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "selection.npz"
    recorded().save(path)
    held = parts(path)
    packed = data.draw(st.booleans())
    if packed:
        damaged = bytearray(path.read_bytes())
    else:
        np.savez(path, **held)  # type: ignore[arg-type]  # numpy types its keywords together
        damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            record = SelectionRecord.load(path)
        except ConfigurationError as error:
            said = str(error)
        else:
            said = ""
            assert all((a.answer < a.lengths[:, None]).all() for a in record.answers.values())
            assert all((g.labels < g.groups).all() for g in record.groups.values())
    assert "\n" not in said
