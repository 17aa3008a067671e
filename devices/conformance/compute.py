"""Compute: every kernel that the device offers, in every dtype, against float64 on the same stored bytes.

What rounds stays within the bound that follows from the device's own `Arithmetic`; what does not round is exact.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.conformance import oracle
from tierloop.devices.conformance.clusters import judge_labels, judge_means, judge_nearest, make_keys, run_cluster
from tierloop.devices.conformance.judging import judge, judge_identities, judge_states
from tierloop.devices.conformance.launches import (
    Bench,
    Float32,
    as_bytes,
    attend_operands,
    run_attend,
    run_combine,
    run_logits,
    run_output,
)
from tierloop.devices.conformance.problems import SHAPES, Int64, Problem, Shape, by_split, in_runs_of, problem, shapes
from tierloop.devices.conformance.subject import Bytes, Lane, Skip, Subject, expect
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import (
    CODE_RANGE,
    ITEMSIZE,
    Append,
    Dense,
    Gather,
    Merge,
    Score,
    Topk,
    flops,
)
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans


def check_attend_is_attention(subject: Subject) -> None:
    """All dtypes, groups, head sizes, layouts and masks, and the soft-cap, with one root, one per split, and mixed."""
    for lane in subject.kernel_lanes("attend"):
        for shape in shapes(lane.executor.dtypes):
            given = problem(shape, subject.rng)
            for roots in (given.top_roots(), given.split_roots(), given.mixed_roots()):
                _attend(subject, lane, given, roots, f"{shape}")


def check_attend_survives_extreme_logits(subject: Subject) -> None:
    """Logits of ±10⁴, all logits equal, and values a thousand times as large."""
    for lane in subject.kernel_lanes("attend"):
        for dtype in sorted(lane.executor.dtypes):
            fused = dtype in Bench(subject, lane).arithmetic.fused
            for base in (SHAPES[1], SHAPES[0]) if fused else (SHAPES[1],):  # the second fits a fused kernel
                shape = replace(base, dtype=dtype, layout="paged")  # type: ignore[arg-type]  # a dtype of the device
                huge = problem(replace(shape, spread=4e3), subject.rng)
                equal = problem(replace(shape, spread=0.0), subject.rng)
                large = problem(shape, subject.rng)
                large.values = oracle.encode_values((large.decoded_values() * 1000).astype(np.float32), shape.dtype)
                for what, given in (("logits of ±10⁴", huge), ("equal logits", equal), ("large values", large)):
                    _attend(subject, lane, given, given.top_roots(), f"{what}, {shape}")


def check_one_token_gives_its_value(subject: Subject) -> None:
    """The state of one row is its logit, 1 and its value: bit for bit, where sums hold the value and are no wider than
    states."""
    for lane in subject.kernel_lanes("attend"):
        for dtype in sorted(lane.executor.dtypes):
            shape = Shape(dtype, tokens=1, num_sequences=1, num_kv_heads=1)  # type: ignore[arg-type]  # as above
            given = problem(shape, subject.rng)
            got = _attend(subject, lane, given, given.top_roots(), f"one token, {shape}")
            arithmetic = Bench(subject, lane).arithmetic
            if arithmetic.wire == "float32" and not _wider_than_wire(arithmetic):
                expect((got[..., 1] == 1).all(), f"one token, {dtype}: l is {got[..., 1].tolist()}, not 1")
                if arithmetic.accumulator == "float16" and dtype != "float16":
                    continue
                same = (got[..., 2:] == given.decoded_values().astype(np.float32)).all()
                expect(same, f"one token, {dtype}: acc is not the row's value")


def check_empty_parts_are_identities(subject: Subject) -> None:
    """Roots without rows, no rows at all, and rows that every query masks give (−inf, 0, 0) exactly."""
    for lane in subject.kernel_lanes("attend"):
        for dtype in sorted(lane.executor.dtypes):
            shape = Shape(dtype, tokens=40, q_len=2)  # type: ignore[arg-type]  # a dtype of the device
            fused = dtype in Bench(subject, lane).arithmetic.fused
            for q_len in (2, 1) if fused else (2,):  # of two queries the first hides a row, which fits no fused kernel
                given = problem(replace(shape, q_len=q_len), subject.rng)
                beyond = np.concatenate([given.top_roots(), [[0, 0, 0, 7], [1, 1, 2, 3]]]).astype(np.int64)
                got = _attend(subject, lane, given, beyond, f"roots without rows, {dtype}")
                judge_identities(got[-2:], f"attend, {dtype}: a root without rows")
            masked = problem(shape, subject.rng)
            masked.q_positions[:] = -1
            got = _attend(subject, lane, masked, masked.top_roots(), f"all rows masked, {dtype}")
            judge_identities(got, f"attend, {dtype}: rows that every query masks")
            none = problem(shape, subject.rng)
            none.keys = none.values = np.empty(0, dtype=np.uint8)
            none.runs, none.lengths = none.runs[:0], none.lengths[:0]
            got = _attend(subject, lane, none, none.top_roots(), f"no rows, {dtype}")
            judge_identities(got, f"attend, {dtype}: no rows")


def check_logits_are_scaled_products(subject: Subject) -> None:
    """One logit per row, query and member of the group, −inf where masked."""
    for lane in subject.kernel_lanes("logits"):
        for shape in shapes(lane.executor.dtypes):
            given = problem(shape, subject.rng)
            bench = Bench(subject, lane)
            want = given.expected_logits(bench.arithmetic)
            got = run_logits(bench, given).reshape(want.value.shape).astype(np.float64)
            masked = np.isneginf(want.value)
            expect((np.isneginf(got) == masked).all(), f"logits, {shape}: −inf is not where rows are masked")
            judge(got[~masked], want.value[~masked], want.error[~masked], f"logits, {shape}")
            bench.free()


def check_combine_is_attention_of_given_logits(subject: Subject) -> None:
    """Logits computed elsewhere, some of them −inf, and values give states."""
    for lane in subject.kernel_lanes("combine"):
        for shape in shapes(lane.executor.dtypes):
            given = problem(shape, subject.rng)
            bench = Bench(subject, lane)
            num = int(given.lengths.sum())
            logits = (subject.rng.normal(size=(num, shape.q_len, shape.group)) * 4).astype(np.float32)
            logits[subject.rng.random(logits.shape) < 0.1] = -np.inf
            exact = oracle.Expected(logits.astype(np.float64), np.zeros(logits.shape))
            for roots in (given.top_roots(), given.split_roots()):
                want = oracle.states(
                    exact, given.decoded_values(), given.rows, roots, shape.split_tokens, bench.arithmetic
                )
                got = run_combine(bench, given, logits, roots)
                judge_states(got, want, f"combine, {shape}")
            nothing = np.full_like(logits, -np.inf)
            judge_identities(
                run_combine(bench, given, nothing, given.top_roots()), f"combine, {shape}: all logits −inf"
            )
            bench.free()


def check_combine_of_logits_is_attend(subject: Subject) -> None:
    """The two halves give the bits of the whole."""
    for lane in subject.kernel_lanes("attend"):
        if not {"logits", "combine"} <= lane.executor.kernels:
            raise Skip(f"{lane.executor.name} offers attend without logits and combine")
        _needs_equal_bits(Bench(subject, lane).arithmetic)
        for shape in shapes(lane.executor.dtypes):
            given = problem(shape, subject.rng)
            bench = Bench(subject, lane)
            whole = run_attend(bench, given, given.mixed_roots())
            halves = run_combine(bench, given, run_logits(bench, given), given.mixed_roots())
            expect(whole.tobytes() == halves.tobytes(), f"combine of logits has other bits than attend: {shape}")
            bench.free()


def check_merge_is_the_softmax_over_parts(subject: Subject) -> None:
    """States of any nodes in any order, identities among them, give the output; a query without rows gives zeros."""
    for lane in subject.kernel_lanes("merge"):
        bench = Bench(subject, lane)
        for group, q_len, d_v in ((1, 1, 64), (3, 2, 80), (16, 1, 256)):
            nodes = [(1, 0), (0, 2), (0, 3), (2, 1), (3, 1)]
            roots = np.array([(s, h, *node) for s in range(2) for h in range(2) for node in nodes], dtype=np.int64)
            roots = roots[~((roots[:, 0] == 1) & (roots[:, 1] == 0))]  # this one has no states at all
            roots = subject.rng.permutation(roots)
            states = subject.rng.normal(size=(len(roots), q_len, group, 2 + d_v)).astype(np.float32)
            states[..., 0] *= subject.rng.choice([1.0, 30.0, 3000.0], size=states.shape[:-1])
            states[..., 1] = subject.rng.uniform(1, 90, size=states.shape[:-1])
            empty = subject.rng.random(states.shape[:-1]) < 0.3
            states[empty] = [-np.inf] + [0.0] * (1 + d_v)
            want = oracle.merged(states.astype(np.float64), roots, (2, q_len, 2, group, d_v), bench.arithmetic)
            args = Merge(2, 2, group, q_len, d_v, roots)
            sizes = np.full(len(roots), states[0].nbytes)
            reads = (bench.scattered(states.reshape(-1).view(np.uint8), sizes),)
            got = bench.launch(args, reads, bench.target(want.value.size * 4)).view(np.float32)
            what = f"merge, group {group}, q_len {q_len}, head_dim_v {d_v}"
            judge(got.reshape(want.value.shape).astype(np.float64), want.value, want.error, what)
            expect((got.reshape(want.value.shape)[want.value == 0] == 0).all(), f"{what}: no rows, but no zeros")
            bench.free()


def check_bits_do_not_depend_on_the_cut(subject: Subject) -> None:
    """One run or many, one launch or several cut at split borders, any roots: the same bits of output."""
    for lane in subject.kernel_lanes("attend"):
        if "merge" not in lane.executor.kernels:
            raise Skip(f"{lane.executor.name} offers attend without merge")
        _needs_equal_bits(Bench(subject, lane).arithmetic)
        for dtype in sorted(lane.executor.dtypes):
            shape = Shape(dtype, group=3, tokens=150, layout="dense")  # type: ignore[arg-type]  # a dtype of the device
            given = problem(shape, subject.rng)
            bench = Bench(subject, lane)
            want = run_output(bench, given, [(given, given.top_roots())])
            paged = in_runs_of(given, 16)
            single = in_runs_of(given, 1)
            evens, odds = by_split(paged, 0), by_split(paged, 1)
            for what, parts in (
                ("a root per split", [(given, given.split_roots())]),
                ("mixed roots", [(given, given.mixed_roots())]),
                ("runs of 16 rows", [(paged, given.top_roots())]),
                ("runs of one row", [(single, given.mixed_roots())]),
                ("two launches", [evens, odds]),
                ("two launches, the other way round", [odds, evens]),
            ):
                got = run_output(bench, given, parts)
                expect(got.tobytes() == want.tobytes(), f"{what} gave other bits than one dense launch, {dtype}")
            bench.free()


def check_operands_may_lie_in_several_memories(subject: Subject) -> None:
    """Keys in one memory and values in another give the bits that they give in one."""
    for lane in subject.kernel_lanes("attend"):
        memories = subject.operand_memories(lane)
        if len(memories) < 2:
            raise Skip(f"{lane.executor.name} reaches one memory only")
        given = problem(replace(SHAPES[0], dtype=sorted(lane.executor.dtypes)[0]), subject.rng)  # type: ignore[arg-type]
        want = run_attend(Bench(subject, lane), given, given.top_roots())
        for other in memories[1:]:
            bench = Bench(subject, lane)
            got = run_attend(bench, given, given.top_roots(), other)
            expect(
                got.tobytes() == want.tobytes(), f"values on {other.name} gave other bits than on {bench.memory.name}"
            )
            bench.free()


def check_score_is_what_the_summary_says(subject: Subject) -> None:
    """Mean keys and channel-wise bounds, reduced over the group by maximum and by sum."""
    for lane in subject.kernel_lanes("score"):
        bench = Bench(subject, lane)
        for group, d in ((1, 64), (3, 80), (7, 96), (4, 128), (16, 256)):
            lengths = subject.rng.integers(1, 9, 4)
            runs = np.array([(s, h, 0) for s in range(2) for h in range(2)], dtype=np.int64)
            rows = oracle.Rows.of(runs, lengths)
            num = int(lengths.sum())
            queries = subject.rng.normal(size=(2, 1, 2 * group, d)).astype(np.float32)
            low = subject.rng.normal(size=(num, d)).astype(np.float32)
            high = low + np.abs(subject.rng.normal(size=(num, d))).astype(np.float32)
            for summary, stored in (("mean", low), ("minmax", np.stack([low, high], axis=1))):
                for reduce in ("max", "sum"):
                    args = Score(2, 2, group, d, summary, reduce, runs)  # type: ignore[arg-type]  # literals above
                    want = oracle.scores(
                        queries.astype(np.float64), stored.astype(np.float64), rows, group, summary, reduce,
                        bench.arithmetic,
                    )  # fmt: skip
                    sizes = lengths * stored[0].nbytes
                    reads = (bench.whole(as_bytes(queries)), bench.scattered(as_bytes(stored), sizes))
                    got = bench.launch(args, reads, bench.target(num * 4)).view(np.float32)
                    judge(got.astype(np.float64), want.value, want.error, f"score, {summary}, {reduce}, group {group}")
        bench.free()


def check_score_shares_a_weight_out_among_each_list(subject: Subject) -> None:
    """A softmax over the rows of one sequence and KV head, summed over the group; in every float type of the device."""
    for lane in subject.kernel_lanes("score"):
        bench = Bench(subject, lane)
        types = ["float32", *sorted(lane.executor.dtypes & {"float16", "bfloat16"})]
        for group, d, most in ((1, 64, 9), (3, 80, 40), (7, 96, 3), (4, 128, 130)):
            lengths = subject.rng.integers(1, most, 8)
            runs = np.array([(s, h, p) for s in range(2) for h in range(2) for p in (0, most)], dtype=np.int64)
            rows = oracle.Rows.of(runs, lengths)
            num, scale = int(lengths.sum()), 3.0 / d**0.5
            queries = subject.rng.normal(size=(2, 1, 2 * group, d)).astype(np.float32)
            low = subject.rng.normal(size=(num, d)).astype(np.float32)
            both = np.stack([low, low + np.abs(subject.rng.normal(size=(num, d))).astype(np.float32)], axis=1)
            for summary, dtype in [("minmax", "float32"), *(("mean", dtype) for dtype in types)]:
                stored = oracle.encode(both if summary == "minmax" else low, dtype)
                summaries = oracle.decode(stored, dtype).reshape(both.shape if summary == "minmax" else low.shape)
                args = Score(2, 2, group, d, summary, "softmax", runs, dtype, scale)  # type: ignore[arg-type]  # as above
                want = oracle.shares(
                    queries.astype(np.float64), summaries, rows, group, summary, scale, bench.arithmetic
                )
                reads = (bench.whole(as_bytes(queries)), bench.scattered(stored, lengths * (stored.nbytes // num)))
                got = bench.launch(args, reads, bench.target(num * 4)).view(np.float32)
                judge(
                    got.astype(np.float64), want.value, want.error, f"score, {summary}, softmax, {dtype}, group {group}"
                )
        bench.free()


def check_topk_breaks_ties_by_index(subject: Subject) -> None:
    """Score descending, then index ascending; NaN last; −1 beyond the end of a list."""
    for lane in subject.kernel_lanes("topk"):
        bench = Bench(subject, lane)
        odd = np.array([np.nan, 1.0, np.inf, -np.inf, 0.0, -0.0, 1.0, np.nan, -np.inf, 1e-45, 0.0], dtype=np.float32)
        tied = subject.rng.integers(0, 4, 200).astype(np.float32)
        spread = subject.rng.normal(size=300).astype(np.float32)
        for k, lists in (
            (1, [odd, tied, spread]),
            (5, [odd, tied, spread, spread[:5], spread[:4], odd[:1], odd[:0]]),
            (64, [tied, odd, spread]),
            (250, [spread, tied]),
            (3, [np.full(50, 7, dtype=np.float32), np.full(9, np.nan, dtype=np.float32)]),
        ):
            lengths = np.array([len(each) for each in lists], dtype=np.int64)
            scores = np.concatenate(lists)
            want = oracle.topk(scores, lengths, k)
            reads = (bench.scattered(as_bytes(scores), lengths * 4),)
            got = bench.launch(Topk(k, lengths), reads, bench.target(want.nbytes)).view(np.int64).reshape(want.shape)
            wrong = np.argwhere(got != want)
            if wrong.size:
                i, j = wrong[0].tolist()
                expect(False, f"topk, k {k}, list {i}: place {j} is index {got[i, j]}, not {want[i, j]}")
        bench.free()


def check_topk_of_groups_ranks_their_maximum_or_sum(subject: Subject) -> None:
    """The score of an entry is that of its group: the largest, or the float32 sum in ascending order; NaN if one is."""
    for lane in subject.kernel_lanes("topk"):
        bench = Bench(subject, lane)
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3e38, -1.0], dtype=np.float32)
        lengths = np.array([40, 0, 13, 300], dtype=np.int64)
        for group in (2, 3, 7, 16):
            plain = subject.rng.normal(size=(int(lengths.sum()), group)).astype(np.float32)
            for scores in (plain, np.where(plain > 1, subject.rng.choice(odd, plain.shape), np.round(plain))):
                for reduce in ("max", "sum"):
                    want = oracle.topk(scores, lengths, 25, reduce)
                    args = Topk(25, lengths, group, reduce)
                    reads = (bench.scattered(as_bytes(scores), lengths * group * 4),)
                    got = bench.launch(args, reads, bench.target(want.nbytes)).view(np.int64).reshape(want.shape)
                    what = f"topk, group {group}, {reduce}"
                    for i, j in np.argwhere(got != want)[:1].tolist():
                        expect(False, f"{what}, list {i}: place {j} is index {got[i, j]}, not {want[i, j]}")
        bench.free()


def check_cluster_gives_each_row_its_centroid(subject: Subject) -> None:
    """Separated rows are told apart, other rows get the best centroid, and centroids are the means of their rows."""
    for lane in subject.kernel_lanes("cluster"):
        bench = Bench(subject, lane)
        for dtype in sorted(lane.executor.dtypes):
            for dim in (64, 20, 128):
                what = f"cluster, {dtype}, head_dim {dim}"
                easy = make_keys(dtype, dim, 1.0, subject.rng)  # type: ignore[arg-type]  # a dtype of the device
                centroids, labels = run_cluster(bench, easy, 5)
                judge_labels(labels, easy.labels, what)
                judge_means(bench, easy, centroids, labels, what)
                hard = make_keys(dtype, dim, 40.0, subject.rng)  # type: ignore[arg-type]  # likewise
                centroids, labels = run_cluster(bench, hard, 0)
                judge_nearest(bench, hard, labels, f"{what}, no round")
                judge_means(bench, hard, centroids, labels, f"{what}, no round")
        bench.free()


def check_gather_keeps_every_byte(subject: Subject) -> None:
    """Scattered rows end to end, in order."""
    for lane in subject.kernel_lanes("gather"):
        bench = Bench(subject, lane)
        for sizes in ([256] * 40, [4, 128, 64, 4096, 12], [64], []):
            data = subject.bytes(sum(sizes))
            target = bench.target(data.nbytes)
            got = bench.launch(Gather(), (bench.scattered(data, np.array(sizes, dtype=np.int64)),), target)
            expect(np.array_equal(got, data), f"gather of {len(sizes)} spans gave other bytes")
        bench.free()


def check_append_rounds_to_nearest_even(subject: Subject) -> None:
    """Ties, overflow, subnormal numbers, signed zeros and infinities, in every dtype, into scattered targets."""
    for lane in subject.kernel_lanes("append"):
        bench = Bench(subject, lane)
        for dtype in sorted(lane.executor.dtypes - CODE_RANGE.keys()):
            rows = _hard_to_round(subject.rng)
            want = oracle.encode(rows, dtype)
            reads = (bench.scattered(as_bytes(rows), np.array([64, 256, rows.nbytes - 320])),)
            room = bench.target(want.nbytes + 64)[0].region
            half = want.nbytes // 8 * 4
            target = (Segment(room, Spans([(half + 32, want.nbytes - half), (0, half)])),)
            got = bench.launch(Append(dtype), reads, target)  # type: ignore[arg-type]  # a dtype of the device
            item = np.dtype(np.uint32 if ITEMSIZE[dtype] == 4 else np.uint16)
            a, b = got.view(item), want.view(item)
            wrong = np.flatnonzero((a != b) & ~np.isnan(rows))
            if wrong.size:
                i = int(wrong[0])
                expect(False, f"append, {dtype}: {rows[i]!r} became {a[i]:#x}, not {b[i]:#x}")
            numbers = oracle.decode(got, dtype)
            expect((np.isnan(numbers) == np.isnan(rows)).all(), f"append, {dtype}: NaN did not stay NaN")
            bench.free()


def check_dense_runs_its_function_once(subject: Subject) -> None:
    """The function gets the bytes of each operand, is called once, and what it writes is stored at the end."""
    for lane in subject.kernel_lanes("dense"):
        bench = Bench(subject, lane)
        a, b = subject.bytes(64), subject.bytes(96)
        calls: list[int] = []

        def function(reads: list[Bytes], writes: list[Bytes], calls: list[int] = calls) -> None:
            calls.append(len(reads))
            writes[0][:] = reads[0][::-1]
            writes[1][:] = reads[1] ^ 0xFF

        args = Dense("a projection", 12_345, 1_000, 200, function)
        reads = bench.scattered(a, np.array([4, 28, 32])), bench.whole(b)
        targets = bench.target(64), bench.target(96)
        completion = subject.run(lane, Launch(args, reads, targets))
        expect(calls == [2], f"the function of dense was called {len(calls)} times")
        expect(np.array_equal(subject.read(targets[0][0]), a[::-1]), "the first result of dense is not stored")
        expect(np.array_equal(subject.read(targets[1][0]), b ^ 0xFF), "the second result of dense is not stored")
        expect(completion.flops == 12_345, f"dense of 12345 FLOPs says that it did {completion.flops}")
        alone = subject.run(lane, Launch(Dense("sampling", 10, 0, 0), (), ()))
        if subject.info.provenance == "emulated" and subject.clock.virtual:
            expect(alone.ended_ns >= alone.started_ns, "dense without a function ended before it started")
        bench.free()


def check_work_is_counted(subject: Subject) -> None:
    """A launch says how many FLOPs it computed: some, and no more than the contract counts for it."""
    for lane in subject.kernel_lanes("attend"):
        given = problem(replace(SHAPES[0], dtype=sorted(lane.executor.dtypes)[0]), subject.rng)  # type: ignore[arg-type]
        bench = Bench(subject, lane)
        args = given.attend(given.top_roots())
        reads, target = attend_operands(bench, given, args.roots)
        completion = bench.completed(args, reads, target)
        most = flops(args, [sum(s.nbytes for _, s in operand) for operand in reads])
        expect(0 < completion.flops <= most, f"attend of at most {most} FLOPs says that it did {completion.flops}")
        bench.free()


def _attend(subject: Subject, lane: Lane, given: Problem, roots: Int64, what: str) -> Float32:
    bench = Bench(subject, lane)
    got = run_attend(bench, given, roots)
    judge_states(got, given.expected_states(roots, bench.arithmetic), f"attend, {what}")
    bench.free()
    return got


def _wider_than_wire(arithmetic: Arithmetic) -> bool:
    return oracle.ROUNDOFF[arithmetic.accumulator] < oracle.ROUNDOFF[arithmetic.wire]


def _needs_equal_bits(arithmetic: Arithmetic) -> None:
    if not arithmetic.cut_invariant:
        raise Skip("it says that the order of its sums depends on the launch: it is held to the bound only")
    if _wider_than_wire(arithmetic):
        raise Skip(
            f"its {arithmetic.accumulator} sums are wider than its {arithmetic.wire} states, so what is handed over "
            "is rounded and what is not is not"
        )


def _hard_to_round(rng: np.random.Generator) -> Float32:
    """512 numbers: halves between neighbours of both 16-bit types, the ends of their ranges, and what is no number."""
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        65504.0,
        65519.9,
        65520.0,
        3.4e38,
        -3.4e38,
        1e-45,
        6e-8,
        2.9e-8,
        1e-40,
    ]
    bits = rng.integers(0, 1 << 32, 200, dtype=np.uint32)
    for_bfloat16 = (bits & 0xFFFF0000) | 0x8000
    for_float16 = ((rng.integers(0, 1 << 13, 100, dtype=np.uint32) + (112 << 10)) << 13) | 0x1000
    drawn = np.concatenate([bits[:98], for_bfloat16[98:], for_float16]).astype(np.uint32).view(np.float32)
    normal = rng.normal(size=512 - len(special) - len(drawn))
    return np.concatenate([np.array(special, dtype=np.float32), drawn, normal.astype(np.float32)])
