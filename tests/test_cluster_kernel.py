"""The cluster kernel: what labels and centroids are, that their bits depend on rows alone, and what is refused.

Labels jump where two products are nearly equal, so they are compared exactly on separated data only; elsewhere each
row's centroid must be the best within the rounding bound of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention_case import Bytes, Float32, Int64, bytes_of, region, same_bits, whole
from tests.oracle import TINY, U
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.kernels import run
from tierloop.devices.kernels.contract import DTYPES, ITEMSIZE, Cluster, check, cut_into_segments, flops, num_clusters
from tierloop.devices.kernels.definition import FP8_NUMBERS, Given, define, k_means, nearest_of, numbers
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans

pytestmark = pytest.mark.usefixtures("threads_for_little_work")

Float64 = NDArray[np.float64]
LENGTHS = ((70, 1), (0, 45), (7, 33))
"""Rows of each (sequence, KV head); with segments of 32 and clusters of 8 every kind of segment is among them."""


def store(rows: Float64, dtype: str) -> Bytes:
    """Rows as bytes of a type, rounded somehow; codes as they come."""
    if dtype == "float32":
        return np.ascontiguousarray(rows, dtype=np.float32).view(np.uint8).reshape(-1)
    if dtype == "float16":
        return np.ascontiguousarray(rows, dtype=np.float16).view(np.uint8).reshape(-1)
    if dtype == "bfloat16":
        single = np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32) >> 16
        return single.astype(np.uint16).view(np.uint8).reshape(-1)
    if dtype == "int8":
        return np.clip(np.rint(rows), -127, 127).astype(np.int8).view(np.uint8).reshape(-1)
    codes: Int64 = np.abs(rows.reshape(-1, 1) - np.nan_to_num(FP8_NUMBERS, nan=np.inf)).argmin(axis=1)
    return codes.astype(np.uint8)


@dataclass
class Keys:
    """Keys of some sequences and KV heads as one operand, in runs of at most `page` rows."""

    lengths: tuple[tuple[int, ...], ...] = LENGTHS
    dtype: Any = "float32"
    dim: int = 24
    page: int = 1 << 30
    segment_tokens: int = 32
    cluster_tokens: int = 8
    iterations: int = 4
    rows: Float64 | None = None
    scattered: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.heads = [(s, h, n) for s, line in enumerate(self.lengths) for h, n in enumerate(line)]
        self.total = sum(n for _, _, n in self.heads)
        if self.rows is None:
            self.rows = np.random.default_rng(self.seed).normal(size=(self.total, self.dim)) * 8
        self.stored = store(self.rows, self.dtype)
        self.x = numbers(self.stored, self.dtype).reshape(-1, self.dim)
        runs, counts = [], []
        for s, h, n in self.heads:
            for at in range(0, max(n, 1), self.page):
                runs.append((s, h, 3 + at))
                counts.append(min(self.page, n - at))
        self.runs, self.counts = np.array(runs, dtype=np.int64), np.array(counts, dtype=np.int64)

    @property
    def args(self) -> Cluster:
        heads = len(self.lengths[0])
        return Cluster(
            self.dtype, len(self.lengths), heads, self.dim, self.runs, self.segment_tokens, self.cluster_tokens,
            self.iterations,
        )  # fmt: skip

    @property
    def segments(self) -> list[int]:
        return [n for _, _, rows in self.heads for n in cut_into_segments(rows, self.segment_tokens)]

    @property
    def clusters(self) -> list[int]:
        return [max(1, n // self.cluster_tokens) for n in self.segments]

    def operand(self) -> Operand:
        sizes = self.counts * self.dim * ITEMSIZE[self.dtype]
        order = np.random.default_rng(1).permutation(len(sizes)) if self.scattered else np.arange(len(sizes))
        starts, offsets = np.cumsum(sizes) - sizes, np.empty_like(sizes)
        offsets[order] = np.cumsum(sizes[order] + 3) - sizes[order]
        memory = np.full(int(sizes.sum()) + 3 * len(sizes), 0xEE, dtype=np.uint8)
        for start, offset, nbytes in zip(starts.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            memory[offset : offset + nbytes] = self.stored[start : start + nbytes]
        spans, there = np.stack((offsets, sizes), axis=1), region(memory)
        half = len(spans) // 2
        return Segment(there, Spans(spans[:half])), Segment(there, Spans(spans[half:]))

    def cluster(self, threads: int = 1, centroids: int = 0, labels: int = 0) -> tuple[Float32, Int64]:
        """Centroids and labels; the last two make the operands so many bytes longer than they should be."""
        targets = [
            region(np.full(sum(self.clusters) * self.dim * 4 + centroids, 0xEE, dtype=np.uint8)),
            region(np.full(self.total * 8 + labels, 0xEE, dtype=np.uint8)),
        ]
        try:
            run(Launch(self.args, (self.operand(),), tuple((t.all(),) for t in targets)), bytes_of, threads)
        except ValueError:
            assert all((bytes_of(t) == 0xEE).all() for t in targets), "something was written before it was refused"
            raise
        return bytes_of(targets[0]).view(np.float32).reshape(-1, self.dim), bytes_of(targets[1]).view(np.int64)


def close_to_the_means(case: Keys, centroids: Float32, labels: Int64) -> bool:
    """Whether each centroid is the mean of its rows but for rounding, and zeros where it has none."""
    for i, centroid in enumerate(centroids):
        mine = case.x[labels == i]
        want, size = (mine.mean(axis=0), np.abs(mine).mean(axis=0)) if len(mine) else (np.zeros(case.dim), 0.0)
        if not (np.abs(centroid - want) <= (len(mine) + 2) * U * size + TINY).all():
            return False
    return True


def separated(case: Keys) -> tuple[Float64, Int64]:
    """Rows around orthogonal directions, one for each centroid to begin with, and which of them each row belongs to."""
    random = np.random.default_rng(5)
    rows, labels, known = [], [], 0
    for n, c in zip(case.segments, case.clusters, strict=True):
        directions = np.linalg.qr(random.normal(size=(case.dim, case.dim)))[0][:c] * 60
        mine = random.integers(0, c, n)
        mine[np.arange(c) * n // c] = np.arange(c)
        rows.append(directions[mine] + random.normal(size=(n, case.dim)))
        labels.append(mine + known)
        known += c
    return np.concatenate(rows), np.concatenate(labels)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("dim", [24, 64, 7])
def test_separated_rows_are_told_apart(dtype: Any, dim: int) -> None:
    case = Keys(dtype=dtype, dim=dim)
    rows, expected = separated(case)
    case = replace(case, rows=rows)
    centroids, labels = case.cluster()
    assert (labels == expected).all()
    assert close_to_the_means(case, centroids, labels)


def test_separated_rows_have_the_labels_of_the_definition() -> None:
    case = replace(Keys(), rows=separated(Keys())[0])
    centroids, labels = case.cluster()
    sizes = case.counts * case.dim * 4
    defined = define(case.args, [Given(case.stored, sizes)], [centroids.nbytes, labels.nbytes])
    assert (defined[1].view(np.int64) == labels).all()
    np.testing.assert_allclose(defined[0].view(np.float32).reshape(centroids.shape), centroids, rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 90), min_size=2, max_size=2).map(tuple), min_size=1, max_size=2).map(tuple),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_centroids_are_the_means_of_their_rows_and_labels_stay_in_their_segment(
    lengths: Any, dtype: Any, dim: int, segment: int, tokens: int, iterations: int, seed: int
) -> None:
    case = Keys(lengths, dtype, dim, 9, segment, tokens, iterations, seed=seed)
    centroids, labels = case.cluster()
    assert close_to_the_means(case, centroids, labels)
    ends, clusters = np.cumsum(case.segments), np.cumsum(case.clusters)
    for low, high, first, last in zip(ends - case.segments, ends, clusters - case.clusters, clusters, strict=True):
        assert ((labels[low:high] >= first) & (labels[low:high] < last)).all()


@pytest.mark.parametrize("iterations", [0, 10])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_row_is_with_its_best_centroid_within_rounding(dtype: Any, iterations: int) -> None:
    # After no round the centroids are rows; after enough of them they are the means that come out.
    case = Keys(((200,),), dtype, 40, segment_tokens=200, iterations=iterations or 100)
    if iterations == 0:
        case = replace(case, iterations=0)
    means, labels = case.cluster()
    c = case.clusters[0]
    centroids = case.x[np.arange(c) * 200 // c] if iterations == 0 else means.astype(np.float64)
    assert np.abs(centroids).sum(axis=1).all(), "every centroid has rows"
    unit = centroids / np.linalg.norm(centroids, axis=1, keepdims=True)
    products = case.x @ unit.T
    error = (case.dim + 4) * U * (np.abs(case.x) @ np.abs(unit).T)
    chosen = products[np.arange(200), labels]
    assert (chosen + error[np.arange(200), labels] >= (products - error).max(axis=1)).all()
    assert len(np.unique(labels)) > c // 2


def test_rounds_make_clusters_tighter() -> None:
    def loss(iterations: int) -> float:
        case = Keys(((600,),), segment_tokens=600, iterations=iterations)
        _, labels = case.cluster()
        unit = np.array([case.x[labels == i].mean(axis=0) for i in range(case.clusters[0])])
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        return -float((case.x * unit[labels]).sum())

    assert loss(8) < loss(1) < loss(0)


@pytest.mark.parametrize("iterations", [1, 2, 3, 5, 10])
def test_what_is_not_computed_again_would_not_have_changed(iterations: int) -> None:
    # Plain float32 k-means in the kernel's order of sums, every product in every round.
    case = Keys(((300,),), dim=10, segment_tokens=300, cluster_tokens=6, iterations=iterations)
    x = case.x.astype(np.float32)
    c = case.clusters[0]
    centroids = x[np.arange(c) * 300 // c].copy()

    def nearest() -> Int64:
        wide = centroids.astype(np.float64)
        square = np.zeros(c)
        for k in range(10):
            square += wide[:, k] * wide[:, k]
        unit = (wide / np.sqrt(square)[:, None]).astype(np.float32)
        products = np.zeros((300, c), dtype=np.float32)
        for k in range(10):
            exact = x[:, k, None].astype(np.longdouble) * unit[None, :, k] + products
            products = exact.astype(np.float32)
        return np.asarray(products.argmax(axis=1), dtype=np.int64)

    def average() -> None:
        for i in np.unique(labels):
            total = np.zeros(10)
            for row in x[labels == i]:
                total += row
            centroids[i] = (total / (labels == i).sum()).astype(np.float32)

    for _ in range(iterations):
        labels = nearest()
        average()
    labels = nearest()
    average()
    centroids[np.bincount(labels, minlength=c) == 0] = 0
    got, got_labels = case.cluster()
    assert (got_labels == labels).all()
    assert same_bits(got, centroids)


# -- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_pages_scattering_and_threads_change_no_bit(dtype: Any) -> None:
    plain = Keys(((900, 410), (77, 1300)), dtype, 40, segment_tokens=512)
    centroids, labels = plain.cluster()
    for threads, page, scattered in ((1, 1, True), (2, 16, False), (3, 50, True), (7, 1 << 30, False)):
        again = replace(plain, page=page, scattered=scattered).cluster(threads)
        assert same_bits(again[0], centroids)
        assert (again[1] == labels).all()


def test_one_segment_shared_by_threads_has_the_bits_of_one_thread() -> None:
    case = Keys(((3000,),), dim=72, segment_tokens=3000, cluster_tokens=16)
    centroids, labels = case.cluster()
    for threads in (2, 5):
        again = case.cluster(threads)
        assert same_bits(again[0], centroids)
        assert (again[1] == labels).all()


def test_a_segment_does_not_know_the_others() -> None:
    both = Keys(((64, 48),), segment_tokens=64)
    assert both.rows is not None
    centroids, labels = both.cluster()
    first, second = (
        Keys(((n,),), segment_tokens=64, rows=part).cluster()
        for n, part in ((64, both.rows[:64]), (48, both.rows[64:]))
    )
    assert same_bits(centroids, np.concatenate([first[0], second[0]]))
    assert (labels == np.concatenate([first[1], second[1] + len(first[0])])).all()


# -- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, []),
        (1, [1]),
        (99, [99]),
        (100, [100]),
        (149, [149]),
        (150, [100, 50]),
        (249, [100, 149]),
        (260, [100, 100, 60]),
    ],
)
def test_a_last_segment_of_less_than_half_joins_the_one_before(rows: int, expected: list[int]) -> None:
    assert cut_into_segments(rows, 100) == expected
    assert num_clusters(rows, 100, 7) == sum(max(1, n // 7) for n in expected)


@pytest.mark.parametrize("rows", [1, 5, 15])
def test_fewer_rows_than_a_cluster_has_are_one_cluster(rows: int) -> None:
    case = Keys(((rows,),), cluster_tokens=16)
    centroids, labels = case.cluster()
    assert len(centroids) == 1
    assert not labels.any()
    assert close_to_the_means(case, centroids, labels)


def test_no_rows_give_no_clusters() -> None:
    centroids, labels = Keys(((0, 0),)).cluster()
    assert (len(centroids), len(labels)) == (0, 0)


def test_equal_rows_go_to_the_first_centroid_and_the_others_are_zeros() -> None:
    case = Keys(((40,),), segment_tokens=40, rows=np.tile(np.arange(24.0) - 3, (40, 1)))
    centroids, labels = case.cluster()
    assert not labels.any()
    assert (centroids[0] == np.arange(24) - 3).all()
    assert not centroids[1:].any()


def test_a_tie_between_lanes_and_blocks_goes_to_the_lowest_index() -> None:
    # 40 centroids in three blocks, all rows e₀ or e₁: the first centroid of each kind wins.
    rows = np.zeros((80, 24))
    kinds = np.random.default_rng(0).integers(0, 2, 80)
    rows[np.arange(80), kinds] = 1
    case = Keys(((80,),), segment_tokens=80, cluster_tokens=2, iterations=3, rows=rows)
    _, labels = case.cluster()
    started = kinds[np.arange(40) * 2]
    assert (labels == np.array([int((started == kind).argmax()) for kind in kinds])).all()


def test_zeros_never_win_and_get_a_label_all_the_same() -> None:
    rows = np.random.default_rng(2).normal(size=(32, 24))
    rows[[0, 9]] = 0
    centroids, labels = Keys(((32,),), rows=rows, iterations=0).cluster()
    assert (labels[1:9] > 0).all(), "row 0 is the first centroid, and its direction is no number"
    assert labels[0] == labels[9] == 1, "0 with any other centroid"
    assert not centroids[0].any()


def test_a_row_that_is_no_number_spoils_one_centroid() -> None:
    rows = np.random.default_rng(3).normal(size=(64, 24))
    rows[37, 5] = np.nan
    case = Keys(((64,), (32,)), segment_tokens=64, rows=np.concatenate([rows, rows[:32]]))
    centroids, labels = case.cluster()
    assert labels[37] == 0
    bad = np.isnan(centroids).any(axis=1)
    assert bad.tolist() == [True] + [False] * (len(centroids) - 1)
    assert np.isnan(centroids[0]).sum() == 1
    assert (labels[np.arange(96) != 37] != 0).sum() == 95, "a centroid that is no number wins nothing"


def test_a_row_that_is_no_number_is_no_trouble_to_the_definition_either() -> None:
    x = np.random.default_rng(3).normal(size=(64, 24))
    x[37, 5] = np.nan
    _, labels = k_means(x, 8, 4)
    assert labels[37] == 0
    assert (np.delete(labels, 37) != 0).all()


def test_minus_infinity_beats_no_number() -> None:
    unit = np.eye(3)
    centroids = np.array([[np.nan] * 3, [1.0, 0, 0], [0, 1.0, 0]])
    assert nearest_of(np.array([[-np.inf, np.nan, 0]]), centroids[:2]).tolist() == [0]
    with np.errstate(invalid="ignore"):
        assert nearest_of(np.where(unit[:1] > 0, -np.inf, 0.0)[:, :1], np.array([[np.nan], [1.0]])).tolist() == [1]
    rows = np.full((16, 1), -np.inf)
    rows[8:] = 2.0
    case = Keys(((16,),), dim=1, iterations=0, rows=rows)
    # The centroid −inf has no direction; with the direction of row 8, −inf is a product like any other.
    assert case.cluster()[1].tolist() == [1] * 16


def test_work_is_counted_per_head() -> None:
    case = Keys(((64, 64), (64, 64)), segment_tokens=32, iterations=3)
    assert flops(case.args, [case.stored.nbytes]) == 4 * sum(2 * 32 * 4 * case.dim for _ in case.segments)
    short = Keys(((64, 64), (64, 64)), segment_tokens=1 << 30, iterations=3)
    assert flops(short.args, [short.stored.nbytes]) == 4 * sum(2 * 64 * 8 * case.dim for _ in range(4))


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_tokens": 0}, "segment_tokens is 0; allowed: at least 1"),
        ({"cluster_tokens": -1}, "cluster_tokens is -1; allowed: at least 1"),
        ({"iterations": -1}, "iterations is -1; allowed: at least 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_kv_heads": 1}, "run 1 names a sequence or KV head that does not exist"),
        ({"runs": np.array([(0, 1, 0), (0, 0, 0)] + [(2, 1, 0)] * 4)}, "run 1 is out of order"),
        ({"head_dim": 25}, "the span of run 0 is no whole number of rows"),
        ({"runs": np.zeros((2, 3), dtype=np.int64)}, "runs need shape"),
    ],
)
def test_sizes_and_runs_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    case = Keys()
    wrong = replace(case.args, **change)
    target = np.full(100_000, 0xEE, dtype=np.uint8)
    launch = Launch(wrong, (case.operand(),), (whole(target[:50_000]), whole(target[50_000:])))
    with pytest.raises(ValueError, match=message):
        run(launch, bytes_of)
    assert (target == 0xEE).all()
    if "at least" in message:
        assert message.split(";")[0] in str(check(wrong, [(6, 0)], [(1, 0), (1, 0)]))  # and the whole range


@pytest.mark.parametrize(("centroids", "labels"), [(96, 0), (-96, 0), (0, 8), (0, -8)])
def test_results_of_another_size_are_refused_before_anything_is_written(centroids: int, labels: int) -> None:
    with pytest.raises(ValueError, match="centroids have" if centroids else "labels have"):
        Keys().cluster(centroids=centroids, labels=labels)


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    wrong = replace(Keys().args, dtype="int3")  # type: ignore[arg-type]  # on purpose
    assert "dtype 'int3' is not one of" in str(check(wrong, [(6, 0)], [(1, 0), (1, 0)]))
