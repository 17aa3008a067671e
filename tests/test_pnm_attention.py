"""Kernels of the firmware model, through the driver: the bits of the host's kernels on any number of engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_case import Case, Int64, bytes_of, launch, whole
from tests.launches import every_kernel, room
from tests.pnm_rig import LAUNCHES, Rig, card_of
from tierloop.devices.commands import Launch
from tierloop.devices.drivers.pnm_arguments import KERNELS
from tierloop.devices.kernels import run
from tierloop.devices.kernels.contract import Attend, DType
from tierloop.devices.states import identity
from tierloop.devices.waiting import wait
from tierloop.firmware_models.pnm_aggregator import Aggregator

ENGINES = (1, 2, 3, 8)


def attend(case: Case, rows: Int64, kind: str = "dense", roots: Int64 | None = None) -> Launch:
    """An `attend` over rows of a case, on arrays of the test."""
    place = case.layout(rows, kind)
    args = case.attend_args(place.runs, case.roots_of(rows) if roots is None else roots)
    nbytes = 4 * len(args.roots) * case.q_len * case.group * (2 + case.head_dim_v)
    return Launch(args, (whole(case.queries), place.keys, place.values), (room(nbytes),))


def on_the_host(one: Launch) -> bytes:
    """What the host's kernels write for a launch on arrays of the test."""
    nbytes = sum(s.spans.nbytes for operand in one.writes for s in operand)
    return launch(one.args, list(one.reads), nbytes).tobytes()


def on_the_device(rig: Rig, one: Launch) -> bytes:
    """What the device writes for it."""
    moved = rig.moved(one)
    rig.run(moved)
    return rig.result(moved).tobytes()


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_attend_has_the_bits_of_the_host_on_any_number_of_engines(engines: int, dtype: DType) -> None:
    case = Case(dtype, num_sequences=2, num_kv_heads=3, group=4, q_len=2, head_dim=32, head_dim_v=24, tokens=270)
    rig = Rig(card_of(engines=engines))
    rig.card.shuffle(engines)
    one = attend(case, case.all_rows())
    assert on_the_device(rig, one) == on_the_host(one)
    assert all(engine.jobs_done for engine in rig.card.dispatcher.engines), "an engine had nothing to do"
    rig.close()


@pytest.mark.parametrize("kind", ["dense", "paged", "rows"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attend_has_the_bits_of_the_host_however_the_rows_lie(kind: str, group: int) -> None:
    case = Case("float16", num_kv_heads=2, group=group, tokens=200)
    rig = Rig(card_of(engines=3))
    one = attend(case, case.all_rows(), kind)
    assert on_the_device(rig, one) == on_the_host(one)
    rig.close()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(ENGINES),
    st.sampled_from(["float32", "bfloat16"]),
    st.floats(0.01, 1),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_sparse_rows_under_several_roots_have_the_bits_of_the_host(
    seed: int, engines: int, dtype: DType, share: float, mine_only: bool
) -> None:
    random = np.random.default_rng(seed)
    case = Case(dtype, num_sequences=2, num_kv_heads=2, group=2, head_dim=16, head_dim_v=16, tokens=150, seed=seed % 97)
    rows = case.all_rows()
    splits = random.random((2, 2, 10)) < 0.5
    here = splits[rows[:, 0], rows[:, 1], rows[:, 2] // case.split_tokens] if mine_only else np.ones(len(rows), bool)
    chosen = random.random(len(rows)) < share
    mine = rows[chosen & here]
    roots = case.roots_of(mine, rows[chosen & ~here]) if mine_only else case.roots_of(mine)
    rig = Rig(card_of(engines=engines))
    rig.card.shuffle(seed)
    one = attend(case, mine, "rows" if seed % 2 else "paged", roots)
    assert on_the_device(rig, one) == on_the_host(one)
    rig.close()


def test_no_rows_at_all_give_identities() -> None:
    case = Case("float32", num_kv_heads=2, group=3, tokens=40)
    rig = Rig()
    one = attend(case, case.all_rows()[:0], roots=np.array([[0, 0, 2, 0], [0, 1, 0, 7]], dtype=np.int64))
    got = np.frombuffer(on_the_device(rig, one), dtype=np.float32).reshape(2, 3, 66)
    assert (got == identity((2, 3), 64)).all()
    assert not any(engine.jobs_done for engine in rig.card.dispatcher.engines), "there was nothing to do"
    rig.close()


def test_a_root_without_rows_beside_one_with_rows_is_the_identity() -> None:
    case = Case("float32", num_kv_heads=2, tokens=40)
    rows = case.all_rows()
    mine = rows[rows[:, 1] == 0]
    rig = Rig()
    one = attend(case, mine, roots=np.array([[0, 1, 2, 0], [0, 0, 2, 0]], dtype=np.int64))
    got = np.frombuffer(on_the_device(rig, one), dtype=np.float32).reshape(2, 66)
    assert (got[0] == identity((), 64)).all()
    assert got.tobytes() == on_the_host(one)
    rig.close()


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_of_the_wire_has_the_bits_of_the_host(kernel: str) -> None:
    rig = Rig(card_of(engines=2))
    one = every_kernel("bfloat16")[kernel]
    got = on_the_device(rig, one)
    run(one, bytes_of)
    parts = [
        bytes_of(region)[offset : offset + nbytes]
        for operand in one.writes
        for region, spans in operand
        for offset, nbytes in spans.array.tolist()
    ]
    assert got == np.concatenate(parts).tobytes()
    rig.close()


@pytest.mark.parametrize("seed", range(8))
def test_two_launches_in_flight_do_not_mix(seed: int) -> None:
    rig = Rig(card_of(engines=3))
    rig.card.shuffle(seed)
    cases = [Case("float32", num_kv_heads=2, group=2, tokens=130 + 40 * i, seed=seed + i) for i in range(2)]
    given_ones = [attend(case, case.all_rows(), "paged") for case in cases]
    moved = [rig.moved(one) for one in given_ones]
    rig.card.hold()
    under_way = [rig.submit(one, LAUNCHES + i) for i, one in enumerate(moved)]
    rig.device.poll()
    rig.device.poll()
    assert not any(c.done for c in under_way), "answers were held"
    rig.card.release()
    wait(rig.site.clock, under_way)
    for one, there in zip(given_ones, moved, strict=True):
        assert rig.result(there).tobytes() == on_the_host(one)
    rig.close()


def test_work_is_counted_by_the_device() -> None:
    case = Case("float32", num_kv_heads=2, group=3, head_dim=32, head_dim_v=16, tokens=50)
    rig = Rig()
    completion = rig.run(rig.moved(attend(case, case.all_rows())))
    assert completion.flops == 2 * 2 * 50 * 3 * (32 + 16)
    rig.close()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_states_that_come_in_any_order_are_merged_in_the_tree(data: st.DataObject) -> None:
    splits = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True).map(sorted))
    order = data.draw(st.permutations(range(len(splits))))
    random = np.random.default_rng(len(splits))
    states = random.normal(size=(len(splits), 3, 6)).astype(np.float32)
    states[:, :, 1] = np.abs(states[:, :, 1]) + 1
    results = []
    for turn in (range(len(splits)), order):
        aggregator = Aggregator([(6, 0)], [(0, (0, split)) for split in splits], 3, 4)
        for i in turn:
            assert not aggregator.complete
            aggregator.arrived(0, (0, splits[i]), states[i].copy())
        assert aggregator.complete
        results.append(aggregator.results())
    assert results[0].tobytes() == results[1].tobytes()
    m = states[:, :, 0].astype(np.float64)
    weights = np.exp(m - m.max(axis=0))
    exact = (states[:, :, 1:] * weights[:, :, None]).sum(axis=0)
    assert np.allclose(results[0][0, :, 0], m.max(axis=0), rtol=0, atol=0)
    assert np.allclose(results[0][0, :, 1:], exact, rtol=1e-5, atol=1e-5)


def test_a_state_that_is_not_awaited_is_a_mistake_of_the_dispatcher() -> None:
    aggregator = Aggregator([(2, 0)], [(0, (1, 0))], 1, 2)
    aggregator.arrived(0, (1, 0), identity((1,), 2))
    with pytest.raises(AssertionError, match="not awaited"):
        aggregator.arrived(0, (1, 0), identity((1,), 2))


def test_a_job_takes_no_more_than_one_head_of_one_sequence() -> None:
    """Eight heads with queries of 2 KiB each run in an SRAM that holds one of them."""
    case = Case("float32", num_kv_heads=8, group=8, head_dim=64, head_dim_v=64, tokens=40)
    args = attend(case, case.all_rows()).args
    assert isinstance(args, Attend)
    one_head = 4 * 8 * (64 + 66)
    rig = Rig(card_of(sram_nbytes=one_head))
    one = attend(case, case.all_rows())
    assert on_the_device(rig, one) == on_the_host(one)
    rig.close()
