"""Emulated devices: results at completion, finite memories, firmware media, errors, wall clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.machines import PROFILES, duration, finish, open_machine
from tierloop.devices.commands import Copy, Flush, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    Gone,
    MediaError,
    Misaligned,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.hazards import HazardError
from tierloop.devices.kernels.contract import Append, Dense, Dequantize, Gather, Quantize, Topk
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.device import EmulatedDevice, open_emulated
from tierloop.emulators.promises import GRACE_NS, LIMIT_PERCENT, Promises
from tierloop.firmware_models.flash import FlashModel

KIB = 1024


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Platform]:
    with open_machine(tmp_path) as platform:
        yield platform


def device(platform: Platform, name: str) -> EmulatedDevice:
    found = platform.devices[f"emu:{name}"]
    assert isinstance(found, EmulatedDevice)
    return found


def ramp(nbytes: int, start: int = 0) -> NDArray[np.uint8]:
    return (np.arange(start, start + nbytes) % 251).astype(np.uint8)


def filled(platform: Platform, name: str, data: NDArray[np.uint8]) -> Region:
    region = device(platform, name).alloc(data.nbytes)
    port = device(platform, "dram" if name == "cxl" else name)
    queue = {"gpu": 2, "pnm": 2}.get(name, 0)
    write_bytes(platform.clock, port, region.all(), data, queue)
    return region


# -- results appear at completion ---------------------------------------------------------------------------------


def test_a_write_is_not_there_before_it_has_completed(machine: Platform) -> None:
    dram, gpu = device(machine, "dram"), device(machine, "gpu")
    region = dram.alloc(KIB)
    command = Write(region.all(), ramp(KIB))
    expected = gpu.estimate(command, 2).duration_ns
    late = gpu.submit(command, 2)
    machine.clock.wait_until(expected - 1)
    assert not late.done
    held = dram._fabric.regions[region]
    assert held is not None
    assert not held.any()
    machine.clock.wait_until(expected)
    assert late.result().ended_ns == expected
    assert (read_bytes(machine.clock, dram, region.all()) == ramp(KIB)).all()


def test_a_missing_dependency_reads_what_was_there_before(machine: Platform) -> None:
    gpu = device(machine, "gpu")
    source, target = filled(machine, "dram", ramp(1 << 20)), gpu.alloc(1 << 20)
    machine.site.checker = None
    into = np.ones(KIB, dtype=np.uint8)
    slow = gpu.submit(Copy(source.all(), target.all()), 2)
    fast = gpu.submit(Read(target.at(0, KIB), into), 4)
    finish(machine, slow, fast)
    assert not into.any()


def test_the_hazard_checker_sees_a_missing_dependency(machine: Platform) -> None:
    gpu = device(machine, "gpu")
    source, target = filled(machine, "dram", ramp(KIB)), gpu.alloc(KIB)
    gpu.submit(Copy(source.all(), target.all()), 2)
    with pytest.raises(HazardError, match="read-after-write"):
        gpu.submit(Read(target.all(), np.zeros(KIB, dtype=np.uint8)), 4)


def test_an_ordered_chain_over_all_devices_brings_the_bytes_along(machine: Platform) -> None:
    dram, gpu, nvme, pnm = (device(machine, n) for n in ("dram", "gpu", "nvme", "pnm"))
    data = ramp(64 * KIB)
    near, card = filled(machine, "dram", data), device(machine, "cxl").alloc(64 * KIB)
    far, disk, bank = gpu.alloc(64 * KIB), nvme.alloc(64 * KIB), pnm.alloc(64 * KIB)
    last, back = dram.alloc(64 * KIB), np.zeros(64 * KIB, dtype=np.uint8)
    steps: list[Completion] = []
    for port, command, queue in (
        (dram, Copy(near.all(), card.all()), 0),
        (gpu, Copy(card.all(), far.all()), 2),
        (gpu, Copy(far.all(), near.all()), 4),
        (nvme, Copy(near.all(), disk.all()), 0),
        (nvme, Flush(disk.all()), 1),
        (nvme, Copy(disk.all(), last.all()), 2),
        (pnm, Copy(last.all(), bank.all()), 0),
        (pnm, Read(bank.all(), back), 2),
    ):
        steps.append(port.submit(command, queue, steps[-1:]))
    finish(machine, *steps)
    assert (back == data).all()
    assert [s.traffic.read.get("emu:cxl", 0) for s in steps[:2]] == [0, 64 * KIB]
    assert machine.site.links["half"].bytes_back == 64 * KIB  # dram → nvme is forward, nvme → dram back
    assert machine.site.links["half"].bytes_forward == 64 * KIB


@given(st.data())
def test_phantom_commands_take_the_same_time_and_move_nothing(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 200)), min_size=1, max_size=6))
    spans = Spans(np.array([(i * 8192 + o, n) for i, (o, n) in enumerate(sizes)]))
    times = []
    for phantom in (False, True):
        with open_platform("demo", check_hazards=True) as platform:
            gpu, dram, pnm = (platform.devices[f"emu:{n}"] for n in ("gpu", "dram", "pnm"))
            near, far, bank = (d.alloc(1 << 20, phantom=phantom) for d in (dram, gpu, pnm))
            moved = pnm.submit(Copy(Segment(near, spans), Segment(bank, spans)), 2)
            done = [
                moved,
                gpu.submit(Copy(Segment(near, spans), Segment(far, spans)), 2),
                gpu.submit(Launch(Gather(), ((Segment(near, spans),),), ((far.at(1 << 19, spans.nbytes),),)), 0),
                pnm.submit(
                    Launch(Gather(), ((Segment(bank, spans),),), ((bank.at(1 << 19, spans.nbytes),),)), 0, [moved]
                ),
            ]
            finish(platform, *done)
            times.append([(c.started_ns, c.ended_ns, c.flops, c.media_nbytes, c.traffic.read) for c in done])
            assert all(c.traffic.phantom == phantom for c in done)
    assert times[0] == times[1]


def test_the_host_cannot_look_into_a_device(machine: Platform) -> None:
    for name in ("gpu", "dram", "cxl", "nvme", "pnm"):
        assert device(machine, name).alloc(4096).view is None


def test_a_kernel_computes_on_the_memory_that_was_named(machine: Platform) -> None:
    rows = np.array([1.5, -2.0, 3.25, 0.1], dtype=np.float32)
    for name in ("gpu", "dram", "pnm"):
        port = device(machine, name)
        region = filled(machine, name, np.zeros(4096, dtype=np.uint8))
        write_bytes(machine.clock, port, region.at(0, 16), rows.view(np.uint8), {"gpu": 2, "pnm": 2}.get(name, 0))
        done = port.submit(Launch(Append("float16"), ((region.at(0, 16),),), ((region.at(1024, 8),),)))
        finish(machine, done)
        out = read_bytes(machine.clock, port, region.at(1024, 8), {"gpu": 2, "pnm": 2}.get(name, 0))
        assert (out.view(np.float16) == rows.astype(np.float16)).all()
        assert (done.traffic.read, done.traffic.written) == ({f"emu:{name}": 16}, {f"emu:{name}": 8})


def test_codes_are_made_and_read_back_where_the_rows_lie(machine: Platform) -> None:
    rows = np.array([[1.5, -2.0, 4.0, 127.0]], dtype=np.float32)
    for name in ("gpu", "dram", "pnm"):
        port, queue = device(machine, name), {"gpu": 2, "pnm": 2}.get(name, 0)
        region = filled(machine, name, np.zeros(4096, dtype=np.uint8))
        write_bytes(machine.clock, port, region.at(0, 16), rows.view(np.uint8).ravel(), queue)
        codes = port.submit(Launch(Quantize("int8", 4, "row"), ((region.at(0, 16),),), ((region.at(64, 8),),)))
        back = Launch(Dequantize("int8", 4, "row"), ((region.at(64, 8),),), ((region.at(128, 16),),))
        finish(machine, port.submit(back, after=[codes]))
        out = read_bytes(machine.clock, port, region.at(64, 4), queue).view(np.int8)
        assert out.tolist() == [2, -2, 4, 127]
        assert read_bytes(machine.clock, port, region.at(128, 16), queue).view(np.float32).tolist() == out.tolist()
        assert codes.flops == 0
        assert (codes.traffic.read, codes.traffic.written) == ({f"emu:{name}": 16}, {f"emu:{name}": 8})


def test_dense_runs_its_function_once_when_it_ends(machine: Platform) -> None:
    gpu = device(machine, "gpu")
    region = filled(machine, "gpu", ramp(16))
    calls: list[int] = []

    def double(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        calls.append(machine.clock.now())
        writes[0][:] = reads[0] * 2

    work = Launch(Dense("mlp", 4_000, 20_000, 0, double), ((region.at(0, 8),),), ((region.at(8, 8),),))
    done = gpu.submit(work)
    assert calls == []
    (end,) = finish(machine, done)
    assert calls == [end]
    assert done.flops == 4_000
    assert (read_bytes(machine.clock, gpu, region.at(8, 8), 2) == ramp(8) * 2).all()


# -- memories -----------------------------------------------------------------------------------------------------


def test_a_memory_holds_no_more_than_its_capacity(machine: Platform) -> None:
    gpu = device(machine, "gpu")
    half = gpu.alloc(1 << 21)
    gpu.alloc(1 << 21, phantom=True)
    with pytest.raises(OutOfMemory, match="emu:gpu: alloc: 1 bytes: 0 of 4194304 are free"):
        gpu.alloc(1)
    gpu.free(half)
    assert gpu.alloc(1 << 21).nbytes == 1 << 21


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=40))
def test_live_bytes_are_what_is_accounted(script: list[tuple[bool, int]]) -> None:
    for name, grid in (("gpu", 1), ("nvme", 4096)):
        with open_platform("demo") as platform:
            port = platform.devices[f"emu:{name}"]
            assert isinstance(port, EmulatedDevice)
            store = port._store
            assert store is not None
            live: list[Region] = []
            for free, nbytes in script:
                if free and live:
                    port.free(live.pop(nbytes % len(live)))
                else:
                    live.append(port.alloc(nbytes, phantom=nbytes % 2 == 0))
                assert store.used == sum(-(-r.nbytes // grid) * grid for r in live) <= store.capacity


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, "4096"])
def test_sizes_that_are_none_are_refused(machine: Platform, nbytes: Any) -> None:
    with pytest.raises(OutOfRange, match="at least 1"):
        device(machine, "gpu").alloc(nbytes)


def test_new_regions_are_zero_even_where_bytes_were_before(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    region = filled(machine, "nvme", ramp(64 * KIB))
    nvme.free(region)
    assert not read_bytes(machine.clock, nvme, nvme.alloc(64 * KIB).all()).any()


def test_a_region_in_use_by_any_device_cannot_be_freed(machine: Platform) -> None:
    gpu, dram = device(machine, "gpu"), device(machine, "dram")
    near, far = dram.alloc(KIB), gpu.alloc(KIB)
    copy = gpu.submit(Copy(near.all(), far.all()), 2)
    with pytest.raises(Busy, match="named by a command"):
        dram.free(near)
    finish(machine, copy)
    dram.free(near)
    with pytest.raises(OutOfRange, match="not a region"):
        dram.free(near)
    with pytest.raises(OutOfRange, match="freed"):
        gpu.submit(Copy(near.all(), far.all()), 2)


def test_a_region_of_another_life_is_refused(machine: Platform, tmp_path: Path) -> None:
    gpu = device(machine, "gpu")
    with open_machine(tmp_path) as other:
        stranger = device(other, "gpu").alloc(KIB)
        with pytest.raises(OutOfRange, match="none that emu:gpu has now"):
            gpu.submit(Read(stranger.all(), np.zeros(KIB, dtype=np.uint8)), 2)


def test_what_an_executor_does_not_reach_is_unsupported(machine: Platform) -> None:
    gpu, nvme = device(machine, "gpu"), device(machine, "nvme")
    disk, far = nvme.alloc(4096), gpu.alloc(4096)
    with pytest.raises(Unsupported, match="executor h2d does not reach emu:nvme"):
        gpu.submit(Copy(disk.all(), far.all()), 2)
    with pytest.raises(Unsupported, match="offers"):
        device(machine, "pnm").submit(Launch(Dense("mlp", 1, 1, 1), (), ()))


def test_a_sparse_file_backs_a_memory_that_asks_for_one(tmp_path: Path) -> None:
    with open_machine(tmp_path, overrides={"devices.nvme.backing": str(tmp_path)}) as machine:
        region = filled(machine, "nvme", ramp(64 * KIB))
        assert (read_bytes(machine.clock, device(machine, "nvme"), region.all()) == ramp(64 * KIB)).all()
    with pytest.raises(ConfigurationError, match=r"backing: .* is not a folder"):
        open_machine(tmp_path, overrides={"devices.nvme.backing": str(tmp_path / "nowhere")})


# -- flash --------------------------------------------------------------------------------------------------------


def test_a_read_of_one_page_takes_sensing_bus_link_and_latency(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    disk = nvme.alloc(1 << 20)
    # sense 50,000; 4 KiB over the channel at 0.8 bytes/ns 5,120, over the link at 5 bytes/ns 820;
    # latency of drive 1,000, link 70, DRAM 100; overhead 2,000
    expected = 50_000 + 5_120 + 820 + 1_170 + 2_000
    assert duration(machine, nvme, Read(disk.at(0, 4096), np.zeros(4096, np.uint8))) == expected


def test_small_reads_on_different_dies_do_not_wait_for_each_other(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    disk = nvme.alloc(1 << 20)
    single = duration(machine, nvme, Read(disk.at(0, 4096), np.zeros(4096, np.uint8)))
    start = machine.clock.now()
    reads = [nvme.submit(Read(disk.at(i << 15, 4096), np.zeros(4096, np.uint8)), i) for i in range(4)]
    assert max(finish(machine, *reads)) - start < single + 4 * 820


def test_a_small_read_does_not_wait_for_a_large_one(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    disk = nvme.alloc(1 << 23)
    single = duration(machine, nvme, Read(disk.at(0, 4096), np.zeros(4096, np.uint8)))
    start = machine.clock.now()
    large = nvme.submit(Read(disk.at(0, 1 << 22), np.zeros(1 << 22, np.uint8)), 0)
    small = nvme.submit(Read(disk.at(1 << 22, 4096), np.zeros(4096, np.uint8)), 1)
    ends = finish(machine, large, small)
    assert ends[1] - start < 2 * single
    assert ends[0] - start >= (1 << 22) / 3.2  # four channels at 0.8 bytes/ns


def test_spans_off_the_grid_of_a_drive_are_misaligned(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    disk = nvme.alloc(1 << 16)
    with pytest.raises(Misaligned, match="off the 4096-byte grid"):
        nvme.submit(Read(disk.at(0, 100), np.zeros(100, np.uint8)))


def test_an_injected_fault_is_a_media_error_and_the_drive_works_on(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    disk = filled(machine, "nvme", ramp(64 * KIB))
    assert isinstance(nvme.firmware, FlashModel)
    nvme.firmware.inject(3)
    into = np.zeros(64 * KIB, dtype=np.uint8)
    failed = nvme.submit(Read(disk.all(), into))
    follower = nvme.submit(Read(disk.all(), np.zeros(64 * KIB, np.uint8)), 1, [failed])
    machine.clock.run_until(lambda: follower.done, 1 << 60)
    with pytest.raises(MediaError, match=r"unit 3 .* cannot be corrected"):
        failed.result()
    assert follower.error is not None
    assert follower.error.kind == "cancelled"
    follower._owner.looked(follower)
    assert not into.any()
    assert (read_bytes(machine.clock, nvme, disk.all()) == ramp(64 * KIB)).all()


def test_garbage_collection_moves_more_than_was_written_and_loses_nothing(machine: Platform) -> None:
    nvme = device(machine, "nvme")
    assert nvme._store is not None
    disk = nvme.alloc(nvme._store.capacity)
    order = np.random.default_rng(0)
    expected = np.zeros(disk.nbytes, dtype=np.uint8)
    more = 0
    for step in range(60):
        units = np.sort(order.choice(disk.nbytes // 4096, 256, replace=False))
        spans = Spans.equal(units * 4096, 4096)
        data = order.integers(0, 256, 256 * 4096, dtype=np.uint8)
        expected.reshape(-1, 4096)[units] = data.reshape(-1, 4096)
        done = nvme.submit(Write(Segment(disk, spans), data), step % 4)
        wait(machine.clock, done)
        more = max(more, done.media_nbytes)
    assert more > 256 * 4096
    assert isinstance(nvme.firmware, FlashModel)
    assert nvme.firmware.write_amplification > 1
    assert (read_bytes(machine.clock, nvme, disk.all()) == expected).all()


# -- PNM ----------------------------------------------------------------------------------------------------------


def gather(region: Region, starts: NDArray[np.int64], nbytes: int) -> Launch:
    spans = Spans.equal(starts, nbytes)
    return Launch(Gather(), ((Segment(region, spans),),), ((region.at(1 << 23, spans.nbytes),),))


def test_the_bandwidth_of_a_pnm_follows_from_the_size_of_its_requests(machine: Platform) -> None:
    pnm = device(machine, "pnm")
    region = pnm.alloc(1 << 24, phantom=True)
    rates = []
    for nbytes in (16, 64, 256, 4096):
        starts = np.random.default_rng(1).permutation((1 << 22) // 4096)[:512] * 4096
        taken = duration(machine, pnm, gather(region, starts, nbytes)) - 3_000 - 100
        rates.append(2 * 512 * nbytes / taken)
    assert rates == sorted(rates)
    assert rates[0] < 0.3 * rates[-1]
    assert rates[-1] <= 8  # four channels at 2 bytes/ns
    assert rates[-1] > 0.95 * 8


def test_launches_that_do_not_fit_the_sram_are_refused(tmp_path: Path) -> None:
    small = PROFILES["pnm"].replace(
        "[executors.pnm]", 'sram_nbytes = { value = 64, source = "defined: for tests" }\n[executors.pnm]'
    )
    with open_machine(tmp_path, profiles={"pnm": small}) as machine:
        pnm = device(machine, "pnm")
        region = pnm.alloc(1 << 16)
        pnm.submit(Launch(Topk(1, np.array([128])), ((region.at(0, 512),),), ((region.at(1024, 8),),)))
        with pytest.raises(Unsupported, match="SRAM of 512 B; split the launch"):
            pnm.submit(Launch(Gather(), ((region.at(0, 1024),),), ((region.at(2048, 1024),),)), 1)
        finish(machine)


# -- ends and errors ----------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_ends_its_command_and_the_device_works_on(machine: Platform) -> None:
    gpu = device(machine, "gpu")

    def fail(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(ProtocolError, match="emu:gpu: dense: it failed while it ran: RuntimeError"):
        wait(machine.clock, gpu.submit(Launch(Dense("mlp", 1, 1, 1, fail), (), ())))
    wait(machine.clock, gpu.submit(Launch(Dense("mlp", 1, 1, 1), (), ())))


def test_an_error_that_nobody_looked_at_is_raised_at_close(tmp_path: Path) -> None:
    machine = open_machine(tmp_path)
    nvme = device(machine, "nvme")
    disk = nvme.alloc(4096)
    assert isinstance(nvme.firmware, FlashModel)
    nvme.firmware.inject(0)
    failed = nvme.submit(Read(disk.all(), np.zeros(4096, np.uint8)))
    machine.clock.run_until(lambda: failed.done, 1 << 60)
    with pytest.raises(MediaError):
        machine.close()


def test_a_closed_device_is_gone(machine: Platform) -> None:
    gpu = device(machine, "gpu")
    region = gpu.alloc(KIB)
    open_end = gpu.submit(Read(region.all(), np.zeros(KIB, np.uint8)), 2)
    gpu.close()
    gpu.close()
    assert open_end.done
    assert region.freed
    with pytest.raises(Gone):
        open_end.result()
    for call in (lambda: gpu.alloc(1), lambda: gpu.submit(Read(region.all(), np.zeros(KIB, np.uint8)), 2)):
        with pytest.raises(Gone):
            call()
    machine.clock.wait_until(machine.clock.now() + 10_000_000)


def test_devices_opened_by_hand_find_each_other_on_the_site() -> None:
    site = Site()
    with pytest.raises(ConfigurationError, match="begins with 'emu:'"):
        open_emulated("dram", site, {"profile": "demo-dram"})
    dram = open_emulated("emu:dram", site, {"profile": "demo-dram", "capacity": 4096})
    with pytest.raises(ConfigurationError, match="a memory of that name already"):
        open_emulated("emu:dram", site, {"profile": "demo-dram"})
    lonely = open_emulated("emu:gpu", site, {"profile": "demo-gpu", "reaches": {"emu:cxl": ()}})
    with pytest.raises(ConfigurationError, match="reaches emu:cxl, which is not open"):
        _ = lonely.info
    open_emulated("emu:cxl", site, {"profile": "demo-cxl"})
    assert [len(e.paths) for e in lonely.info.executors] == [2, 2, 2]
    platform = Platform("by hand", site, {"emu:dram": dram})
    region = dram.alloc(4096)
    write_bytes(platform.clock, dram, region.all(), ramp(4096))
    assert (read_bytes(platform.clock, dram, region.all()) == ramp(4096)).all()
    platform.close()


# -- the wall clock -----------------------------------------------------------------------------------------------


def test_on_the_wall_clock_completions_are_held_until_their_time(tmp_path: Path) -> None:
    with open_machine(tmp_path, clock="wall", dilation=100) as machine:
        assert machine.provenance == "emulated"
        gpu = device(machine, "gpu")
        assert gpu.info.dilation == 100
        source = filled(machine, "dram", ramp(1 << 20))
        target = gpu.alloc(1 << 20)
        there = gpu.submit(Copy(source.all(), target.all()), 2)
        small = np.zeros(64, dtype=np.uint8)
        back = gpu.submit(Read(target.at(1000, 64), small), 4, [there])
        wait(machine.clock, [there, back])
        modelled = 100 * (1 << 20) // 5 + 100 * 800
        assert 0 <= there.overrun_ns <= there.ended_ns - there.started_ns - modelled
        assert (small == ramp(64, 1000)).all()
        assert (read_bytes(machine.clock, gpu, target.all(), 4) == ramp(1 << 20)).all()


def test_a_kernel_that_fails_on_a_thread_ends_its_command(tmp_path: Path) -> None:
    with open_machine(tmp_path, clock="wall", dilation=100) as machine:
        gpu = device(machine, "gpu")

        def fail(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
            raise RuntimeError("no such layer")

        with pytest.raises(ProtocolError, match="no such layer"):
            wait(machine.clock, gpu.submit(Launch(Dense("mlp", 1, 1, 1, fail), (), ())))


def test_closing_waits_for_a_kernel_that_still_runs(tmp_path: Path) -> None:
    finished: list[bool] = []
    begun = threading.Event()
    with open_machine(tmp_path, clock="wall", dilation=100) as machine:
        gpu = device(machine, "gpu")

        def work(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
            begun.set()
            sum(range(100_000))
            finished.append(True)

        gpu.submit(Launch(Dense("mlp", 1, 1, 1, work), (), ()))
        assert begun.wait(60)
    assert finished == [True]


def test_the_same_bytes_come_out_on_both_clocks(tmp_path: Path) -> None:
    results = []
    for options in ({"clock": "virtual"}, {"clock": "wall", "dilation": 100}):
        with open_machine(tmp_path, **options) as machine:
            gpu = device(machine, "gpu")
            rows = filled(machine, "dram", ramp(1 << 18))
            spans = Spans.equal(np.arange(0, 1 << 18, 1024), 512)
            done = gpu.submit(Launch(Gather(), ((Segment(rows, spans),),), ((gpu.alloc(1 << 17).all(),),)))
            wait(machine.clock, done)
            assert isinstance(done.command, Launch)
            results.append(read_bytes(machine.clock, gpu, done.command.writes[0][0], 4))
    assert (results[0] == results[1]).all()


def promise(overruns: list[int], duration_ns: int) -> list[str]:
    """The site's reasons after commands of that length, each late by so much."""
    site = Site()
    promises = Promises(site)
    with open_platform("demo") as platform:
        region = platform.devices["emu:dram"].alloc(16)
        now = 0
        for overrun in overruns:
            done = platform.devices["emu:dram"].submit(Read(region.all(), np.zeros(16, np.uint8)))
            finish(platform, done)
            done.started_ns, done.overrun_ns = now, overrun
            now += duration_ns + overrun
            promises.ended(done, now)
    return site.invalid


def test_a_run_whose_overruns_are_above_the_bound_is_invalid() -> None:
    just = (GRACE_NS + 1) * 100 // LIMIT_PERCENT
    assert promise([GRACE_NS], GRACE_NS) == []
    assert promise([GRACE_NS + 1], just) == []
    (reason,) = promise([GRACE_NS + 1], just // 2)
    assert "emu:dram queue 0: commands overran by 20.0 ms" in reason


def test_a_run_that_makes_up_for_a_late_start_is_valid_again() -> None:
    assert len(promise([GRACE_NS * 2], GRACE_NS)) == 1
    assert promise([GRACE_NS * 2] + [0] * 50, GRACE_NS) == []
