"""KV blocks: pools count exactly, tables find every row again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.reference import open_reference
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.site import Site
from tierloop.runtime.blocks import OPEN, SEALED, BlockTable, K, KVShape, Pool, TierTooSmall, V, join

SHAPE = KVShape(2, 2, 3, 8, 8, "float32", 4, 4)


def make_pool(slots: int, name: str = "ref", shape: KVShape = SHAPE) -> Pool:
    device = open_reference(name, Site(), {"capacity": 1 << 20})
    return Pool(device, device.info.memories[0].name, slots, shape.block_nbytes)


def test_a_pool_hands_out_each_slot_once_and_says_when_it_is_full() -> None:
    pool = make_pool(5)
    first, second = pool.take(2), pool.take(3)
    assert len(set(first.tolist()) | set(second.tolist())) == 5
    with pytest.raises(TierTooSmall, match=r"is full: 1 blocks are needed, 0 of 5 are free"):
        pool.take(1)
    pool.give(first)
    assert pool.taken == 3
    assert pool.take(2).tolist() == first.tolist()


def test_a_pool_larger_than_its_memory_is_refused() -> None:
    with pytest.raises(TierTooSmall, match=r"too small: 100000 blocks"):
        make_pool(100_000)


def test_a_slot_is_not_returned_twice() -> None:
    pool = make_pool(4)
    taken = pool.take(2)
    pool.give(taken)
    with pytest.raises(AssertionError, match="returned twice"):
        pool.give(taken)


@pytest.mark.parametrize(("block", "split"), [(0, 1), (4, 3), (4, 8)])
def test_blocks_are_whole_splits(block: int, split: int) -> None:
    with pytest.raises(ConfigurationError, match="multiple of split_tokens"):
        KVShape(1, 1, 1, 8, 8, "float32", block, split)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float8"):
        KVShape(1, 1, 1, 8, 8, "float8")  # type: ignore[arg-type]  # the wrong type is the point


def test_full_blocks_are_sealed_and_the_last_one_stays_open() -> None:
    table, pool = BlockTable(SHAPE, 16), make_pool(32)
    for side in (K, V):
        for head in range(2):
            table.put(0, side, head, np.arange(3), pool)
    table.length[0] = 10
    table.seal(0)
    assert (table.state[0, :, :, :2] == SEALED).all()
    assert (table.state[0, :, :, 2] == OPEN).all()


def test_released_blocks_return_to_their_pools() -> None:
    table, pools = BlockTable(SHAPE, 16), [make_pool(8, "a"), make_pool(8, "b")]
    table.put(1, K, 0, np.arange(2), pools[0])
    table.put(1, V, 0, np.arange(2), pools[1])
    assert table.nbytes_by_memory() == {"a": 2 * 128, "b": 2 * 128}
    table.release()
    assert [p.taken for p in pools] == [0, 0]
    assert table.nbytes_by_memory() == {}


@given(st.data())
def test_rows_name_exactly_the_bytes_of_the_chosen_blocks(data: st.DataObject) -> None:
    """Whatever pools blocks lie in and whatever is chosen: spans, runs and positions agree with the table."""
    length = data.draw(st.integers(1, 24))
    table = BlockTable(SHAPE, 24)
    pools = [make_pool(64, name) for name in ("a", "b", "c")]
    count = SHAPE.num_blocks(length)
    for side in (K, V):
        for head in range(2):
            homes = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
            for i, pool in enumerate(pools):
                mine = np.flatnonzero(homes == i)
                if len(mine):
                    table.put(0, side, head, mine, pool)
    table.length[0] = length
    chosen = sorted(data.draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, count - 1)), max_size=12)))
    heads = np.array([h for h, _ in chosen], dtype=np.int64)
    blocks = np.array([b for _, b in chosen], dtype=np.int64)
    rows = table.rows(0, heads, blocks, sequence=7)
    for side, operand in ((K, rows.keys), (V, rows.values)):
        spans = [(s.region.memory, o, n) for s in operand for o, n in s.spans.array.tolist()]
        assert len(spans) == len(rows.runs)
        found = []
        for (sequence, head, position), (memory, offset, nbytes) in zip(rows.runs.tolist(), spans, strict=True):
            assert sequence == 7
            assert nbytes % SHAPE.row_nbytes(side) == 0
            for row in range(nbytes // SHAPE.row_nbytes(side)):
                found.append((head, position + row, memory, offset + row * SHAPE.row_nbytes(side)))
        expected = []
        for head, block in chosen:
            pool = table.pools[int(table.pool[0, side, head, block])]
            for row in range(min(4, length - block * 4)):
                place = int(table.offset[0, side, head, block]) + row * SHAPE.row_nbytes(side)
                expected.append((head, block * 4 + row, pool.memory, place))
        assert found == expected


def test_neighbouring_blocks_become_one_run() -> None:
    table, pool = BlockTable(SHAPE, 24), make_pool(64)
    for side in (K, V):
        for head in range(2):
            table.put(0, side, head, np.arange(6), pool)
    table.length[0] = 22
    rows = table.rows(0, *table.all_blocks(0))
    assert rows.runs.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert [len(s.spans) for s in rows.keys] == [2]


def test_rows_of_several_requests_join_in_order() -> None:
    pool, parts = make_pool(64), []
    for sequence in range(3):
        table = BlockTable(SHAPE, 8)
        for side in (K, V):
            table.put(0, side, 0, np.arange(1), pool)
        table.length[0] = 3
        parts.append(table.rows(0, np.array([0]), np.array([0]), sequence))
    rows = join(parts)
    assert rows.runs[:, 0].tolist() == [0, 1, 2]
    assert sum(s.spans.nbytes for s in rows.keys) == 3 * 3 * 32


@given(st.lists(st.booleans(), min_size=26, max_size=26), st.permutations(range(8)))
def test_single_rows_are_found_where_their_blocks_lie(wanted: list[bool], order: list[int]) -> None:
    table, pools = BlockTable(SHAPE, 16), [make_pool(16), make_pool(16, "other")]
    for side in (K, V):
        for head in range(2):
            for block in range(4):
                table.put(1, side, head, np.array([block]), pools[order[4 * head + block] % 2])
    table.length[1] = 13
    heads, positions = np.divmod(np.flatnonzero(wanted), 13)
    rows = table.single_rows(1, heads, positions, sequence=3)
    found = []
    for side, operand in ((K, rows.keys), (V, rows.values)):
        lies = [
            (s.region, offset + at) for s in operand for offset, n in s.spans.array.tolist() for at in range(0, n, 32)
        ]
        sizes = [n // 32 for s in operand for n in s.spans.array[:, 1].tolist()]
        assert len(sizes) == len(rows.runs)
        found = [(h, p + i) for (s, h, p), n in zip(rows.runs.tolist(), sizes, strict=True) for i in range(n)]
        assert found == list(zip(heads.tolist(), positions.tolist(), strict=True))
        for (head, position), where in zip(found, lies, strict=True):
            pool = table.pools[table.pool[1, side, head, position // 4]]
            assert where == (pool.region, table.offset[1, side, head, position // 4] + position % 4 * 32)
    assert (rows.runs[:, 0] == 3).all()


def test_neighbouring_rows_are_one_run() -> None:
    table, pool = BlockTable(SHAPE, 16), make_pool(16)
    for side in (K, V):
        for head in range(2):
            table.put(0, side, head, np.arange(4), pool)
    table.length[0] = 16
    rows = table.single_rows(0, np.array([0] * 6 + [1] * 2), np.array([1, 2, 3, 4, 5, 9, 6, 7]))
    assert rows.runs.tolist() == [[0, 0, 1], [0, 0, 9], [0, 1, 6]]
    heads, blocks = table.all_blocks(0)
    whole, single = table.rows(0, heads, blocks), table.single_rows(0, np.repeat([0, 1], 16), np.tile(np.arange(16), 2))
    assert whole.runs.tolist() == single.runs.tolist()
    assert whole.keys == single.keys
    assert whole.values == single.values
