"""Fused attention of the gpu driver: states from an output and its log-sum-exp, on a stand-in's flash attention.

The oracle is float64 on the stored rows and on queries that are rounded already, so that what is left of the error is
the rounding of weights and outputs. Every test says whether the kernel ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests import oracle
from tests.attention_case import Case, Layout, bytes_of, whole
from tests.gpu_rig import Rig
from tests.test_gpu_kernels import alike, defined, on_the_gpu
from tierloop.devices import states
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.conformance import run
from tierloop.devices.conformance.problems import SHAPES, problem
from tierloop.devices.device import Device
from tierloop.devices.drivers import gpu_fused
from tierloop.devices.drivers.gpu import GpuDevice, open_gpu
from tierloop.devices.drivers.gpu_options import Options
from tierloop.devices.drivers.gpu_runtime import FusedKernel
from tierloop.devices.drivers.gpu_tiles import Tiles
from tierloop.devices.errors import ConfigurationError, ProtocolError, Timeout, Unsupported
from tierloop.devices.info import Arithmetic
from tierloop.devices.kernels.contract import DType
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.emulators.host_accelerator import HostAccelerator, HostFlash

MIB = 1 << 20
FLASH: dict[str, Any] = {"capacity": 4 * MIB, "attention": "flash"}
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class Handed(NamedTuple):
    """What a kernel was given: whether keys and values lie in the slab, and how many sequences."""

    keys_stay: bool
    values_stay: bool
    sequences: int


class Watched(HostAccelerator):
    """Keeps what its kernel was handed."""

    def __init__(self, **more: Any) -> None:
        super().__init__(eager=True, **more)
        self.memory_at = range(0)
        self.handed: list[Handed] = []

    def slab(self, nbytes: int) -> Tensor:
        made = super().slab(nbytes)
        self.memory_at = range(made.data_ptr(), made.data_ptr() + nbytes)
        return made

    def fused(self, kernel: str) -> FusedKernel:
        found, handed, watched = super().fused(kernel), self.handed, self
        assert isinstance(found, HostFlash)
        attend = found.attend

        def noted(q: Tensor, k: Tensor, v: Tensor, first: Int64, lengths: Int64, scale: float) -> tuple[Tensor, Tensor]:
            handed.append(Handed(k.data_ptr() in watched.memory_at, v.data_ptr() in watched.memory_at, len(q)))
            return attend(q, k, v, first, lengths, scale)

        found.attend = noted  # type: ignore[method-assign]  # the same, and a note
        return found


def rig(kernel: str = "flash", accelerator: HostAccelerator | None = None) -> Rig:
    return Rig(accelerator or HostAccelerator(eager=True), {"attention": kernel})


def case_of(dtype: DType = "float16", **more: Any) -> Case:
    """A case whose queries count every row."""
    made = Case(dtype, **{"head_dim": 16, "head_dim_v": 16, **more})
    made.q_positions[:] = made.tokens - 1
    return made


def launch_of(case: Case, place: Layout, roots: Int64) -> Launch:
    nbytes = len(roots) * case.q_len * case.group * (2 + case.head_dim_v) * 4
    reads = (whole(case.queries), place.keys, place.values)
    return Launch(case.attend_args(place.runs, roots), reads, (whole(np.zeros(nbytes, np.uint8)),))


def attended(on: Rig, case: Case, place: Layout, roots: Int64) -> Float64:
    """States (r, q_len, group, 2 + d_v) from the device."""
    got = on_the_gpu(on, launch_of(case, place, roots))[0].view(np.float32)
    return got.reshape(len(roots), case.q_len, case.group, 2 + case.head_dim_v).astype(np.float64)


def is_right(case: Case, rows: Int64, roots: Int64, got: Float64) -> None:
    """Log-sum-exp and output of every root, of queries rounded beforehand."""
    h = ROUNDOFF[case.dtype]
    rounded = oracle.decode(oracle.encode(case.queries, case.dtype), case.dtype)
    for (sequence, head, level, index), state in zip(roots.tolist(), got, strict=True):
        split = rows[:, 2] // case.split_tokens
        mine = rows[(rows[:, 0] == sequence) & (rows[:, 1] == head) & (split >> level == index)]
        k, v = (oracle.decode(x[tuple(mine.T)], case.dtype) for x in (case.keys, case.values))
        for t in range(case.q_len):
            for g in range(case.group):
                m, total, acc = state[t, g, 0], state[t, g, 1], state[t, g, 2:]
                if not len(mine):
                    assert np.isneginf(m)
                    assert not state[t, g, 1:].any()
                    continue
                s = case.scale * (k @ rounded[sequence, t, head * case.group + g])
                p = np.exp(s - s.max())
                assert m + math.log(total) == pytest.approx(s.max() + math.log(p.sum()), rel=1e-4, abs=1e-4)
                assert s.max() - 1e-3 * (1 + abs(s.max())) <= m
                off, weight = np.abs(acc / total - p @ v / p.sum()), p @ np.abs(v) / p.sum()
                assert (off <= 2.1 * h * weight + 1e-4 * weight + 2.0**-24 * (1 + np.abs(v).sum(axis=0))).all()


# What it computes


@pytest.mark.parametrize(
    ("check", "launches"),
    [
        ("attend_is_attention", 12),
        ("attend_survives_extreme_logits", 6),
        ("one_token_gives_its_value", 2),
        ("empty_parts_are_identities", 2),
    ],
)
def test_the_suite_of_every_device_passes_and_the_kernel_ran(check: str, launches: int) -> None:
    opened: list[GpuDevice] = []

    def opener(site: Site) -> Device:
        opened.append(open_gpu("gpu0", site, FLASH, accelerator=HostAccelerator(1, 4 * MIB, eager=True)))
        return opened[-1]

    report = run(opener, only=[check])
    assert report.passed, str(report)
    assert sum(device.fused_launches for device in opened) == launches


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dim = draw(st.sampled_from([8, 24, 64]))
    return case_of(
        draw(st.sampled_from(["float16", "bfloat16"])),
        num_sequences=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        q_len=draw(st.integers(1, 3)),
        head_dim=dim,
        head_dim_v=dim,
        tokens=draw(st.integers(3, 150)),
        split_tokens=draw(st.sampled_from([1, 3, 8, 64])),
        seed=draw(st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from([0.0, 1.0, 10.0])),
    )


@given(cases(), st.sampled_from(["dense", "paged", "rows"]), st.sampled_from([0.3, 1.0]), st.booleans(), st.data())
def test_states_have_the_value_that_they_should(
    case: Case, kind: str, share: float, anywhere: bool, data: st.DataObject
) -> None:
    rows = case.all_rows()
    rows = rows[np.random.default_rng(case.seed).random(len(rows)) < share]
    roots = case.roots_of(rows)
    kernel = data.draw(st.sampled_from(["flash", "flashinfer"]))
    on = rig(kernel, HostAccelerator(eager=True, anywhere=anywhere))
    got = attended(on, case, case.layout(rows, kind), roots)
    is_right(case, rows, roots, got)
    assert on.device.fused_launches == (len(rows) > 0)


@pytest.mark.parametrize("order", range(3))
def test_whatever_the_order_of_streams(order: int) -> None:
    case, on = case_of(tokens=90, group=2), rig(accelerator=HostAccelerator(order))
    rows = case.all_rows()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows, "paged"), roots))
    assert on.device.fused_launches == 1


def test_a_long_root_is_cut_into_sequences_that_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_fused, "_FEWEST", 16)
    monkeypatch.setattr(gpu_fused, "SEQUENCES", 8)
    case, accelerator = case_of(tokens=300), Watched()
    on, rows = rig(accelerator=accelerator), case.all_rows()
    accelerator.handed.clear()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows), roots))
    assert [call.sequences for call in accelerator.handed] == [5], "64 rows each"


def test_no_launch_has_more_sequences_than_a_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_fused, "_MOST_SEQUENCES", 3)
    case, accelerator = case_of(num_sequences=4, num_kv_heads=2, tokens=9), Watched()
    on, rows = rig(accelerator=accelerator), case.all_rows()
    accelerator.handed.clear()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows), roots))
    assert max(call.sequences for call in accelerator.handed) <= 3
    assert sum(call.sequences for call in accelerator.handed) == 8


@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("kernel", ["flash", "flashinfer"])
def test_little_room_means_more_launches_and_the_same_states(
    kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_fused, "_FEWEST", 16)
    chunks = Tiles.chunks
    monkeypatch.setattr(Tiles, "chunks", lambda self, nbytes, room: chunks(self, nbytes, 2 * nbytes))
    case, on = case_of(tokens=100, num_kv_heads=2, num_sequences=2, split_tokens=16), rig(kernel)
    rows = case.all_rows()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows, kind), roots))
    assert on.device.fused_launches > 2


# Which launches fit


@pytest.mark.parametrize(
    "case",
    [
        case_of("float32"),
        case_of("int8"),
        case_of(head_dim_v=8),
        case_of(head_dim=20, head_dim_v=20),
        case_of(head_dim=264, head_dim_v=264, tokens=9),
        case_of(masks=oracle.Masks(window=9)),
        case_of(masks=oracle.Masks(softcap=3.0)),
        Case("float16", q_len=2, head_dim=16, head_dim_v=16),
    ],
    ids=["float32", "int8", "two sizes of head", "20", "264", "window", "softcap", "a row that one query hides"],
)
def test_what_does_not_fit_is_attended_as_ever(case: Case) -> None:
    rows, on = case.all_rows(), rig()
    launch = launch_of(case, case.layout(rows, "paged"), case.roots_of(rows))
    alike(on_the_gpu(on, launch)[0], defined(launch)[0])
    assert on.device.fused_launches == 0


def test_a_scale_that_is_not_positive_does_not_fit() -> None:
    rows, on = case_of().all_rows(), rig()
    for scale in (-0.5, 0.0):
        case = case_of()
        case.scale = scale
        launch = launch_of(case, case.layout(rows), case.roots_of(rows))
        alike(on_the_gpu(on, launch)[0], defined(launch)[0])
    assert on.device.fused_launches == 0


def test_without_the_option_no_kernel_is_used() -> None:
    case, on = case_of(), Rig(HostAccelerator(eager=True))
    rows = case.all_rows()
    launch = launch_of(case, case.layout(rows), case.roots_of(rows))
    alike(on_the_gpu(on, launch)[0], defined(launch)[0])
    assert on.device.fused_launches == 0
    assert on.device.info.notes["attention"] == "eager"
    assert on.device.info.arithmetic == Arithmetic("torch-eager-1", cut_invariant=False)


# Where rows lie


@pytest.mark.parametrize(
    ("kernel", "kind", "tokens", "stays"),
    [
        ("flash", "dense", 90, True),
        ("flashinfer", "dense", 90, True),
        ("flash", "paged", 90, False),  # stretches of 8 rows are too short
        ("flash", "rows", 90, False),
    ],
)
def test_rows_in_one_piece_stay_where_they_lie(kernel: str, kind: str, tokens: int, stays: bool) -> None:
    case, accelerator = case_of(tokens=tokens, num_kv_heads=2), Watched()
    on, rows = rig(kernel, accelerator), case.all_rows()
    accelerator.handed.clear()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows, kind), roots))
    assert [call[:2] for call in accelerator.handed] == [(stays, stays)]


@pytest.mark.parametrize("anywhere", [True, False, None])
def test_long_stretches_stay_where_they_lie_if_the_kernel_takes_gaps(anywhere: bool | None) -> None:
    case, accelerator = case_of(tokens=400, num_kv_heads=2), Watched(anywhere=anywhere)
    on, rows = rig("flash", accelerator), case.all_rows()
    accelerator.handed.clear()
    roots = case.roots_of(rows)
    is_right(case, rows, roots, attended(on, case, case.layout(rows, "paged", page=100), roots))
    assert [call[:2] for call in accelerator.handed] == [(anywhere is True, anywhere is True)]
    assert ("long stretches" in on.device.info.notes["attention"]) == (anywhere is True)


def shifted(operand: Operand, by: int, turned: bool) -> Operand:
    """The same rows, all of them so many bytes further, and the two halves of the region the other way round."""
    ((region, spans),) = operand
    half = region.nbytes // 2
    held = np.roll(bytes_of(region), half) if turned else bytes_of(region)
    offsets = (spans.array[:, 0] + half * turned) % region.nbytes + by
    memory = np.concatenate([np.full(by, 0xEE, np.uint8), held])
    return (Segment(whole(memory)[0].region, Spans(np.stack([offsets, spans.array[:, 1]], axis=1))),)


@pytest.mark.parametrize(
    ("keys", "values", "stay"),
    [
        ((0, False), (0, False), (True, True)),
        ((64, False), (96, False), (True, True)),  # another beginning each, and the same order
        ((0, True), (0, True), (True, True)),
        ((0, False), (0, True), (True, False)),  # another order: values are gathered
        ((8, False), (0, False), (False, True)),  # off the grid that kernels load by
        ((0, False), (8, False), (True, False)),
    ],
)
def test_what_lies_in_another_order_or_off_the_grid_of_kernels_is_gathered(
    keys: tuple[int, bool], values: tuple[int, bool], stay: tuple[bool, bool]
) -> None:
    case, accelerator = case_of(tokens=200, num_kv_heads=2), Watched()
    on, rows = rig("flash", accelerator), case.all_rows()
    accelerator.handed.clear()
    place, roots = case.layout(rows, "dense"), case.roots_of(rows)
    place = Layout(place.runs, shifted(place.keys, *keys), shifted(place.values, *values))
    is_right(case, rows, roots, attended(on, case, place, roots))
    assert [call[:2] for call in accelerator.handed] == [stay]


def test_rows_with_gaps_off_their_own_grid_are_gathered() -> None:
    case, accelerator = case_of(tokens=200, num_kv_heads=2), Watched()
    on, rows = rig("flash", accelerator), case.all_rows()
    accelerator.handed.clear()
    roots, place = case.roots_of(rows), case.layout(rows, "dense")
    apart = [_apart(operand, 16) for operand in (place.keys, place.values)]  # half a row of 32 bytes
    is_right(case, rows, roots, attended(on, case, Layout(place.runs, *apart), roots))
    assert [call[:2] for call in accelerator.handed] == [(False, False)]


def _apart(operand: Operand, gap: int) -> Operand:
    """The same rows with a gap between the two runs."""
    ((region, spans),) = operand
    first, second = spans.array.tolist()
    held = bytes_of(region)
    memory = np.concatenate([held[: first[1]], np.full(gap, 0xEE, np.uint8), held[first[1] :]])
    return (Segment(whole(memory)[0].region, Spans([tuple(first), (second[0] + gap, second[1])])),)


# What is not finite


def test_what_is_not_finite_spoils_its_query_or_its_channel() -> None:
    case = case_of(num_kv_heads=3, tokens=40)
    case.keys[0, 0, 5, 2] = 0x7E00
    case.values[0, 1, 7, 3] = 0x7C00
    on, rows = rig(), case.all_rows()
    got = attended(on, case, case.layout(rows), case.roots_of(rows))[:, 0, 0]
    assert np.isnan(got[0, 1:]).all()
    assert np.isposinf(got[1, 2 + 3])
    assert np.isfinite(np.delete(got[1], 2 + 3)).all()
    assert np.isfinite(got[2]).all()
    assert on.device.fused_launches == 1


def test_where_every_logit_is_minus_infinity_the_state_is_the_identity() -> None:
    case = case_of(num_kv_heads=2, tokens=5)
    case.queries[:] = 1
    case.keys[0, 0, :, 4] = 0xFC00
    case.keys[0, 1, 1:, 4] = 0xFC00
    on, rows = rig(), case.all_rows()
    got = attended(on, case, case.layout(rows), case.roots_of(rows))[:, 0, 0]
    assert np.isneginf(got[0, 0])
    assert not got[0, 1:].any()
    value = oracle.decode(case.values[0, 1, 0], "float16")
    assert (got[1, 2:] == value).all(), "the only row that counts"
    assert on.device.fused_launches == 1


# What consumers rely on


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0, 1), st.floats(0, 1))
def test_merging_depends_on_the_value_of_a_state_and_not_on_its_m(seed: int, n: int, a: float, b: float) -> None:
    random = np.random.default_rng(seed)
    s, v = random.normal(size=(2, n)) * 5, random.normal(size=(2, n, 4))
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    total = p.sum(axis=1)
    shift = np.array([a, b]) * np.log(total)  # from the largest logit to the log-sum-exp
    parts = [
        np.concatenate([[m[i] + shift[i]], np.array([total[i], *(p[i] @ v[i])]) * np.exp(-shift[i])]).astype(np.float32)
        for i in range(2)
    ]
    every = np.exp(s.ravel() - s.max())
    want = every @ v.reshape(-1, 4) / every.sum()
    merged = states.merge(*parts)
    assert states.output(merged) == pytest.approx(want, abs=1e-5 * np.abs(v).max())
    assert states.lse(merged) == pytest.approx(s.max() + math.log(every.sum()), abs=1e-5 * (1 + np.abs(s).max()))


def test_the_bound_of_other_devices_is_what_it_was() -> None:
    plain = Arithmetic("x")
    fused = replace(plain, fused=frozenset({"float16"}))
    for shape in SHAPES:
        given = problem(replace(shape, dtype="float16"), np.random.default_rng(1))
        roots = given.top_roots()
        as_ever, wider = (given.expected_states(roots, x) for x in (plain, fused))
        fits = shape.head_dim == shape.head_dim_v and shape.masks == type(shape.masks)()
        assert not as_ever.above.any()
        assert (wider.relative > as_ever.relative).any() == fits
        assert wider.above.any() == fits
    other = problem(replace(SHAPES[0], dtype="bfloat16"), np.random.default_rng(1))
    both = [other.expected_states(other.top_roots(), x).relative for x in (plain, fused)]
    assert (both[0] == both[1]).all()


def test_what_a_fused_kernel_gives_is_outside_the_bound_of_eager_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.devices.drivers import gpu_info

    monkeypatch.setattr(gpu_info, "_arithmetic", lambda options, fused: Arithmetic("eager", cut_invariant=False))
    assert "attend, one token" in _reason(HostAccelerator)


class TurnsToBase2(HostAccelerator):
    """Its kernel has the base that it says until the device is open."""

    def memory(self) -> tuple[int, int]:
        self._kernels["flash"]._true_base = 2.0
        return super().memory()


def test_a_wrong_base_that_opening_has_not_seen_is_found_by_conformance() -> None:
    assert "attend, one token" in _reason(TurnsToBase2)
    assert _reason(HostAccelerator) == ""


def _reason(kind: type[HostAccelerator]) -> str:
    """Why a check of states fails, or nothing."""

    def opener(site: Site) -> Device:
        return open_gpu("gpu0", site, FLASH, accelerator=kind(1, 4 * MIB, eager=True))

    report = run(opener, only=["one_token_gives_its_value"], shrink=False)
    return "".join(result.reason for result in report.failed)


# Opening


@pytest.mark.parametrize(
    ("kernel", "bases", "named"),
    [
        ("flash", {"flash": 2.0}, "float16: its log-sum-exp has base 2, where base 2.718 was expected"),
        ("flash", {"flash": 10.0}, "has base 10, where base 2.718"),
        ("flashinfer", {"flashinfer": math.e}, "has base 2.718, where base 2 was expected"),
        ("flash", {"flash": 3.0}, "its log-sum-exp of a known case is off by"),
    ],
)
def test_another_base_than_expected_is_refused(kernel: str, bases: Mapping[str, float], named: str) -> None:
    with pytest.raises(ProtocolError, match=f"attention = '{kernel}'.*{named}"):
        _opened(HostAccelerator(bases=bases), kernel)


def test_a_kernel_that_is_not_there_is_said_and_nothing_is_taken() -> None:
    accelerator = HostAccelerator(bases={"flash": math.e}, capacity=2 * MIB)
    with pytest.raises(Unsupported, match="gpu0: open: attention = 'flashinfer': this stand-in has no flashinfer"):
        _opened(accelerator, "flashinfer")
    assert accelerator.memory() == (2 * MIB, 2 * MIB)
    _opened(accelerator, "flash").close()


class Refuses(HostAccelerator):
    """A build of torch whose kernel says what it is missing."""

    def fused(self, kernel: str) -> FusedKernel:
        found = HostFlash(kernel, math.e, True)
        found.attend = _refuse  # type: ignore[method-assign]  # as a build without it would
        return found


def _refuse(q: Tensor, k: Tensor, v: Tensor, first: Int64, lengths: Int64, scale: float) -> tuple[Tensor, Tensor]:
    raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build")


def test_a_kernel_that_does_not_run_is_said_with_its_reason() -> None:
    with pytest.raises(Unsupported, match=r"flash on the host's cores does not run in float16: USE_FLASH_ATTENTION"):
        _opened(Refuses(), "flash")


def test_a_kernel_that_does_not_answer_ends_at_the_deadline() -> None:
    accelerator = HostAccelerator()
    accelerator.hold()
    with pytest.raises(Timeout, match="has not answered six rows"):
        rig(accelerator=accelerator)


def test_no_other_word_is_an_option() -> None:
    for word in ("auto", "", 1, None, ["flash"]):
        with pytest.raises(ConfigurationError, match=r"attention = .*; allowed: eager, flash, flashinfer"):
            Options.of("gpu0", {"attention": word})


def test_it_says_which_kernel_it_uses_and_how_that_rounds() -> None:
    info = rig("flashinfer").device.info
    assert "flashinfer on the host's cores where a launch fits, rows in one piece" in info.notes["attention"]
    assert info.arithmetic is not None
    assert info.arithmetic.fused == {"float16", "bfloat16"}
    assert not info.arithmetic.cut_invariant
    assert info.arithmetic.microkernel == "torch-eager-1+flashinfer"


def _opened(accelerator: HostAccelerator, kernel: str) -> GpuDevice:
    options = {"capacity": MIB, "attention": kernel}
    return open_gpu("gpu0", Site(clock=WallClock()), options, accelerator=accelerator)
