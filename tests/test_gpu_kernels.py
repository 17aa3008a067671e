"""The kernels in torch: close to the living definition wherever that is a number, and as infinite or NaN as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention_case import Case, bytes_of, whole
from tests.gpu_rig import Rig
from tests.launches import every_kernel
from tierloop.devices.commands import Launch, Operand, Write
from tierloop.devices.drivers.gpu_tiles import Tiles
from tierloop.devices.errors import OutOfRange
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import DTYPES, KERNELS
from tierloop.devices.kernels.definition import Given, define
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

Bytes = NDArray[np.uint8]
EXACT = {"topk", "append", "quantize", "chase", "gather", "dense"}


def on_the_gpu(rig: Rig, launch: Launch) -> list[Bytes]:
    """Put a launch's regions on the GPU, run it there, and read what it wrote."""
    there: dict[int, Region] = {}

    def moved(operand: Operand) -> Operand:
        for one, _ in operand:
            if one.id not in there:
                there[one.id] = rig.device.alloc(max(one.nbytes, 1))
                if one.nbytes:
                    rig.do(Write(there[one.id].at(0, one.nbytes), bytes_of(one)), rig.to)
        return tuple(Segment(there[one.id], spans) for one, spans in operand)

    reads, writes = tuple(moved(o) for o in launch.reads), tuple(moved(o) for o in launch.writes)
    rig.do(Launch(launch.args, reads, writes))
    results = [np.concatenate([rig.bytes(segment) for segment in operand]) for operand in writes]
    for one in there.values():
        rig.device.free(one)
    return results


def defined(launch: Launch) -> list[Bytes]:
    """What the living definition gives."""
    reads = []
    for operand in launch.reads:
        pieces = [bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()]
        sizes = np.concatenate([spans.array[:, 1] for _, spans in operand])
        reads.append(Given(np.concatenate(pieces) if pieces else np.empty(0, np.uint8), sizes))
    return define(launch.args, reads, [sum(s.spans.nbytes for s in operand) for operand in launch.writes])


def alike(got: Bytes, want: Bytes, tolerance: float = 1e-4) -> None:
    """The same infinities and NaN, and numbers that are as close as float32 sums of some hundred terms are."""
    a, b = got.view(np.float32).astype(np.float64), want.view(np.float32).astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), f"NaN differ at {np.flatnonzero(np.isnan(a) != np.isnan(b))[:5]}"
    infinite = np.isinf(b)
    assert np.array_equal(a[infinite], b[infinite])
    finite = np.isfinite(b)
    assert np.isfinite(a[finite]).all()
    scale = np.abs(b[finite]).max(initial=1.0)
    assert np.abs(a[finite] - b[finite]).max(initial=0.0) <= tolerance * scale


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_kernel_does_what_its_definition_says(dtype: Any) -> None:
    rig = Rig()
    launches = every_kernel(dtype)
    assert launches.keys() == KERNELS
    for kernel, launch in launches.items():
        for got, want in zip(on_the_gpu(rig, launch), defined(launch), strict=True):
            if kernel in EXACT:
                assert got.tobytes() == want.tobytes(), kernel
            elif kernel == "cluster" and got.nbytes == 8 * 120:
                assert got.tobytes() == want.tobytes(), "labels"
            else:
                alike(got, want)
    rig.device.close()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16", "fp8_e4m3"])),
        num_sequences=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        q_len=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 7, 16])),
        head_dim_v=draw(st.sampled_from([1, 5, 16])),
        tokens=draw(st.integers(3, 40)),
        split_tokens=draw(st.sampled_from([1, 3, 8, 64])),
        seed=draw(st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from([0.0, 1.0, 30.0])),
    )


@given(cases(), st.sampled_from(["dense", "paged", "rows"]), st.data())
def test_what_is_not_finite_spoils_what_it_counts_for_and_nothing_else(
    case: Case, kind: str, data: st.DataObject
) -> None:
    rows = case.all_rows()
    rows = rows[np.random.default_rng(case.seed).random(len(rows)) < data.draw(st.sampled_from([0.3, 1.0]))]
    place, roots = case.layout(rows, kind), case.roots_of(rows)
    width = contract.ITEMSIZE[case.dtype]
    for operand in (place.keys, place.values):
        for region, spans in operand:
            for _ in range(data.draw(st.integers(0, 3)) if len(spans) else 0):
                offset = int(spans.array[data.draw(st.integers(0, len(spans) - 1)), 0])
                _spoil(bytes_of(region), case.dtype, offset // width * width, data.draw(st.integers(0, 2)))
    nbytes = len(roots) * case.q_len * case.group * (2 + case.head_dim_v) * 4
    launch = Launch(
        case.attend_args(place.runs, roots),
        (whole(case.queries), place.keys, place.values),
        (whole(np.zeros(nbytes, np.uint8)),),
    )
    with np.errstate(all="ignore"):
        want = defined(launch)[0]
    shape = (-1, 2 + case.head_dim_v)
    got_rows, want_rows = (x.view(np.float32).reshape(shape) for x in (on_the_gpu(Rig(), launch)[0], want))
    spoilt = np.isnan(want_rows).any(axis=1) | np.isinf(want_rows[:, 0])
    alike(got_rows[~spoilt].copy().view(np.uint8), want_rows[~spoilt].copy().view(np.uint8), 1e-3)
    for a, b in zip(got_rows[spoilt], want_rows[spoilt], strict=True):
        if np.isnan(b[1]):
            assert np.isnan(a[1])
            assert np.isnan(a[2:]).all()
        else:
            assert np.array_equal(np.isnan(a), np.isnan(b))


def _spoil(stored: Bytes, dtype: str, offset: int, which: int) -> None:
    """Put +inf, −inf or NaN at an element; fp8 has NaN only."""
    if dtype == "fp8_e4m3":
        stored[offset] = 0x7F
        return
    bits = {"float32": (0x7F800000, 0xFF800000, 0x7FC00000), "float16": (0x7C00, 0xFC00, 0x7E00)}
    kinds = bits.get(dtype, (0x7F80, 0xFF80, 0x7FC0))
    width = contract.ITEMSIZE[dtype]
    stored[offset : offset + width] = np.frombuffer(kinds[which].to_bytes(width, "little"), np.uint8)


@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-45]), max_size=12), min_size=1,
             max_size=5),
    st.integers(1, 14),
    st.integers(1, 3),
    st.sampled_from(["max", "sum"]),
)  # fmt: skip
def test_ties_are_broken_by_index(lists: list[list[float]], k: int, group: int, reduce: Any) -> None:
    entries = np.array([x for one in lists for x in one], dtype=np.float32).repeat(group)
    launch = Launch(
        contract.Topk(k, np.array([len(one) for one in lists], dtype=np.int64), group, reduce),
        (whole(entries),),
        (whole(np.zeros(8 * k * len(lists), np.uint8)),),
    )
    assert on_the_gpu(Rig(), launch)[0].tobytes() == defined(launch)[0].tobytes()


@pytest.mark.parametrize("kernel", ["attend", "logits", "combine", "score"])
def test_little_room_means_more_pieces_and_the_same_result(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = every_kernel("float16")[kernel]
    want = on_the_gpu(Rig(), launch)[0]
    chunks = Tiles.chunks
    monkeypatch.setattr(Tiles, "chunks", lambda self, nbytes, room: chunks(self, nbytes, 2 * nbytes))
    alike(on_the_gpu(Rig(), launch)[0], want, 1e-6)


@pytest.mark.parametrize(
    ("roots", "named"),
    [
        ([[0, 0, 70, 0]], "root 0 is no tree node"),
        ([[0, 1, 0, 0]], "root 0 is no tree node"),
        ([[0, 0, 1, 0], [0, 0, 0, 1]], "lies inside another"),
    ],
)
def test_roots_that_cannot_be_merged_are_named(roots: list[list[int]], named: str) -> None:
    states = whole(np.zeros(12 * len(roots), np.uint8))
    args = contract.Merge(1, 1, 1, 1, 1, np.array(roots, dtype=np.int64))
    with pytest.raises(OutOfRange, match=named):
        on_the_gpu(Rig(), Launch(args, (states,), (whole(np.zeros(4, np.uint8)),)))


def test_runs_out_of_order_are_named() -> None:
    runs = np.array([[0, 0, 4], [0, 0, 0]], dtype=np.int64)
    keys = whole(np.zeros(8, np.uint8))[0].region
    segment = Segment(keys, Spans([(0, 4), (4, 4)]))
    args = contract.Logits("float32", 1, 1, 1, 1, 1, 1.0, runs, np.array([[9]], dtype=np.int64))
    with pytest.raises(OutOfRange, match="run 1 is out of order"):
        on_the_gpu(Rig(), Launch(args, (whole(np.zeros(4, np.uint8)), (segment,)), (whole(np.zeros(8, np.uint8)),)))
