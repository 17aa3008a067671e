"""The hierarchical index: what is in it, that it grows to what it would have been, and what it ranks first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.index_rig import (
    Float32,
    Int64,
    Kept,
    Rig,
    Strided,
    key_nbytes,
    labels_of,
    random_keys,
    random_queries,
    rig,
)
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import DType
from tierloop.devices.regions import Segment
from tierloop.runtime.attention_mass import AttentionMass
from tierloop.runtime.blocks import KVShape, TierTooSmall
from tierloop.runtime.centroids import Members
from tierloop.runtime.chunk_clusters import means_of
from tierloop.runtime.chunk_index import ChunkIndex, expand, importance
from tierloop.runtime.chunking import Chunking, Cut

DTYPES = ["float32", "bfloat16", "int8", "fp8_e4m3"]
Float64 = NDArray[np.float64]


def means(keys: Float32, index: ChunkIndex, layer: int = 0) -> Float64:
    """Means of the indexed entries' keys: float64 (heads, entries, head_dim)."""
    c = index.how.chunk_tokens
    rows = keys[:, index.first * c : index.end(layer) * c].astype(np.float64)
    return np.asarray(rows.reshape(len(keys), -1, c, keys.shape[-1]).mean(axis=2))


# -- which entries are indexed --------------------------------------------------------------------------------------


@given(
    st.integers(1, 9), st.integers(0, 20), st.integers(0, 40), st.integers(1, 300), st.integers(0, 20), st.booleans()
)
@settings(max_examples=25)
def test_every_entry_between_sinks_and_local_tokens_is_in_one_cluster_of_each_head(
    chunk_tokens: int, sinks: int, local: int, prompt: int, centroids: int, short_segments: bool
) -> None:
    first = -(-sinks // chunk_tokens)
    last = max(max(prompt - local, 0) // chunk_tokens, first)
    how = Chunking(
        chunk_tokens, sinks, local, 32, min(centroids, last - first), 16 if short_segments else 8192, iterations=2
    )
    with rig() as machine:
        if chunk_tokens > prompt:
            with pytest.raises(ConfigurationError, match=f"chunk_tokens is {chunk_tokens}"):
                machine.index(prompt, how=how)
            return
        index = machine.index(prompt, how=how)
        machine.build(index, random_keys(prompt))
        assert (index.first, index.end(0), index.end(1)) == (first, last, last)
        for layer in range(2):
            for members in index.members(layer):
                assert sorted(members.positions.tolist()) == list(range(first, last))
                assert len(members.sizes) == index.known(layer)
        if how.centroids:
            assert index.known(0) <= how.centroids + 1, "a last short segment may have one of its own"
        machine.run(index.close())


@given(
    st.builds(
        Chunking,
        chunk_tokens=st.sampled_from([1, 4, 8]),
        update_tokens=st.integers(1, 700),
        centroids=st.integers(0, 60),
        segment_chunks=st.integers(1, 200),
        local_tokens=st.integers(0, 200),
    ),
    st.integers(700, 5000),
    st.integers(0, 3000),
)
def test_there_is_room_for_every_cluster_that_there_can_be_and_none_more(
    how: Chunking, prompt: int, later: int
) -> None:
    cut = Cut(how, "r", prompt, prompt + later)
    known, end = cut.clusters(cut.chunks), cut.first + cut.chunks
    for length in range(prompt, prompt + later + 1):
        while cut.last(length) - end >= cut.update:
            known, end = known + cut.clusters(cut.update), end + cut.update
    assert known == cut.width


def test_a_quarter_of_the_chunks_are_centroids_by_default_but_no_more_than_the_paper_has() -> None:
    assert Cut(Chunking(), "r", 16_452, 16_452).width == 1024
    long = Cut(Chunking(segment_chunks=1 << 20), "r", 1_000_068, 1_000_068)
    assert long.cluster_chunks == 31
    assert long.width == 250_000 // 31
    assert Cut(Chunking(), "r", 69, 69).width == 0
    assert Cut(Chunking(), "r", 72, 72).width == 1


def test_a_prompt_too_short_to_be_indexed_is_indexed_as_it_grows() -> None:
    keys = random_keys(400)
    with rig() as machine:
        index = machine.index(50, 400)
        machine.build(index, keys[:, :50])
        assert (index.end(0), index.known(0), index.due(0, 323)) == (1, 0, 1)
        assert index.due(0, 324) == 65
        machine.extend(index, 0, 65, keys)
        assert machine.run(index.settle(0)) == (1, 65)
        assert (index.end(0), index.known(0)) == (65, 16)
        machine.run(index.close())


# -- clusters -------------------------------------------------------------------------------------------------------


def test_entries_whose_keys_are_alike_are_in_one_cluster_and_its_centroid_is_their_mean() -> None:
    # Groups are far apart, and the rows that k-means begins with are one of each: so there is one right answer.
    chunks, count, random = 60, 12, np.random.default_rng(5)
    of_head = np.stack([random.integers(0, count, chunks) for _ in range(2)])
    of_head[:, np.arange(count) * chunks // count] = np.arange(count)
    centres = np.linalg.qr(random.normal(size=(16, 16)))[0][:count] * 9
    keys = random_keys(4 + 4 * chunks + 64) * np.float32(0.125)
    keys[:, 4 : 4 + 4 * chunks] += np.repeat(centres[of_head], 4, axis=1).astype(np.float32)
    with rig() as machine:
        index = machine.index(keys.shape[1], centroids=count)
        machine.build(index, keys)
        assert index.known(1) == count
        assert np.array_equal(labels_of(index, 1), of_head)
        x = means(keys, index)
        for head, found in enumerate(machine.centroids(index, 1).astype(np.float64)):
            want = np.stack([x[head][of_head[head] == i].mean(axis=0) for i in range(count)])
            assert np.abs(found - want).max() < 1e-5
        machine.run(index.close())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_that_grew_has_the_bits_of_one_that_was_built_of_the_same_entries(dtype: DType) -> None:
    keys = random_keys(400, dtype)
    with rig(dtype) as machine:
        built, grown = machine.index(324, 400), machine.index(60, 400)
        machine.build(built, keys[:, :324])
        machine.build(grown, keys[:, :60])
        for layer in range(2):
            machine.extend(grown, layer, grown.due(layer, 330), keys)
        for layer in range(2):
            assert machine.run(grown.settle(layer)) == (1, 65)
            assert machine.centroids(built, layer).tobytes() == machine.centroids(grown, layer).tobytes()
            assert np.array_equal(labels_of(built, layer), labels_of(grown, layer))
        x, labels = means(keys, grown), labels_of(grown)
        for head, centroids in enumerate(machine.centroids(grown).astype(np.float64)):
            for i, centroid in enumerate(centroids):
                assert not (labels[head] == i).any() or np.allclose(
                    centroid, x[head][labels[head] == i].mean(axis=0), rtol=1e-5, atol=1e-5 * np.abs(x).max()
                )
        for index in (built, grown):
            machine.run(index.close())


def test_a_chunk_mean_is_rounded_once() -> None:
    keys = np.array([3e8, 1, -3e8, 0, 0, 2], dtype=np.float32).reshape(1, 1, 6, 1)
    assert means_of(keys)[0, 0, 0] == np.float32(0.5), "a float32 sum has lost the 1"


def test_what_is_grouped_does_not_depend_on_when_it_becomes_due() -> None:
    keys = random_keys(1200)

    def grow(machine: Rig, lengths: list[int]) -> ChunkIndex:
        index = machine.index(300, 1200, update_tokens=100)
        machine.build(index, keys[:, :300])
        for length in lengths:
            while index.due(0, length) > index.end(0):
                machine.extend(index, 0, index.due(0, length), keys)
                assert index.due(0, 1200) == index.end(0), "nothing is due while something is under way"
                machine.run(index.settle(0))
        return index

    with rig() as machine:
        by_one, at_once = grow(machine, list(range(301, 1201))), grow(machine, [750, 1200])
        assert by_one.end(0) == at_once.end(0) == (300 - 64) // 4 + (1136 - 236) // 100 * 25
        assert by_one.groups(0) == at_once.groups(0)
        assert machine.centroids(by_one).tobytes() == machine.centroids(at_once).tobytes()
        assert np.array_equal(labels_of(by_one), labels_of(at_once))
        for index in (by_one, at_once):
            machine.run(index.close())


def test_the_order_for_packing_is_cluster_by_cluster() -> None:
    keys = random_keys(800)
    with rig() as machine:
        index = machine.index(500, 800)
        machine.build(index, keys[:, :500])
        machine.extend(index, 0, index.due(0, 800), keys)
        machine.run(index.settle(0))
        labels = labels_of(index)
        for first, last in ((1, 109), (109, 173), (50, 120), (60, 60)):
            order = index.order(0, first, last)
            assert order.shape == (2, last - first)
            for head in range(2):
                want = sorted(range(first, last), key=lambda e: (labels[head, e - 1], e))
                assert order[head].tolist() == want
        with pytest.raises(ValueError, match=r"entries \[0, 5\) of layer 0: indexed are \[1, 173\)"):
            index.order(0, 0, 5)
        machine.run(index.close())


# -- ranking --------------------------------------------------------------------------------------------------------


def scores_of(centroids: Float32, queries: Float32) -> Float64:
    """The largest product of a group's queries with each centroid: float64 (heads, clusters)."""
    grouped = queries.astype(np.float64).reshape(len(centroids), -1, centroids.shape[-1])
    return np.asarray((grouped @ centroids.astype(np.float64).transpose(0, 2, 1)).max(axis=1))


def assert_ranked(ranked: Int64, index: ChunkIndex, scores: Float64, wanted: int, layer: int = 0) -> None:
    """Entries lie in the order of their cluster's score, each cluster whole and ascending but for the last."""
    labels, indexed = labels_of(index, layer), index.end(layer) - index.first
    assert ranked.shape == (len(labels), wanted)
    for head, mine in enumerate(ranked):
        held = mine[: min(wanted, indexed)]
        assert (mine[len(held) :] == -1).all()
        assert (held >= index.first).all()
        assert len(set(held.tolist())) == len(held)
        clusters = labels[head, held - index.first]
        seen = list(dict.fromkeys(clusters.tolist()))
        expected = [index.first + e for c in seen for e in np.flatnonzero(labels[head] == c)]
        assert held.tolist() == expected[: len(held)]
        best = scores[head, seen]
        assert (np.diff(best) <= 1e-5).all()
        left = set(np.unique(labels[head]).tolist()) - set(seen)
        assert all(scores[head, c] <= best.min() + 1e-5 for c in left)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_entries_are_ranked_by_the_product_of_their_centroid_with_the_best_query_of_the_group(dtype: DType) -> None:
    keys, queries = random_keys(800, dtype), random_queries(1)
    if dtype == "int8":
        queries /= 64
    with rig(dtype) as machine:
        index = machine.index(500, 800)
        machine.build(index, keys[:, :500])
        for wanted in (1, 7, 60, 108, 200):
            (ranked,) = machine.rank([index], queries, [wanted], layer=1)
            assert_ranked(ranked, index, scores_of(machine.centroids(index, 1), queries[0]), wanted, layer=1)
        machine.extend(index, 0, index.due(0, 800), keys)
        machine.run(index.settle(0))
        (ranked,) = machine.rank([index], queries, [150])
        assert_ranked(ranked, index, scores_of(machine.centroids(index), queries[0]), 150)
        assert ranked.max() >= 109, "entries that came later are among them"
        machine.run(index.close())


def test_requests_of_a_batch_are_ranked_by_their_own_queries_in_one_question() -> None:
    kept = Kept()
    with rig(decisions=kept) as machine:
        long, short, none = machine.index(600, name="a"), machine.index(500, name="b"), machine.index(30, name="c")
        machine.build(long, random_keys(600))
        machine.build(short, random_keys(500, seed=3))
        machine.build(none, random_keys(30))
        queries = random_queries(3)
        ranked = machine.rank([long, none, short], queries[[0, 2, 1]], [20, 9, 12], step=77)
        assert_ranked(ranked[0], long, scores_of(machine.centroids(long), queries[0]), 20)
        assert (ranked[1] == -1).all()
        assert_ranked(ranked[2], short, scores_of(machine.centroids(short), queries[1]), 12)
        (question,) = kept.questions
        assert (question.label, question.requests, question.step) == ("select a", ("a", "c", "b"), 77)
        assert question.lengths.tolist() == [33, 33, 0, 0, 27, 27]
        for index in (long, short, none):
            machine.run(index.close())


def test_requests_that_differ_much_are_asked_about_one_by_one_in_the_room_of_their_clusters() -> None:
    kept = Kept()
    with rig(decisions=kept) as machine:
        indexes = [machine.index(tokens, name=name) for tokens, name in ((600, "a"), (110, "b"), (50, "c"), (150, "d"))]
        for number, index in enumerate(indexes):
            machine.build(index, random_keys(index.prompt_tokens, seed=number))
        queries, wanted = random_queries(4), [133, 5, 4, 9]
        room: list[tuple[int, int]] = []

        def work(scores: int, indices: int) -> tuple[Segment, Segment]:
            room.append((scores, indices))
            return machine.space("scores", scores), machine.space("indices", indices)

        machine.work = work  # type: ignore[method-assign]  # the same, and what was asked for
        ranked = machine.rank(indexes, queries, wanted, step=9)
        for i, index in enumerate(indexes):
            if index.known(0):
                assert_ranked(ranked[i], index, scores_of(machine.centroids(index), queries[i]), wanted[i])
        assert (ranked[2] == -1).all()
        assert [(q.label, q.requests, q.step) for q in kept.questions] == [
            (f"select {name}", (name,), 9) for name in "abd"
        ]
        clusters = 2 * sum(index.most_clusters for index in indexes)
        ((scores, indices),) = room
        assert scores == 4 * clusters
        assert indices <= 8 * clusters
        for index in indexes:
            machine.run(index.close())


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    kept = Kept()
    with rig(decisions=kept) as machine:
        index = machine.index(300)
        machine.build(index, random_keys(300))
        (ranked,) = machine.rank([index], random_queries(1), [0])
        assert ranked.shape == (2, 0)
        assert not kept.questions
        with pytest.raises(ValueError, match=r"1 indexes of 1 requests cannot give \[-1\] entries"):
            machine.rank([index], random_queries(1), [-1])
        machine.run(index.close())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 70), st.randoms(use_true_random=False))
def test_an_order_of_clusters_becomes_an_order_of_entries(labels: list[int], wanted: int, random: Any) -> None:
    members = Members()
    members.add(np.array(labels), 5, 7)
    order = random.sample(range(7), 7)
    (found,) = expand([members], np.array([[*order, -1]]), wanted)
    whole = [5 + i for c in order for i, label in enumerate(labels) if label == c]
    assert found.tolist() == (whole + [-1] * wanted)[:wanted]


# -- warm-up --------------------------------------------------------------------------------------------------------


def mass_of(keys: Float32, queries: Float32, scale: float, index: ChunkIndex) -> Float64:
    """By the definition: float64 (heads, clusters), the mean of what the entries of a cluster are given."""
    tokens, n, group = keys.shape[1], len(queries), queries.shape[1] // len(keys)
    labels, c = labels_of(index), index.how.chunk_tokens
    found = np.zeros((len(keys), index.known(0)))
    for head in range(len(keys)):
        given = np.zeros(tokens)
        for i in range(n):
            for q in range(group):
                logits = keys[head].astype(np.float64) @ queries[i, head * group + q].astype(np.float64) * scale
                logits[tokens - n + i + 1 :] = -np.inf
                weights = np.exp(logits - logits.max())
                given += weights / weights.sum()
        of_entry = [given[e * c : (e + 1) * c].sum() for e in range(index.first, index.end(0))]
        for cluster in range(index.known(0)):
            mine = np.flatnonzero(labels[head] == cluster)
            found[head, cluster] = np.mean([of_entry[e] for e in mine]) if len(mine) else 0
    return found


def test_the_warm_up_ranks_by_the_attention_of_the_prompts_last_queries() -> None:
    keys, queries = random_keys(330), random_queries(16)
    with rig() as machine:
        index = machine.index(330)
        machine.build(index, keys)
        mass = mass_of(keys, queries, 0.5, index)
        into = [np.zeros(mass.size * 4, dtype=np.uint8)]
        AttentionMass(4, index.members(0), queries, keys, 0.5).store([], into)
        assert np.allclose(into[0].view(np.float32).reshape(mass.shape), mass, rtol=1e-6, atol=0)
        ranked = machine.run(importance(machine.engine, 0, index, queries, keys, 0.5, 30, machine.work))
        assert_ranked(ranked, index, mass, 30)
        assert set(machine.engine.stages.ns) == {"decide", "index", "warm-up"}
        machine.run(index.close())


def test_the_warm_up_is_of_the_prompt_alone() -> None:
    keys, queries = random_keys(400), random_queries(16)
    with rig() as machine:
        index = machine.index(100, 400)
        machine.build(index, keys[:, :100])

        def warm_up(queries: Float32, keys: Float32) -> Int64:
            return machine.run(importance(machine.engine, 0, index, queries, keys, 0.5, 3, machine.work))

        with pytest.raises(ValueError, match=r"queries of r have shape \(16, 5, 16\); needed is \(1 to 100, 6, 16\)"):
            warm_up(queries[:, :5], keys[:, :100])
        with pytest.raises(ValueError, match=r"keys of r have shape \(2, 400, 16\); needed is \(2, 100, 16\)"):
            warm_up(queries, keys)
        machine.extend(index, 0, index.due(0, 400), keys)
        machine.run(index.settle(0))
        with pytest.raises(ValueError, match="layer 0 of r has entries after the prompt's"):
            warm_up(queries, keys[:, :100])
        machine.run(index.close())


# -- runs without numbers -------------------------------------------------------------------------------------------


def lived(machine: Rig, keys: Float32 | None, queries: Float32) -> tuple[list[Int64], list[int]]:
    """A life of an index with two layers, and when each part of it was over."""
    index, clock = machine.index(300, 800), machine.platform.clock
    rows, times = random_keys(800), []
    found = []
    for layer in range(2):
        machine.run(index.build(layer, keys))
        found.append(machine.run(importance(machine.engine, layer, index, queries, keys, 0.25, 9, machine.work)))
        times.append(clock.now())
    for length in (600, 610):
        for layer in range(2):
            if index.due(layer, length) > index.end(layer):
                machine.extend(index, layer, index.due(layer, length), rows)
        for layer in range(2):
            machine.run(index.settle(layer))
            found += machine.rank([index], queries[:1], [25], layer, step=length)
            times.append(clock.now())
    machine.run(index.close())
    return found, [*times, clock.now()]


def test_a_replay_without_bytes_has_the_same_index_and_takes_the_same_time() -> None:
    kept, queries = Kept(), random_queries(16)
    with rig(decisions=kept) as machine:
        real = lived(machine, random_keys(300), queries)
    again = Kept(kept.decided)
    with rig(decisions=again, phantom=True) as machine:
        phantom = lived(machine, None, queries)
    assert again.again == len(kept.decided) > 8
    for a, b in zip(real[0], phantom[0], strict=True):
        assert np.array_equal(a, b)
    assert real[1] == phantom[1]
    assert kept.groupings == again.groupings
    assert [g.label for g in kept.groupings] == ["clusters r"] * 4
    assert [(g.step, g.candidates, g.groups) for g in kept.groupings[::2]] == [(300, 58, 14), (556, 64, 16)]
    assert set(kept.decided[0][1].tolist()) <= set(range(14)), "labels are counted for each head, from 0"


def test_lists_that_are_the_same_are_kept_once_for_all_layers_and_heads() -> None:
    shape = KVShape(8, 4, 2, 32, 32, "float16", 16, 16)
    with rig(phantom=True, decisions=Strided(), shape=shape) as machine:
        index = machine.index(16_000, 17_000)
        machine.build(index, None)
        for layer in range(8):
            place = machine.space("keys", key_nbytes(shape, 256))
            index.extend(layer, index.due(layer, 16_500), (place,), [])
        for layer in range(8):
            machine.run(index.settle(layer))
        assert len({id(members) for layer in range(8) for members in index.members(layer)}) == 1
        assert labels_of(index)[0, :5].tolist() == [0, 1, 2, 3, 4]
        machine.run(index.close())


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0; it must be a whole number of at least 1"),
        ({"chunk_tokens": 4.0}, "chunk_tokens is 4.0; it must be a whole number of at least 1"),
        ({"local_tokens": -1}, "local_tokens is -1; it must be a whole number of at least 0"),
        ({"update_tokens": True}, "update_tokens is True; it must be a whole number of at least 1"),
        ({"centroids": 1 << 50}, "centroids is 1125899906842624; it must be a whole number"),
    ],
)
def test_numbers_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Chunking(**options)


def test_more_centroids_than_chunks_are_refused_with_their_number() -> None:
    with rig() as machine:
        with pytest.raises(ConfigurationError, match=r"centroids is 60, but a prompt of 300 tokens has only 58 chunks"):
            machine.index(300, centroids=60)
        index = machine.index(300, centroids=58)
        machine.build(index, random_keys(300))
        assert index.known(0) == 58
        machine.run(index.close())


def test_a_device_without_room_for_the_index_says_how_much_it_needs_and_keeps_nothing() -> None:
    with rig(overrides={"devices.gpu.capacity": 30_000}) as machine:
        with pytest.raises(TierTooSmall, match=r"emu:gpu is too small: .* bytes are needed there for centroids of r"):
            machine.index(3000, 3000)
        index = machine.index(1000, 1000)
        with pytest.raises(TierTooSmall, match=r"emu:gpu is too small: .* bytes .* for chunk means of r"):
            machine.build(index, random_keys(1000))
        machine.run(index.close())


def test_a_device_that_cannot_group_is_refused() -> None:
    with rig() as machine:
        engine = machine.engine
        fewer = replace(engine.dense.executor, kernels=engine.dense.executor.kernels - {"cluster"})
        engine.dense = replace(engine.dense, executor=fewer)
        with pytest.raises(ConfigurationError, match=r"emu:gpu runs the modules.*does not offer cluster for float32"):
            machine.index(300)


def test_entries_and_keys_that_are_not_the_next_ones_are_refused() -> None:
    keys = random_keys(700)
    with rig() as machine:
        index = machine.index(300, 700)
        with pytest.raises(ValueError, match=r"keys of r have shape \(2, 700, 16\); needed is \(2, 300, 16\)"):
            machine.build(index, keys)
        machine.build(index, keys[:, :300])
        submitted = machine.platform.clock.now()
        place = machine.space("keys", key_nbytes(machine.engine.shape, 256))
        for last in (58, 59, 59 + 65):
            with pytest.raises(ValueError, match=f"entries up to {last} of layer 0 cannot be indexed: 59 are"):
                index.extend(0, last, (place,), [])
        with pytest.raises(ValueError, match="keys of 63 entries of r have 32768 bytes; needed is 32256"):
            index.extend(0, 59 + 63, (place,), [])
        assert machine.platform.clock.now() == submitted
        assert machine.run(index.settle(0)) == (59, 59)
        machine.extend(index, 0, 59 + 64, keys)
        with pytest.raises(ValueError, match="some are under way"):
            index.extend(0, 59 + 64, (place,), [])
        machine.run(index.close())


def test_an_index_that_is_closed_while_it_grows_gives_everything_back() -> None:
    keys = random_keys(700)
    with rig() as machine:
        index = machine.index(300, 700)
        machine.build(index, keys[:, :300])
        for layer in range(2):
            machine.extend(index, layer, index.due(layer, 700), keys)
        machine.run(index.close())
