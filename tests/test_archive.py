"""Archives: entries come back as they were laid down, media blocks are counted, and time is the same without bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive_rig import (
    DRIVE,
    ENTRIES,
    MOST,
    NOTES,
    SHAPE,
    Content,
    adopted,
    content_of,
    machine,
    new,
    order_of,
    read_entries,
    run,
)
from tests.seeded import bytes_of
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Segment
from tierloop.devices.waiting import wait
from tierloop.runtime.archive import Archive
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.engine import Engine
from tierloop.runtime.entries import EntryShape

SIZE = ENTRIES.nbytes
LAYER = 1


@st.composite
def appends(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Cuts of the entries of a layer into a few appends."""
    cuts = sorted(draw(st.sets(st.integers(1, MOST - 1), max_size=5)))
    return list(zip([0, *cuts], [*cuts, MOST], strict=True))


@settings(max_examples=25, deadline=None)
@given(cuts=appends(), seed=st.integers(0, 1 << 20), wanted=st.integers(0, 60))
def test_any_entries_are_found_in_the_blocks_that_media_names(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, int]], seed: int, wanted: int
) -> None:
    with machine(tmp_path_factory.mktemp("m")) as engine:
        archive, content = new(engine), Content()
        for first, last in cuts:
            order = order_of(seed + first, first, last)
            data = bytes_of(seed + first, *order.shape, SIZE)
            wait(engine.platform.clock, archive.put(LAYER, order, data))
            content.lay(LAYER, order, data)
        rng = np.random.default_rng(seed)
        heads, entries = rng.integers(0, SHAPE.num_kv_heads, wanted), rng.integers(0, MOST, wanted)
        found = run(engine, lambda: read_entries(engine, archive, LAYER, heads, entries))
        assert found == [content.entries[LAYER, h, e] for h, e in zip(heads.tolist(), entries.tolist(), strict=True)]
        media = archive.media(LAYER, heads, entries)
        grid = archive.geometry.grid
        begin, end = media.spans.array[:, 0], media.spans.array.sum(axis=1)
        assert not (media.spans.array % grid).any()
        assert (begin[1:] > end[:-1]).all(), "spans ascend, and neighbours are one"
        assert media.useful == wanted * SIZE
        blocks = {b for at in _places(archive, heads, entries) for b in range(at // grid, (at + SIZE - 1) // grid + 1)}
        assert media.media == media.spans.nbytes == len(blocks) * grid, "every block that holds some of it, once"
        archive.close(keep=False)


def _places(archive: Archive, heads: np.ndarray, entries: np.ndarray) -> list[int]:
    """Where entries begin in the region, by their media alone."""
    made = []
    for head, entry in zip(heads, entries, strict=True):
        one = archive.media(LAYER, np.array([head]), np.array([entry]))
        made.append(int(one.spans.array[0, 0] + one.offset[0]))
    return made


def test_entries_of_one_append_lie_side_by_side_in_the_given_order(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        order = order_of(3, 0, 30)
        archive.put(0, order, bytes_of(1, *order.shape, SIZE))
        for head in range(2):
            at = [
                int(m.spans.array[0, 0] + m.offset[0])
                for entry in order[head]
                for m in [archive.media(0, np.array([head]), np.array([entry]))]
            ]
            assert np.diff(at).tolist() == [SIZE] * 29
            assert at[0] % archive.geometry.grid == 0
        archive.close(keep=False)


def test_a_segment_is_read_sequentially(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive, content = new(engine), Content()
        for first, last in ((0, 26), (26, 40)):
            order = order_of(first, first, last)
            data = bytes_of(first, *order.shape, SIZE)
            archive.put(0, order, data)
            content.lay(0, order, data)
        run(engine, lambda: archive.commit([1], 1))
        media = archive.segment_of(0)
        assert len(media.spans) == SHAPE.num_kv_heads
        assert media.useful == 2 * 40 * SIZE
        assert media.media == 2 * (archive.stride(26) + archive.stride(14))
        assert run(engine, lambda: content_of(engine, archive)).entries == content.entries
        archive.close(keep=False)


def test_what_is_taken_from_a_segment_is_what_would_have_been_put(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive, content = new(engine), Content()
        order = order_of(0, 4, 11)
        data = bytes_of(0, *order.shape, SIZE)
        stride = archive.stride(7)
        source = engine.scratch(engine.host, 2 * stride + 64)
        padded = np.zeros((2, stride), dtype=np.uint8)
        padded[:, : 7 * SIZE] = data.reshape(2, -1)
        there = engine.write(source.at(64, 2 * stride), padded.reshape(-1))
        archive.take(LAYER, order, source.at(64, 2 * stride), [there])
        content.lay(LAYER, order, data)
        run(engine, lambda: archive.commit([5, 6], 1))
        assert run(engine, lambda: content_of(engine, archive)).entries == content.entries
        archive.close(keep=True)
        assert run(engine, lambda: adopted(engine)).entries == content.entries, "its checksums are those of the rows"


def test_bytes_that_are_taken_come_from_the_host_and_go_to_the_drive(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        order = order_of(0, 0, 20)
        source = engine.scratch(engine.host, 2 * archive.stride(20))
        done = archive.take(0, order, source.all())
        wait(engine.platform.clock, done)
        assert done.device == DRIVE
        assert done.traffic.written == {DRIVE: 2 * archive.stride(20)}
        archive.close(keep=False)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (np.array([[0, 1], [1, 1]]), "comes twice"),
        (np.array([[0, MOST], [0, 1]]), f"0 to {MOST - 1}"),
        (np.array([[-1, 0], [0, 1]]), f"0 to {MOST - 1}"),
        (np.array([[9, 0], [0, 1]]), "in the archive already"),
        (np.array([[0, 1]]), r"int64 \(2, n\)"),
        (np.array([[0.0, 1.0], [0.0, 1.0]]), "float64"),
    ],
)
def test_an_order_that_is_none_is_refused_and_changes_nothing(tmp_path: Path, order: np.ndarray, problem: str) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        first = order_of(0, 8, 12)
        archive.put(0, first, bytes_of(0, *first.shape, SIZE))
        with pytest.raises(ValueError, match=problem):
            archive.put(0, order, np.zeros((*order.shape, SIZE), dtype=np.uint8))
        assert archive.count(0) == 4
        assert archive.put(0, order_of(0, 0, 8), np.zeros((2, 8, SIZE), dtype=np.uint8))
        archive.close(keep=False)


def test_no_entries_take_no_command(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive, none = new(engine), np.empty((2, 0), dtype=np.int64)
        assert archive.put(0, none, np.empty((2, 0, SIZE), dtype=np.uint8)) == []
        media = archive.media(0, none[0], none[0])
        assert (len(media.spans), len(media.offset), media.useful, media.media) == (0, 0, 0, 0)
        assert archive.segment_of(0).media == 0
        with pytest.raises(ValueError, match="n at least 1"):
            archive.take(0, none, engine.scratch(engine.host, 64).all())
        archive.close(keep=False)


def test_bytes_of_another_shape_are_refused(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive, order = new(engine), order_of(0, 0, 3)
        with pytest.raises(ValueError, match=r"uint8 \(2, 3, 160\)"):
            archive.put(0, order, np.zeros((2, 3, 128), dtype=np.uint8))
        with pytest.raises(ValueError, match="phantom runs only"):
            archive.put(0, order, None)
        with pytest.raises(ValueError, match="the segment has 64"):
            archive.take(0, order, engine.scratch(engine.host, 64).all())
        with pytest.raises(ValueError, match="layer 2 of 2"):
            archive.put(2, order, np.zeros((2, 3, SIZE), dtype=np.uint8))
        assert archive.count(0) == 0
        archive.close(keep=False)


@pytest.mark.parametrize(("head", "entry"), [(0, 5), (2, 0), (-1, 0), (0, -1), (0, MOST)])
def test_media_of_an_entry_that_is_not_there_is_an_error_that_names_it(tmp_path: Path, head: int, entry: int) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        order = order_of(0, 0, 5)
        archive.put(0, order, bytes_of(0, *order.shape, SIZE))
        with pytest.raises(ValueError, match=f"no entry {entry} of layer 0, head {head}"):
            archive.media(0, np.array([0, head]), np.array([1, entry]))
        archive.close(keep=False)


def test_a_full_segment_is_an_error_that_says_how_much_is_left(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine, appends=1)
        for entry in range(3):
            order = np.full((2, 1), entry)
            archive.put(0, order, bytes_of(0, 2, 1, SIZE))
        with pytest.raises(TierTooSmall, match="is full: 1 entries take 4,096 bytes"):
            archive.put(0, np.full((2, 1), 3), bytes_of(0, 2, 1, SIZE))
        archive.close(keep=False)


def test_an_archive_that_does_not_fit_says_what_is_needed(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        with pytest.raises(TierTooSmall, match=r"emu:nvme is too small: [\d,]+ bytes are needed there for 100,000"):
            new(engine, most=100_000)
        archive = new(engine)
        archive.close(keep=False)


def test_an_archive_needs_a_persistent_memory(tmp_path: Path) -> None:
    with machine(tmp_path) as engine, pytest.raises(ConfigurationError, match="emu:dram is no persistent memory"):
        Archive(engine, "emu:dram", "r0", "model", ENTRIES, MOST, NOTES)


def test_a_note_replaces_the_one_before(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)

        async def use() -> None:
            for turn in range(8):
                archive.note("labels", 0, bytes_of(turn, 1_000 + turn))
                archive.note("labels", 1, bytes_of(100 + turn, 900))
                await archive.commit([turn], 1)
                assert (await archive.read_note("labels", 0)).tobytes() == bytes_of(turn, 1_000 + turn).tobytes()
                assert (await archive.read_note("labels", 1)).tobytes() == bytes_of(100 + turn, 900).tobytes()

        run(engine, use)
        archive.close(keep=False)


def test_a_note_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        with pytest.raises(ConfigurationError, match="layer 1 has no note 'centroids'"):
            run(engine, lambda: archive.read_note("centroids", 1))
        archive.close(keep=False)


@pytest.mark.parametrize(
    ("kind", "data", "problem"),
    [
        ("", np.zeros(4, dtype=np.uint8), "1 to 64 characters"),
        ("k" * 65, np.zeros(4, dtype=np.uint8), "1 to 64 characters"),
        ("k", np.zeros(4, dtype=np.int64), "uint8"),
        ("k", np.zeros(0, dtype=np.uint8), "at least 1"),
        ("k", np.zeros((2, 2), dtype=np.uint8), r"uint8 \(n,\)"),
    ],
)
def test_what_is_no_note_is_refused(tmp_path: Path, kind: str, data: np.ndarray, problem: str) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        with pytest.raises(ValueError, match=problem):
            archive.note(kind, 0, data)
        archive.close(keep=False)


def test_more_notes_than_there_is_room_for_are_an_error(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        with pytest.raises(TierTooSmall, match="notes are full"):
            archive.note("large", 0, np.zeros(1 << 20, dtype=np.uint8))
        archive.close(keep=False)


@pytest.mark.parametrize(("tokens", "length"), [([1, 2], 3), ([1, 2], -1), ([-1], 0), (list(range(2 * MOST + 4)), 5)])
def test_a_commit_of_what_cannot_be_is_refused(tmp_path: Path, tokens: list[int], length: int) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        with pytest.raises(ValueError, match="a commit has at most 83 tokens"):
            run(engine, lambda: archive.commit(tokens, length))
        archive.close(keep=False)


def test_all_that_was_taken_is_given_back(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        store = engine.platform.memory_owner(DRIVE)._store  # type: ignore[attr-defined]
        for keep in (False, True):
            archive = new(engine)
            archive.put(0, order_of(0, 0, 3), bytes_of(0, 2, 3, SIZE))
            archive.close(keep)
            assert store.used == 0, "nothing was committed, so nothing is kept"
        archive = new(engine)
        run(engine, lambda: archive.commit([], 0))
        archive.close(keep=False)
        assert store.used == 0


async def _typical(engine: Engine, name: str) -> list[int]:
    """What a request does with an archive; returns when each step ended."""
    phantom, clock, ended = engine.phantom, engine.platform.clock, []
    archive = new(engine, name)
    for layer in range(2):
        order = order_of(layer, 0, 30)
        archive.put(layer, order, None if phantom else bytes_of(layer, *order.shape, SIZE))
        archive.note("labels", layer, np.zeros(500, dtype=np.uint8))
    await archive.commit(list(range(64)), 61)
    ended.append(clock.now())
    order = order_of(7, 30, 36)
    source = engine.scratch(engine.host, 2 * archive.stride(6))
    await archive.take(1, order, source.all(), [])
    ended.append(clock.now())
    media = archive.media(1, np.array([0, 1, 1]), np.array([3, 9, 31]))
    await engine.read(Segment(media.region, media.spans), np.zeros(media.spans.nbytes, dtype=np.uint8))
    ended.append(clock.now())
    archive.note("labels", 1, np.zeros(700, dtype=np.uint8))
    await archive.commit(list(range(80)), 73)
    ended.append(clock.now())
    archive.close(keep=name == "kept")
    ended.append(clock.now())
    return ended


def test_a_phantom_run_takes_exactly_as_long(tmp_path: Path) -> None:
    times = []
    for phantom in (False, True):
        with machine(tmp_path, phantom=phantom) as engine:
            times.append([run(engine, lambda n=name: _typical(engine, n)) for name in ("dropped", "kept")])  # type: ignore[misc]
    assert times[0] == times[1]
    assert times[0][0][0] > 0


def test_a_phantom_run_has_nothing_to_adopt(tmp_path: Path) -> None:
    with (
        machine(tmp_path, phantom=True) as engine,
        pytest.raises(ConfigurationError, match="a phantom run keeps no bytes"),
    ):
        run(engine, lambda: Archive.adopt(engine, DRIVE, "r0", "model"))


def test_an_archive_is_in_one_pair_of_hands(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        archive = new(engine)
        with pytest.raises(ConfigurationError, match="somebody works with archive 'r0' already"):
            new(engine)
        archive.close(keep=False)
        new(engine).close(keep=False)


def test_entries_of_any_size_fit_a_segment(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        odd = EntryShape(SHAPE, 3)
        archive = Archive(engine, DRIVE, "odd", "model", odd, 21, 0)
        order = order_of(1, 0, 21)
        data = bytes_of(5, *order.shape, odd.nbytes)
        wait(engine.platform.clock, archive.put(0, order, data))
        heads, entries = np.repeat([0, 1], 21), np.tile(np.arange(21), 2)
        found = run(engine, lambda: read_entries(engine, archive, 0, heads, entries))
        rank = np.argsort(order, axis=1)
        assert found == [data[h, rank[h, e]].tobytes() for h, e in zip(heads, entries, strict=True)]
        archive.close(keep=False)
