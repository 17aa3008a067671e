"""`score` that shares a weight out among the rows of a list, and its 16-bit summaries: the oracle is float64 NumPy."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import oracle
from tests.attention_case import Case, Float32, Int64, bytes_of, launch, region, same_bits, whole
from tests.launches import carry_out
from tests.test_kernels import weights_of
from tests.wrapping import reference
from tierloop.devices.clocks import VirtualClock
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.device import check as check_command
from tierloop.devices.drivers.reference import open_reference
from tierloop.devices.errors import Unsupported
from tierloop.devices.info import DeviceInfo, ExecutorInfo, MemoryInfo, Path
from tierloop.devices.kernels.contract import DType, Score, check, flops
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.wrappers import Recorded, read_recording
from tierloop.devices.wrappers.entries import Ended

pytestmark = pytest.mark.usefixtures("threads_for_little_work")

DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class Lists:
    """Summaries of some lists, as stored: `rows` int64 (sequences, kv_heads) long; float32 queries."""

    rows: Int64
    group: int
    head_dim: int
    dtype: str = "float32"
    summary: str = "mean"
    scale: float = 0.4
    seed: int = 0
    spread: float = 1.0
    queries: Float32 = field(init=False)
    stored: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        sequences, heads = self.rows.shape
        shape = (sequences, 1, heads * self.group, self.head_dim)
        self.queries = (random.normal(size=shape) * self.spread).astype(np.float32)
        self.stored = []
        for n in self.rows.ravel().tolist():
            means = random.normal(size=(n, self.head_dim))
            wide = np.stack([means, means + random.random(means.shape)], axis=1)
            self.stored.append(np.asarray(oracle.encode(wide if self.summary == "minmax" else means, self.dtype)))

    def of(self, sequence: int, kv_head: int) -> Any:
        """The summaries of a list."""
        return self.stored[sequence * self.rows.shape[1] + kv_head]

    def args(self, runs: Int64, reduce: str = "softmax") -> Score:
        sequences, heads = self.rows.shape
        scale = self.scale if reduce == "softmax" else 1.0
        how: Any = (self.summary, reduce, runs, self.dtype, scale)
        return Score(sequences, heads, self.group, self.head_dim, *how)

    def scores(self, cut: int = 1 << 30, threads: int = 1, reduce: str = "softmax", regions: int = 1) -> list[Float32]:
        """The scores of each list; runs of at most `cut` rows, dealt to `regions` regions, run after run."""
        runs, reads, lengths = self.operands(cut, regions)
        found = launch(self.args(runs, reduce), [whole(self.queries), reads], 4 * sum(lengths), threads)
        return np.split(found.view(np.float32), np.cumsum(lengths)[:-1])

    def operands(self, cut: int = 1 << 30, regions: int = 1) -> tuple[Int64, Operand, list[int]]:
        """Runs, the operand that holds them, and the rows of each list."""
        runs, pieces = [], []
        for at, (_, one) in zip(np.ndindex(self.rows.shape), enumerate(self.stored), strict=True):
            for first in range(0, max(len(one), 1), cut):
                runs.append((*at, 3 * first))  # positions may have gaps
                pieces.append(one[first : first + cut].reshape(-1).view(np.uint8))
        groups = np.array_split(np.arange(len(pieces)), min(regions, len(pieces)))
        segments = tuple(scattered([pieces[i] for i in some]) for some in groups)
        return np.array(runs, dtype=np.int64), segments, [len(one) for one in self.stored]


def scattered(pieces: list[NDArray[np.uint8]]) -> Segment:
    """Pieces from the last to the first in one region, at odd addresses."""
    spans, memory, offset = [], np.full(sum(len(p) + 1 for p in pieces) + 1, 0xEE, dtype=np.uint8), 1
    for piece in reversed(pieces):
        memory[offset : offset + len(piece)] = piece
        spans.append((offset, len(piece)))
        offset += len(piece) + 1
    return Segment(region(memory), Spans(spans[::-1]))


def expected(lists: Lists, sequence: int, kv_head: int) -> tuple[oracle.Float64, oracle.Float64]:
    """The scores of a list in float64, and how far rounding may take them: the bound of tests/oracle.py's weights."""
    rows = oracle.decode(lists.of(sequence, kv_head), lists.dtype)
    heads = lists.queries[sequence, 0].astype(np.float64).reshape(-1, lists.group, lists.head_dim)[kv_head]
    total, allowed = np.zeros(len(rows)), np.zeros(len(rows))
    for q in heads if len(rows) else ():
        terms = np.maximum(q * rows[:, 0], q * rows[:, 1]) if lists.summary == "minmax" else q * rows
        s = lists.scale * terms.sum(axis=1)
        ds = (lists.head_dim + 2) * abs(lists.scale) * np.abs(terms).sum(axis=1) + 2 * np.abs(s) + 2 * (s.max() - s)
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        total += p
        allowed += (np.expm1(2 * oracle.U * ds.max()) + (lists.group + 6) * oracle.U) * p + 2 * oracle.TINY
    return total, allowed


@st.composite
def some_lists(draw: st.DrawFn) -> Lists:
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    rows = draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 130]), min_size=6, max_size=6))
    dtype = draw(st.sampled_from(DTYPES))
    return Lists(
        rows=np.array(rows[: shape[0] * shape[1]], dtype=np.int64).reshape(shape),
        group=draw(st.integers(1, 9)),
        head_dim=draw(st.sampled_from([1, 7, 16, 24, 64])),
        dtype=dtype,
        summary=draw(st.sampled_from(["mean", "minmax"])) if dtype == "float32" else "mean",
        scale=draw(st.sampled_from([0.0, 0.125, 1.0, -1.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from([0.0, 1.0, 30.0])),
    )


@given(some_lists())
def test_every_score_is_within_the_bound_of_its_softmax(lists: Lists) -> None:
    found = iter(lists.scores())
    for sequence, kv_head in np.ndindex(lists.rows.shape):
        want, allowed = expected(lists, sequence, kv_head)
        assert (np.abs(next(found) - want) <= allowed).all()


@given(some_lists(), st.sampled_from([1, 5, 16, 40]), st.integers(1, 4), st.integers(1, 3))
def test_runs_regions_and_threads_change_no_bit(lists: Lists, cut: int, threads: int, regions: int) -> None:
    for one, other in zip(lists.scores(), lists.scores(cut, threads, regions=regions), strict=True):
        assert same_bits(one, other)


@given(some_lists())
def test_a_list_has_the_bits_that_it_has_in_a_launch_of_its_own(lists: Lists) -> None:
    together = lists.scores()
    for number, (sequence, kv_head) in enumerate(np.ndindex(lists.rows.shape)):
        queries = lists.queries.reshape(lists.rows.size, lists.group, lists.head_dim)[number]
        alone = replace(lists, rows=lists.rows[sequence : sequence + 1, kv_head : kv_head + 1])
        alone.queries, alone.stored = queries[None, None], [lists.of(sequence, kv_head)]
        assert same_bits(alone.scores()[0], together[number])


@given(some_lists(), st.sampled_from(["max", "sum"]))
def test_sixteen_bit_means_have_the_bits_of_the_same_numbers_in_float32(lists: Lists, reduce: str) -> None:
    wide = replace(lists, dtype="float32")
    wide.queries = lists.queries
    wide.stored = [oracle.decode(one, lists.dtype).astype(np.float32) for one in lists.stored]
    for how in (reduce, "softmax"):
        for one, other in zip(lists.scores(reduce=how), wide.scores(reduce=how), strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("n", [1, 16, 45])
@pytest.mark.parametrize("group", [1, 3, 4, 6])
def test_a_share_is_summed_in_the_order_of_the_contract(n: int, group: int) -> None:
    case = Case(group=group, head_dim=20, tokens=n, spread=3.0)
    logits = case.logits(case.layout(case.all_rows()))[:, 0]
    want = np.zeros(n, dtype=np.float32)
    for s in logits.T:
        w = weights_of((s - s.max()).astype(np.float32))
        lanes = np.zeros(16)
        for i, one in enumerate(w.tolist()):
            lanes[i % 16] += one
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half:]
        want = want + w / np.float32(lanes[0])
    args = Score(1, 1, group, 20, "mean", "softmax", np.zeros((1, 3), dtype=np.int64), scale=case.scale)
    found = launch(args, [whole(case.queries), whole(case.keys)], 4 * n).view(np.float32)
    assert same_bits(found, want.astype(np.float32))


def one_list(rows: list[list[float]], queries: list[list[float]], scale: float = 1.0) -> Float32:
    """The scores of a list among three, of which the first and the last are ordinary."""
    mine, q = np.array(rows, dtype=np.float32), np.array(queries, dtype=np.float32)
    calm = np.ones((2, q.shape[1]), dtype=np.float32)
    keys = np.concatenate([calm, mine, calm])
    runs = np.array([(0, h, 0) for h in range(3)], dtype=np.int64)
    sizes = np.array([len(calm), len(mine), len(calm)]) * 4 * q.shape[1]
    operand = (Segment(region(keys), Spans(np.stack([np.cumsum(sizes) - sizes, sizes], axis=1))),)
    args = Score(1, 3, len(q), q.shape[1], "mean", "softmax", runs, scale=scale)
    every = whole(np.concatenate([np.ones_like(q), q, np.ones_like(q)]))
    found = launch(args, [every, operand], 4 * len(keys)).view(np.float32)
    assert found[:2].tolist() == found[-2:].tolist() == [len(q) / 2] * 2
    return found[2:-2]


def test_a_row_of_logit_minus_infinity_gets_nothing() -> None:
    assert one_list([[-np.inf], [1], [1]], [[1]]).tolist() == [0, 0.5, 0.5]


def test_a_query_head_whose_logits_are_all_minus_infinity_shares_nothing_out() -> None:
    rows = [[-np.inf, 0], [-np.inf, 0]]
    assert one_list(rows, [[1, 0]]).tolist() == [0, 0]


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_nan_or_an_infinite_logit_spoils_its_own_list_only(odd: float) -> None:
    assert np.isnan(one_list([[odd], [1], [2]], [[1], [2]])).all()


def test_an_overflow_of_the_sum_is_an_infinite_logit() -> None:
    assert np.isnan(one_list([[3e38], [1]], [[3e38]])).all()


def test_weights_that_underflow_are_nothing() -> None:
    assert one_list([[0], [-88], [-1000]], [[1]]).tolist() == [1, 0, 0]


def test_equal_rows_get_equal_shares_of_every_query_head() -> None:
    assert one_list([[5]] * 8, [[3], [-40], [0]]).tolist() == [3 / 8] * 8


def test_no_rows_at_all_write_nothing() -> None:
    args = Score(1, 1, 2, 4, "mean", "softmax", np.zeros((0, 3), dtype=np.int64))
    assert launch(args, [whole(np.zeros(8, dtype=np.float32)), ()], 0).size == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_logit_of_the_softmax_has_the_bits_of_logits(dtype: DType) -> None:
    # Two rows of which one has the logit 0: the other's share says what its weight is, and so what its logit is.
    case = Case(dtype, group=4, head_dim=40, tokens=70, spread=2.0)
    place = case.layout(case.all_rows(), "paged")
    logits = case.logits(place)[:, 0]
    args = Score(1, 1, 4, 40, "mean", "softmax", place.runs, dtype=dtype, scale=case.scale)  # type: ignore[arg-type]
    found = launch(args, [whole(case.queries), place.keys], 4 * 70).view(np.float32)
    shares = [weights_of((s - s.max()).astype(np.float32)).astype(np.float64) for s in logits.T]
    want = np.sum([w / w.sum() for w in shares], axis=0)
    assert (np.abs(found / want - 1) <= 8 * oracle.U).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_agrees(dtype: DType) -> None:
    clock = VirtualClock()
    lists = Lists(np.array([[3, 40], [0, 70]]), group=3, head_dim=24, dtype=dtype, seed=5)
    runs, reads, lengths = lists.operands(cut=16, regions=2)
    target = (region(np.zeros(4 * sum(lengths), dtype=np.uint8)).all(),)
    command = Launch(lists.args(runs), (whole(lists.queries), reads), (target,))
    device = open_reference("emu:ref", Site(clock), {})
    (defined,) = carry_out(clock, device, command)
    device.close()
    np.testing.assert_allclose(np.concatenate(lists.scores()), defined.view(np.float32), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "mean"}, "reduce 'mean'; allowed: mean, minmax and max, sum, softmax"),
        ({"summary": "median"}, "summary 'median'"),
        ({"dtype": "int8"}, "dtype 'int8' of mean summaries is not one of float32, float16, bfloat16"),
        ({"dtype": "float16", "summary": "minmax"}, "dtype 'float16' of minmax summaries is not one of float32"),
        ({"scale": float("nan")}, "scale is nan; allowed: a finite float32 number"),
        ({"scale": 1e39}, "scale is 1e.39; allowed: a finite float32 number"),
        ({"scale": True}, "scale is True; allowed"),
        ({"scale": 0.5, "reduce": "max"}, "scale is 0.5 where reduce is 'max'; allowed: 1"),
    ],
)
def test_what_score_does_not_know_is_refused_at_submit_and_by_the_kernel(change: dict[str, Any], message: str) -> None:
    args = Score(1, 1, 2, 4, "mean", "softmax", np.zeros((1, 3), dtype=np.int64))
    reads, writes = [(1, 32), (1, 64)], [(1, 16)]
    assert check(args, reads, writes) is None
    wrong = replace(args, **change)
    assert re.search(message, check(wrong, reads, writes) or "")
    with pytest.raises(ValueError, match=message):
        launch(wrong, [whole(np.zeros(8, np.float32)), whole(np.zeros(16, np.float32))], 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_and_operations_follow_from_the_stored_type(dtype: Any) -> None:
    args = Score(1, 1, 2, 4, "mean", "softmax", np.zeros((1, 3), dtype=np.int64), dtype)
    nbytes = 3 * 4 * (4 if dtype == "float32" else 2)
    assert check(args, [(1, 32), (1, nbytes)], [(1, 12)]) is None
    assert "score bytes: 16 given, 12 needed" in (check(args, [(1, 32), (1, nbytes)], [(1, 16)]) or "")
    assert flops(args, [32, nbytes]) == 2 * 3 * 2 * 4


@pytest.mark.parametrize(("dtype", "is_taken"), [("float32", True), ("float16", True), ("bfloat16", False)])
def test_an_executor_takes_float32_summaries_and_the_types_that_it_has(dtype: Any, is_taken: bool) -> None:
    paths = (Path("test", 0, 0, 0),)
    executor = ExecutorInfo("cores", "cores", (0,), frozenset(), frozenset({"score"}), frozenset({"float16"}), paths)
    info = DeviceInfo("cpu", "cpu", "real", (MemoryInfo("test", 1 << 20),), (executor,))
    lists = Lists(np.array([[2]]), group=1, head_dim=4, dtype=dtype)
    runs, reads, _ = lists.operands()
    command = Launch(lists.args(runs), (whole(lists.queries), reads), (whole(np.zeros(2, dtype=np.float32)),))
    if is_taken:
        check_command(info, command, 0)
    else:
        with pytest.raises(Unsupported, match="dtype bfloat16; executor cores has"):
            check_command(info, command, 0)


def test_a_recording_keeps_how_a_launch_reduces(tmp_path: FilePath) -> None:
    on, path = Site(VirtualClock()), tmp_path / "a.jsonl"
    device = reference(on, [lambda device, inside: Recorded(device, inside, path)])
    lists = Lists(np.array([[2, 9]]), group=2, head_dim=4, dtype="bfloat16", scale=0.25)
    runs, reads, lengths = lists.operands()
    target = whole(np.zeros(sum(lengths), dtype=np.float32))
    carry_out(on.clock, device, Launch(lists.args(runs), (whole(lists.queries), reads), (target,)))
    device.close()
    (score,) = [one for one in read_recording(path).entries if isinstance(one, Ended) and one.verb == "score"]
    args = dict(score.args)
    assert (args["reduce"], args["dtype"], args["scale"]) == ("softmax", "bfloat16", 0.25)
    assert score.flops == 2 * 11 * 4 * 2


def digest() -> str:
    """The bits of small lists in every stored type: what must be the same on every machine."""
    from tierloop.devices.kernels.score import score  # not by `run`, which would compile all other kernels as well

    total = hashlib.sha256()
    for dtype in DTYPES:
        lists = Lists(np.array([[5, 40], [1, 90]]), group=6, head_dim=40, dtype=dtype, spread=3.0)
        runs, reads, lengths = lists.operands(cut=16)
        (target,) = whole(np.zeros(sum(lengths), dtype=np.float32))
        score(lists.args(runs), (whole(lists.queries), reads), ((target,),), bytes_of, threads=1)
        total.update(bytes_of(target.region).tobytes())
    return total.hexdigest()


def test_a_processor_without_vectors_beyond_the_baseline_gives_the_same_bits() -> None:
    root = FilePath(__file__).resolve().parent.parent
    code = "from tests.test_score_kernel import digest; print(digest())"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()
