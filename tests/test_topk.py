"""topk on long lists, where a sample, a bound and a buffer decide what is looked at: always the same exact answer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention_case import Float32, launch, whole
from tierloop.devices.kernels.contract import Topk, check, flops

Int64 = NDArray[np.int64]
Reduce = Literal["max", "sum"]
KINDS = (
    "normal",
    "equal",
    "ascending",
    "descending",
    "two values",
    "few values",
    "mostly -inf",
    "mostly NaN",
    "all NaN",
    "both zeros",
    "any bits",
    "what a sample sees is best",
    "what a sample sees is worst",
)

pytestmark = pytest.mark.usefixtures("threads_for_little_work")


def scores_of(kind: str, n: int, random: np.random.Generator) -> Float32:
    ramp = np.arange(n, dtype=np.float32)
    made: dict[str, Any] = {
        "normal": lambda: random.normal(size=n),
        "equal": lambda: np.full(n, -3.5),
        "ascending": lambda: ramp,
        "descending": lambda: -ramp,
        "two values": lambda: random.integers(0, 2, n),
        "few values": lambda: random.integers(0, 9, n) / 7,
        "mostly -inf": lambda: np.where(random.random(n) < 0.99, -np.inf, random.normal(size=n)),
        "mostly NaN": lambda: np.where(random.random(n) < 0.99, np.nan, random.normal(size=n)),
        "all NaN": lambda: np.full(n, np.nan),
        "both zeros": lambda: np.where(random.random(n) < 0.5, 0.0, -0.0),
        "any bits": lambda: random.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
        "what a sample sees is best": lambda: np.where(ramp % 16 == 0, 2 + ramp, 0),
        "what a sample sees is worst": lambda: np.where(ramp % 16 == 0, -ramp, ramp),
    }
    return np.ascontiguousarray(made[kind](), dtype=np.float32)


def best(
    scores: Float32, lengths: list[int], k: int, threads: int = 1, group: int = 1, reduce: Reduce = "max"
) -> Int64:
    args = Topk(k, np.array(lengths, dtype=np.int64), group, reduce)
    return launch(args, [whole(scores)], 8 * len(lengths) * k, threads).view(np.int64).reshape(len(lengths), k)


def expected(scores: Float32, lengths: list[int], k: int) -> Int64:
    rows = np.full((len(lengths), k), -1, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        wide = scores.astype(np.float64)
    for row, one in zip(rows, np.split(wide, np.cumsum(lengths)[:-1]), strict=True):
        order = np.lexsort((np.arange(len(one)), -one))[:k]
        row[: len(order)] = order
    return rows


@pytest.mark.parametrize("k", [1, 63, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_long_lists_of_every_kind_are_selected_exactly(kind: str, k: int) -> None:
    scores = scores_of(kind, 20_011, np.random.default_rng(k))
    assert (best(scores, [len(scores)], k) == expected(scores, [len(scores)], k)).all()


@settings(max_examples=30)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    st.integers(0, 1500),
    st.integers(0, 2**32 - 1),
)
def test_lists_of_any_lengths_are_selected_exactly(kind: str, lengths: list[int], k: int, seed: int) -> None:
    scores = scores_of(kind, sum(lengths), np.random.default_rng(seed))
    assert (best(scores, lengths, k) == expected(scores, lengths, k)).all()


@pytest.mark.parametrize("k", [9999, 10_000, 10_001])
def test_all_of_a_list_comes_out_sorted(k: int) -> None:
    scores = scores_of("few values", 10_000, np.random.default_rng(0))
    assert (best(scores, [10_000], k) == expected(scores, [10_000], k)).all()


def test_neighbouring_scores_are_told_apart() -> None:
    # Consecutive float32 around the sign and around a power of two, shuffled.
    bits = np.concatenate([np.arange(3000), 0x80000000 + np.arange(1, 3000), 0x40000000 - 1500 + np.arange(3000)])
    scores = np.random.default_rng(0).permutation(bits.astype(np.uint32)).view(np.float32)
    assert (best(scores, [len(scores)], 500) == expected(scores, [len(scores)], 500)).all()
    assert (best(-scores, [len(scores)], 500) == expected(-scores, [len(scores)], 500)).all()


def test_threads_share_many_lists_without_changing_one() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 9000, 40).tolist()
    scores = np.concatenate([scores_of(KINDS[i % len(KINDS)], n, random) for i, n in enumerate(lengths)])
    found = best(scores, lengths, 200, threads=3)
    assert (found == expected(scores, lengths, 200)).all()


def of_groups(scores: Float32, group: int, reduce: Reduce) -> Float32:
    """One score for each entry, member by member in plain Python."""
    entries = []
    for members in scores.reshape(-1, group):
        total = members[0]
        for x in members[1:]:
            with np.errstate(all="ignore"):
                total = np.float32(total + x) if reduce == "sum" else np.float32(np.nan) if x != x else max(total, x)
            if total != total:
                break  # a NaN stays one
        entries.append(total)
    return np.array(entries, dtype=np.float32)


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.integers(0, 100),
    st.integers(1, 17),
    st.sampled_from(["max", "sum"]),
    st.integers(0, 2**32 - 1),
)
def test_entries_of_a_group_are_ranked_by_their_maximum_or_sum(
    kind: str, lengths: list[int], k: int, group: int, reduce: Reduce, seed: int
) -> None:
    scores = scores_of(kind, sum(lengths) * group, np.random.default_rng(seed))
    wanted = expected(of_groups(scores, group, reduce), lengths, k)
    assert (best(scores, lengths, k, group=group, reduce=reduce) == wanted).all()


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_entry_with_a_nan_in_any_place_comes_last(place: int, reduce: Reduce) -> None:
    scores = np.array([[5, 6, 7], [-np.inf, -np.inf, -np.inf], [1, 2, 3]], dtype=np.float32)
    scores[0, place] = np.nan
    assert best(scores, [3], 3, group=3, reduce=reduce).tolist() == [[2, 1, 0]]


def test_a_sum_is_rounded_member_by_member_in_ascending_order() -> None:
    # In float32 a half of 2**24's last place is lost when it is added to it, and counts when it is added before.
    scores = np.array([[2**24, 1, 1], [1, 1, 2**24], [1, 2**24, 1]], dtype=np.float32)
    assert best(scores, [3], 3, group=3, reduce="sum").tolist() == [[1, 0, 2]]


def test_threads_share_lists_of_groups_without_changing_one() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(0, 9000, 40).tolist()
    scores = random.normal(size=(sum(lengths), 4)).astype(np.float32)
    wanted = expected(scores.max(axis=1), lengths, 200)
    assert (best(scores.ravel(), lengths, 200, threads=3, group=4) == wanted).all()


@pytest.mark.parametrize(("group", "reduce"), [(0, "max"), (-2, "sum"), (1 << 60, "max"), (2, "mean")])
def test_a_group_or_reduction_that_cannot_be_is_refused(group: int, reduce: Any) -> None:
    with pytest.raises(ValueError, match=r"group .* at least 1, and max or sum"):
        best(np.ones(4, dtype=np.float32), [2], 1, group=group, reduce=reduce)


def test_scores_that_are_too_few_for_the_groups_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match=r"16 bytes of scores .* 24 are needed for 2 entries of 3"):
        best(np.ones(4, dtype=np.float32), [2], 1, group=3)


def test_no_list_and_no_k_give_nothing() -> None:
    assert best(np.zeros(0, dtype=np.float32), [], 5).shape == (0, 5)
    assert best(np.ones(4, dtype=np.float32), [4, 0], 0).shape == (2, 0)


@pytest.mark.parametrize(("lengths", "k"), [([-1, 5], 1), ([1 << 32], 1), ([4], -1)])
def test_lengths_and_k_that_cannot_be_are_refused(lengths: list[int], k: int) -> None:
    args = Topk(k, np.array(lengths, dtype=np.int64))
    with pytest.raises(ValueError, match=r"k = .*lengths"):
        launch(args, [whole(np.ones(4, dtype=np.float32))], 0)


@pytest.mark.parametrize(("reduce", "group", "additions"), [("max", 4, 0), ("sum", 4, 30), ("sum", 1, 0)])
def test_only_additions_are_counted_as_arithmetic(reduce: Reduce, group: int, additions: int) -> None:
    args = Topk(3, np.array([4, 6], dtype=np.int64), group, reduce)
    assert flops(args, [10 * group * 4]) == additions


@pytest.mark.parametrize(
    ("args", "nbytes", "wrong"),
    [
        (Topk(1, np.array([2]), 3), 8, "score bytes: 8 given, 24 needed"),
        (Topk(1, np.array([2]), 0), 8, "group is 0; allowed: a whole number from 1"),
        (Topk(1, np.array([2]), 2, "mean"), 16, "reduce is 'mean'; allowed: 'max', 'sum'"),  # type: ignore[arg-type]
    ],
)
def test_a_group_that_does_not_fit_is_refused_when_it_is_submitted(args: Topk, nbytes: int, wrong: str) -> None:
    assert wrong in str(check(args, [(1, nbytes)], [(1, 8)]))
