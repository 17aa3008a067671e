"""Snapshots of an index: what comes back from them, and that nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.index_rig import Rig, labels_of, random_keys, random_queries, rig
from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.chunk_index import ChunkIndex
from tierloop.runtime.chunk_snapshots import prompt_tokens_of, restore, snapshot

Bytes = NDArray[np.uint8]
KEYS = random_keys(1000)
NUMBERS = 8 * 11
"""Bytes of the header."""


def made(machine: Rig, updates: int = 2) -> ChunkIndex:
    """An index of 300 tokens of a prompt and some updates, in both layers."""
    index = machine.index(300, 1000, "made")
    machine.build(index, KEYS[:, :300])
    for _ in range(updates):
        grow(machine, index)
    return index


def grow(machine: Rig, index: ChunkIndex) -> None:
    for layer in range(2):
        machine.extend(index, layer, index.end(layer) + 64, KEYS)
    for layer in range(2):
        machine.run(index.settle(layer))


@pytest.fixture(scope="module")
def stored() -> Bytes:
    """A snapshot of layer 0: the prompt's group and two updates."""
    with rig() as machine:
        index = made(machine)
        found = machine.run(snapshot(index, 0))
        machine.run(index.close())
    return found


def test_an_index_from_its_snapshots_is_the_same_and_grows_on() -> None:
    with rig() as machine:
        index = machine.index(300, 1000, "made")
        machine.build(index, KEYS[:, :300])
        parts = [[machine.run(snapshot(index, layer))] for layer in range(2)]
        grow(machine, index)
        for layer in range(2):
            parts[layer].append(machine.run(snapshot(index, layer, 1)))
        assert prompt_tokens_of(parts[1][1]) == 300
        again = machine.index(300, 1000, "again")
        for layer in range(2):
            machine.run(restore(again, layer, parts[layer]))
        for each in (index, again):
            grow(machine, each)
        for layer in range(2):
            assert again.groups(layer) == index.groups(layer)
            assert len(again.groups(layer)) == 3
            assert np.array_equal(labels_of(again, layer), labels_of(index, layer))
            assert machine.centroids(again, layer).tobytes() == machine.centroids(index, layer).tobytes()
            one, two = machine.rank([again, index], random_queries(1).repeat(2, axis=0), [50, 50], layer)
            assert np.array_equal(one, two)
        for each in (index, again):
            machine.run(each.close())


def test_a_snapshot_of_no_groups_brings_nothing() -> None:
    with rig() as machine:
        index = machine.index(40, 400)
        nothing = machine.run(snapshot(index, 0))
        again = machine.index(40, 400)
        machine.run(restore(again, 0, [nothing]))
        assert (again.end(0), again.known(0), again.groups(0)) == (1, 0, [])
        with pytest.raises(ValueError, match="group 1 of layer 0: there are 0"):
            machine.run(snapshot(index, 0, 1))
        for each in (index, again):
            machine.run(each.close())


def refused(stored: Bytes, message: str, prompt: int = 300, most: int = 1000, chunk_tokens: int = 4) -> None:
    """Taken in by an index, the bytes are refused, and it still has nothing."""
    with rig() as machine:
        index = machine.index(prompt, most, chunk_tokens=chunk_tokens)
        with pytest.raises(ConfigurationError, match=message):
            machine.run(restore(index, 0, [stored]))
        assert not index.groups(0)
        machine.run(index.close())


def changed(stored: Bytes, change: Callable[[Bytes], None]) -> Bytes:
    copy = stored.copy()
    change(copy)
    return copy


def int64(at: int, value: int) -> Callable[[Bytes], None]:
    def change(stored: Bytes) -> None:
        stored[8 * at : 8 * at + 8].view("<i8")[0] = value

    return change


@pytest.mark.parametrize("kept", [0, NUMBERS - 1, NUMBERS, NUMBERS + 47, NUMBERS + 48, 1000, -1])
def test_a_snapshot_that_was_cut_off_is_refused(stored: Bytes, kept: int) -> None:
    refused(stored[:kept], "snapshot of layer 0 of r")


def test_bytes_after_a_snapshot_are_refused(stored: Bytes) -> None:
    refused(np.append(stored, np.uint8(0)), "has 7377 bytes of groups; needed is 7376")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 1, "does not begin like one"),
        (1, 3, "kv heads is 3; needed is 2"),
        (2, 32, "head_dim is 32; needed is 16"),
        (9, 1, "groups before the first is 1; needed is 0"),
        (10, -1, "-1 groups cannot be in"),
        (10, 1 << 60, "1152921504606846976 groups cannot be in"),
        (11, 1 << 62, "its groups do not fit 250 entries, 46 clusters"),
        (11, -5, "its groups do not fit"),
        (12, 0, "its groups do not fit"),
        (12, 1 << 62, "its groups do not fit"),
        (11, -(1 << 63), "its groups do not fit"),
        (12, 15, "its groups do not fit"),
        (12, 13, "bytes of groups; needed is"),
    ],
)
def test_numbers_of_a_snapshot_that_cannot_be_are_refused(stored: Bytes, at: int, value: int, message: str) -> None:
    refused(changed(stored, int64(at, value)), message)


def test_a_label_beyond_its_clusters_is_refused(stored: Bytes) -> None:
    def change(copy: Bytes) -> None:
        copy[NUMBERS + 48 : NUMBERS + 52].view("<i4")[0] = 14

    refused(changed(stored, change), "a label is not from 0 to below 14")


def test_a_centroid_that_is_no_number_is_refused(stored: Bytes) -> None:
    def change(copy: Bytes) -> None:
        copy[-4:].view("<f4")[0] = np.nan

    refused(changed(stored, change), "a centroid is not finite")


def test_a_snapshot_of_another_prompt_or_another_chunking_is_refused(stored: Bytes) -> None:
    refused(stored, "prompt_tokens is 300; needed is 301", prompt=301)
    refused(stored, "chunk_tokens is 4; needed is 8", chunk_tokens=8)
    refused(stored, "its groups do not fit 80 entries", most=320)


def test_snapshots_are_taken_in_their_order_only() -> None:
    with rig() as machine:
        index = made(machine, updates=1)
        second = machine.run(snapshot(index, 0, 1))
        machine.run(index.close())
    refused(second, "entry before the first is 59; needed is 1")


@given(st.data())
@settings(max_examples=30)
def test_damaged_bytes_are_refused_or_give_an_index_that_holds_together(stored: Bytes, data: st.DataObject) -> None:
    copy = stored.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        copy[data.draw(st.integers(0, min(len(copy), NUMBERS + 1500) - 1))] ^= data.draw(st.integers(1, 255))
    with rig() as machine:
        index = machine.index(300, 1000)
        try:
            machine.run(restore(index, 0, [copy]))
        except ConfigurationError:
            assert not index.groups(0)
        else:
            for members in index.members(0):
                assert sorted(members.positions.tolist()) == list(range(index.first, index.end(0)))
                assert len(members.sizes) == index.known(0)
        machine.run(index.close())
