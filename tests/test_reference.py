"""The reference device: what the contract says, on either clock; and the kernels agree with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.attention_case import Case, bytes_of
from tests.launches import RESULTS, carry_out, every_kernel
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Copy, Launch, Read, Write
from tierloop.devices.drivers.reference import Reference, open_reference
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    Gone,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.kernels import contract, run
from tierloop.devices.kernels.contract import DTYPES
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, wait, write_bytes


def opened(**options: Any) -> tuple[VirtualClock, Reference]:
    clock = VirtualClock()
    return clock, open_reference("emu:ref", Site(clock, checker=HazardChecker()), options)


def numbers(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(n, dtype=np.uint8)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("kernel", sorted(contract.KERNELS))
def test_the_kernels_agree_with_the_reference(kernel: str, dtype: Any) -> None:
    clock, device = opened()
    launch = every_kernel(dtype)[kernel]
    defined, *_ = carry_out(clock, device, launch)
    run(launch, bytes_of)
    computed = np.concatenate(
        [bytes_of(r)[o : o + n] for r, spans in launch.writes[0] for o, n in spans.array.tolist()]
    )
    kind = RESULTS.get(kernel, np.float32)
    if kind is np.float32:
        np.testing.assert_allclose(computed.view(kind), defined.view(kind), rtol=1e-5, atol=1e-5)
    else:
        assert (computed == defined).all()
    device.close()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_attention_on_the_reference_is_the_oracle_s(dtype: Any) -> None:
    clock, device = opened()
    case = Case(dtype, num_kv_heads=2, group=3, q_len=2, tokens=120, split_tokens=16, spread=3.0)
    rows = case.all_rows()[::2]
    place, roots = case.layout(rows, "rows"), case.roots_of(rows)
    queries = Segment(device.alloc(case.queries.nbytes), Spans.one(0, case.queries.nbytes))
    write_bytes(clock, device, queries, case.queries.view(np.uint8).ravel())
    operands = []
    for operand in (place.keys, place.values):
        ((one, spans),) = operand
        there = device.alloc(one.nbytes)
        write_bytes(clock, device, there.all(), bytes_of(one))
        operands.append((Segment(there, spans),))
    states = device.alloc(len(roots) * 2 * 3 * 66 * 4)
    output = device.alloc(2 * 2 * 3 * 64 * 4)
    wait(clock, device.submit(Launch(case.attend_args(place.runs, roots), ((queries,), *operands), ((states.all(),),))))
    merge = contract.Merge(1, 2, 3, 2, 64, roots)
    wait(clock, device.submit(Launch(merge, ((states.all(),),), ((output.all(),),))))
    got = read_bytes(clock, device, output.all()).view(np.float32).reshape(1, 2, 2, 3, 64)
    expected, bound = case.expected(rows)
    assert (np.abs(got - expected) <= bound).all()


def test_bytes_come_back_through_any_spans() -> None:
    clock, device = opened()
    one, other = device.alloc(64), device.alloc(64)
    write_bytes(clock, device, Segment(one, Spans([(8, 4), (0, 4), (20, 2)])), numbers(10))
    wait(clock, device.submit(Copy(Segment(one, Spans([(0, 4), (20, 2)])), Segment(other, Spans([(63, 1), (1, 5)])))))
    assert read_bytes(clock, device, Segment(other, Spans([(63, 1), (1, 5)]))).tolist() == [4, 5, 6, 7, 8, 9]
    assert read_bytes(clock, device, one.at(8, 4)).tolist() == [0, 1, 2, 3]


def test_memory_is_zeroed() -> None:
    clock, device = opened()
    assert not read_bytes(clock, device, device.alloc(1000).all()).any()


def test_effects_appear_at_completion() -> None:
    clock, device = opened(duration_ns=100)
    region, into = device.alloc(4), np.full(4, 9, dtype=np.uint8)
    write = device.submit(Write(region.all(), numbers(4)))
    read = device.submit(Read(region.all(), into), queue=1, after=[write])
    clock.wait_until(199)
    assert into.tolist() == [9, 9, 9, 9]
    clock.wait_until(200)
    assert into.tolist() == [0, 1, 2, 3]
    assert read.result().ended_ns == 200


def test_it_runs_on_a_wall_clock_too() -> None:
    clock = WallClock()
    device = open_reference("emu:ref", Site(clock), {"duration_ns": 1000})
    region = device.alloc(16)
    write_bytes(clock, device, region.all(), numbers(16))
    assert read_bytes(clock, device, region.all()).tolist() == list(range(16))


def test_a_phantom_takes_its_time_and_moves_nothing() -> None:
    clock, device = opened(duration_ns=50)
    into = np.full(8, 7, dtype=np.uint8)
    wait(clock, device.submit(Read(device.alloc(8, phantom=True).all(), into)))
    assert clock.now() == 50
    assert into.tolist() == [7] * 8


def test_capacity_is_a_limit_and_freed_bytes_are_free_again() -> None:
    _, device = opened(capacity=100)
    first = device.alloc(60)
    with pytest.raises(OutOfMemory, match=r"emu:ref: alloc: 50 bytes; 40 of 100 are free"):
        device.alloc(50)
    device.free(first)
    assert device.alloc(100).nbytes == 100


def test_a_region_is_freed_once_and_not_while_it_is_used() -> None:
    clock, device = opened()
    region = device.alloc(8)
    running = device.submit(Read(region.all(), np.zeros(8, dtype=np.uint8)))
    with pytest.raises(Busy, match="used by a command that has not ended"):
        device.free(region)
    wait(clock, running)
    device.free(region)
    with pytest.raises(OutOfRange, match="not allocated here"):
        device.free(region)
    with pytest.raises(OutOfRange, match="after it was freed"):
        device.submit(Read(region.all(), np.zeros(8, dtype=np.uint8)))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_region_has_at_least_one_byte(nbytes: int) -> None:
    _, device = opened()
    with pytest.raises(OutOfRange, match="at least 1"):
        device.alloc(nbytes)


def test_another_memory_is_not_its_own() -> None:
    _, device = opened()
    with pytest.raises(OutOfRange, match="there is no memory 'gpu' here"):
        device.alloc(8, "gpu")


def test_a_launch_that_does_not_fit_ends_with_the_error_and_the_device_goes_on() -> None:
    clock, device = opened()
    launch = every_kernel()["attend"]
    args = launch.args
    assert isinstance(args, contract.Attend)
    wrong = Launch(replace(args, runs=args.runs[::-1].copy()), launch.reads, launch.writes)
    with pytest.raises(OutOfRange, match="out of order or overlap"):
        carry_out(clock, device, wrong)
    carry_out(clock, device, launch)


def test_a_function_that_fails_is_a_protocol_error_with_its_cause() -> None:
    clock, device = opened()

    def fails(reads: object, writes: object) -> None:
        raise KeyError("weights")

    with pytest.raises(ProtocolError, match="emu:ref: dense: it failed while it ran: KeyError") as caught:
        wait(clock, device.submit(Launch(contract.Dense("x", 1, 0, 0, fails), (), ())))
    assert isinstance(caught.value.__cause__, KeyError)


def test_references_of_one_platform_reach_each_other() -> None:
    clock = VirtualClock()
    site = Site(clock)
    a, b = open_reference("emu:a", site, {}), open_reference("emu:b", site, {"reaches": ["emu:a"]})
    there, here = a.alloc(4), b.alloc(4)
    write_bytes(clock, a, there.all(), numbers(4))
    wait(clock, b.submit(Copy(there.all(), here.all())))
    assert read_bytes(clock, b, here.all()).tolist() == [0, 1, 2, 3]
    with pytest.raises(Unsupported, match="does not reach emu:b"):
        a.submit(Copy(here.all(), there.all()))


def test_a_closed_device_says_that_it_is_gone() -> None:
    _, device = opened()
    region = device.alloc(8)
    device.close()
    device.close()
    for call in (
        lambda: device.alloc(8),
        lambda: device.free(region),
        lambda: device.submit(Write(region.all(), numbers(8))),
    ):
        with pytest.raises(Gone):
            call()


def test_what_was_running_at_close_ends_as_gone() -> None:
    clock, device = opened()
    into = np.full(8, 7, dtype=np.uint8)
    running = device.submit(Read(device.alloc(8).all(), into))
    device.close()
    clock.wait_until(1000)
    assert isinstance(running.error, Gone)
    assert into.tolist() == [7] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capasity": 1}, "option 'capasity' is unknown: did you mean 'capacity'"),
        ({"capacity": 0}, "capacity = 0; allowed: an integer of at least 1"),
        ({"queues": True}, "queues = True"),
        ({"duration_ns": "fast"}, "duration_ns = 'fast'"),
        ({"reaches": "dram"}, "reaches = 'dram'; allowed: a list of names"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(**options)
