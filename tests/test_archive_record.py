"""What an archive reads from a medium is believed only as far as it has been checked, whatever its checksums say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive_rig import ENTRIES, order_of
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.regions import Region
from tierloop.runtime.archive_geometry import Geometry
from tierloop.runtime.archive_pages import BlockMap, Stored, runs_of, seal, unseal
from tierloop.runtime.archive_record import (
    Append,
    Commit,
    pack_appends,
    pack_table,
    unpack_appends,
    unpack_table,
)
from tierloop.runtime.blocks import KVShape, TierTooSmall
from tierloop.runtime.entries import EntryShape

GEOMETRY = Geometry(ENTRIES, 40, 3_000, 6, 4096)
PLACE = "emu:nvme: archive 'x'"
COMMIT = Commit(
    "x",
    "model",
    GEOMETRY,
    7,
    Stored(64, 0xABC, np.array([5])),
    (Stored(5_000, 1, np.array([9, 12])), Stored(10, 2, np.array([6]))),
    {("labels", 0): Stored(4_096, 3, np.array([7])), ("labels", 1): Stored(1, 4, np.array([8]))},
)
TABLE = json.loads(pack_table(COMMIT).tobytes())


def unpacked(content: Any) -> Commit:
    """What a table says."""
    return unpack_table(np.frombuffer(json.dumps(content).encode(), dtype=np.uint8), PLACE, GEOMETRY.nbytes)


def test_a_table_says_what_was_committed() -> None:
    found = unpacked(TABLE)
    assert (found.name, found.fingerprint, found.length) == ("x", "model", 7)
    assert found.geometry.nbytes == GEOMETRY.nbytes
    assert [s.blocks.tolist() for s in found.orders] == [[9, 12], [6]]
    assert {key: (s.nbytes, s.checksum, s.blocks.tolist()) for key, s in found.notes.items()} == {
        ("labels", 0): (4_096, 3, [7]),
        ("labels", 1): (1, 4, [8]),
    }


def test_a_table_is_as_long_whatever_the_checksums_are() -> None:
    other = replace(COMMIT, tokens=COMMIT.tokens._replace(checksum=0xFFFFFFFF))
    assert len(pack_table(other)) == len(pack_table(COMMIT))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a table."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [*([path] if path else []), *(p for key in keys for p in _paths(value[key], (*path, key)))]


@settings(max_examples=400, deadline=None)
@given(path=st.sampled_from(_paths(TABLE)), value=JSON)
def test_a_table_with_anything_in_it_is_checked(path: tuple[Any, ...], value: Any) -> None:
    content = json.loads(json.dumps(TABLE))
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        found = unpacked(content)
    except ConfigurationError as error:
        problem = str(error)
    else:
        problem = ""
        assert found.geometry.nbytes == GEOMETRY.nbytes
        assert 0 <= found.length <= GEOMETRY.most_tokens
        for stored in (found.tokens, *found.orders, *found.notes.values()):
            assert len(stored.blocks) == -(-stored.nbytes // 4096)
            assert all(0 <= block < GEOMETRY.blocks for block in stored.blocks.tolist())
        assert all(0 <= layer < 2 for _, layer in found.notes)
    assert not problem or (problem.startswith(PLACE) and "\n" not in problem)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b"{}", b'{"layers": 1e400}', b'{"name": NaN}']
)
def test_what_is_no_table_is_damaged(raw: bytes) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{PLACE}"):
        unpack_table(np.frombuffer(raw, dtype=np.uint8), PLACE, GEOMETRY.nbytes)


APPENDS = [Append(1, order_of(0, 3, 9).astype(np.int32), np.array([7, 8], dtype=np.uint32))] * 2


def test_orders_say_what_was_appended() -> None:
    found = unpack_appends(pack_appends(APPENDS), GEOMETRY)
    assert [(a.layer, a.order.tolist(), a.checksums.tolist()) for a in found] == [
        (a.layer, a.order.tolist(), a.checksums.tolist()) for a in APPENDS
    ]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_order_with_anything_in_it_is_checked(data: st.DataObject) -> None:
    raw = pack_appends(APPENDS).copy()
    numbers = raw[:40].view(np.int64)
    numbers[data.draw(st.integers(0, 4))] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 50))
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        found = unpack_appends(cut, GEOMETRY)
    except ValueError:
        return
    assert all(0 <= a.layer < 2 and a.order.shape[0] == 2 and a.order.shape[1] <= 40 for a in found)


def test_a_page_that_has_changed_does_not_open() -> None:
    page = seal(b"tl-test\0", 5, {"a": [1, 2]}, 512)
    assert unseal(b"tl-test\0", page) == (5, {"a": [1, 2]})
    assert unseal(b"tl-else\0", page) is None
    used = 28 + len('{"a":[1,2]}') + 4
    for at in range(used):
        changed = page.copy()
        changed[at] ^= 1
        assert unseal(b"tl-test\0", changed) is None
        assert unseal(b"tl-test\0", page[:at]) is None


def test_blocks_are_taken_side_by_side_while_there_are_enough() -> None:
    blocks = BlockMap(Region("m", "m", 0, 10 * 4096), 2, 10, 4096)
    first, second = blocks.take(3 * 4096), blocks.take(4096)
    assert (runs_of(first), runs_of(second)) == ([[2, 3]], [[5, 1]])
    blocks.give(first)
    assert runs_of(blocks.take(4 * 4096)) == [[6, 4]]
    assert runs_of(blocks.take(2 * 4096)) == [[2, 2]]
    with pytest.raises(TierTooSmall, match="4,097 bytes are to come, 4,096 are free"):
        blocks.take(4097)
    blocks.give(second)
    assert runs_of(blocks.take(2 * 4096)) == [[4, 2]]


@pytest.mark.parametrize("wrong", [[1], [10], [3, 3], [5]])
def test_blocks_that_are_not_free_cannot_be_claimed(wrong: list[int]) -> None:
    blocks = BlockMap(Region("m", "m", 0, 10 * 4096), 2, 10, 4096)
    assert blocks.claim(np.array([5]))
    assert not blocks.claim(np.array(wrong))
    assert blocks.claim(np.array([3]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"most_entries": 0}, "most_entries is at least 1, not 0"),
        ({"notes_nbytes": -1}, "notes_nbytes is at least 0, not -1"),
        ({"appends": 0}, "appends is at least 1, not 0"),
        ({"most_entries": 1 << 32}, "are more than a segment holds"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, int], problem: str) -> None:
    sizes = {"most_entries": 40, "notes_nbytes": 0, "appends": 6, "grid": 4096} | changes
    with pytest.raises(ConfigurationError, match=problem):
        Geometry(EntryShape(KVShape(1, 1, 1, 64, 64), 1), **sizes)
