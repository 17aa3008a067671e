"""Checked: damage is found whatever reads it, nothing else is taken for damage, and the device works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.machines import write_machine
from tests.wrapping import Layer, ended, every_command, failed, filled, reference, site, stored
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Copy, Launch, Read, Write, read_segments, write_segments
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import Busy, ConfigurationError, MediaError
from tierloop.devices.kernels.contract import Dense, Gather
from tierloop.devices.regions import Region, Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.devices.wrappers import Checked, Delayed, Latency, wrapped


def checked(on: Site, block_nbytes: int = 64, inside: list[Layer] | None = None, name: str = "emu:reference") -> Device:
    layers: list[Layer] = [*(inside or []), lambda device, where: Checked(device, where, block_nbytes)]
    return reference(on, layers, name=name)


def flip(on: Site, region: Region, at: int) -> None:
    stored(on, region)[at] ^= 0x40


def first_byte(segments: tuple[Segment, ...]) -> tuple[Region, int]:
    """A byte that the segments name."""
    for region, spans in segments:
        for offset, nbytes in spans.array.tolist():
            if nbytes:
                return region, offset
    raise AssertionError("the command names no byte")


def test_damage_is_found_by_every_command_and_kernel_that_reads() -> None:
    on = site()
    device = checked(on)
    for name, command in every_command(on.clock, device).items():
        if not read_segments(command):
            assert name in ("write", "flush")
            continue
        for region, at in (first_byte((segment,)) for segment in read_segments(command) if segment.spans.nbytes):
            flip(on, region, at)
            targets = [stored(on, segment.region).copy() for segment in write_segments(command)]
            error = failed(on.clock, device.submit(command))
            assert isinstance(error, MediaError), name
            assert f"block {at // 64} (" in str(error), name
            assert repr(region) in str(error)
            for segment, before in zip(write_segments(command), targets, strict=True):
                assert np.array_equal(stored(on, segment.region), before), f"{name} was carried out"
            flip(on, region, at)
            ended(on.clock, device.submit(command))


def test_damage_is_found_in_what_every_command_and_kernel_has_written() -> None:
    on = site()
    device = checked(on)
    for name, command in every_command(on.clock, device).items():
        if not write_segments(command):
            assert name in ("read", "flush")
            continue
        ended(on.clock, device.submit(command))
        for segment in write_segments(command):
            region, at = first_byte((segment,))
            flip(on, region, at)
            again = device.submit(Read(region.at(at, 1), np.empty(1, dtype=np.uint8)))
            assert isinstance(failed(on.clock, again), MediaError), name
            flip(on, region, at)
            ended(on.clock, device.submit(Read(region.at(at, 1), np.empty(1, dtype=np.uint8))))


class Liar:
    """A device that damages what a certain kind of command moves."""

    what = "lies"

    def __init__(self, device: Device, on: Site, kind: type) -> None:
        self._device, self._site, self._kind = device, on, kind
        self.lying = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def submit(self, command: Command, *more: Any, **named: Any) -> Any:
        completion = self._device.submit(command, *more, **named)
        if isinstance(command, self._kind) and self.lying:
            completion.on_done(lambda _: self._lie(command))
        return completion

    def _lie(self, command: Command) -> None:
        if isinstance(command, Read):
            command.into[0] ^= 1
        else:
            region, at = first_byte(write_segments(command))
            flip(self._site, region, at)


@pytest.mark.parametrize("spans", [Spans.one(0, 128), Spans([(10, 3), (70, 20), (200, 1)]), Spans.one(32, 64)])
@pytest.mark.parametrize("kind", [Read, Write, Copy])
def test_a_device_that_delivers_or_stores_other_bytes_is_found(kind: type, spans: Spans) -> None:
    on = site()
    made: list[Liar] = []

    def lie(device: Device, inside: Site) -> Any:
        made.append(Liar(device, inside, kind))
        return made[0]

    device = checked(on, inside=[lie])
    one, other = filled(on.clock, device, 256, 1), filled(on.clock, device, 256, 2)
    made[0].lying = kind is not Read
    into = np.zeros(spans.nbytes, dtype=np.uint8)
    if kind is Write:
        ended(on.clock, device.submit(Write(Segment(other, spans), into)))
    elif kind is Copy:
        ended(on.clock, device.submit(Copy(Segment(one, spans), Segment(other, spans))))
    made[0].lying = True
    assert isinstance(failed(on.clock, device.submit(Read(Segment(other, spans), into))), MediaError)


def test_a_kernel_that_writes_beside_its_spans_is_found() -> None:
    on = site()
    device = checked(on)
    region = filled(on.clock, device, 256)

    def careless(reads: list[Any], writes: list[Any]) -> None:
        writes[0][:] = 9
        flip(on, region, 100)

    launch = Launch(Dense("careless", 0, 0, 0, careless), (), ((region.at(70, 10),),))
    assert "block 1 ([64, 128))" in str(failed(on.clock, device.submit(launch)))


def test_a_mismatch_names_block_and_checksums_and_the_device_works_on() -> None:
    on = site()
    device = checked(on, 64)
    region = device.alloc(200)
    flip(on, region, 199)
    error = failed(on.clock, device.submit(Read(region.all(), np.empty(200, dtype=np.uint8))))
    text = "emu:reference: read: block 3 ([192, 200)) of <region 0 of 200 B on emu:reference>: checksum "
    assert str(error).startswith(text)
    assert "expected" in str(error)
    assert read_bytes(on.clock, device, region.at(0, 192)).tolist() == [0] * 192
    write_bytes(on.clock, device, region.at(192, 8), bytes(8))
    assert read_bytes(on.clock, device, region.all()).tolist() == [0] * 200


def test_a_write_of_part_of_a_damaged_block_is_refused_and_one_of_all_of_it_repairs() -> None:
    on = site()
    device = checked(on)
    region = device.alloc(128)
    flip(on, region, 0)
    write = Write(region.at(10, 4), np.ones(4, dtype=np.uint8))
    assert isinstance(failed(on.clock, device.submit(write)), MediaError)
    assert not stored(on, region)[10:14].any()
    write_bytes(on.clock, device, region.at(0, 64), bytes(64))
    ended(on.clock, device.submit(write))


def test_blocks_that_two_queues_share_are_written_one_after_the_other() -> None:
    on = site()
    device = checked(on, 64, [lambda device, inside: Delayed(device, inside, Latency(50), Latency(70))])
    region = device.alloc(128)
    spans = [region.at(8 * i, 8) for i in range(16)]
    made = [device.submit(Write(s, np.full(8, i + 1, dtype=np.uint8)), i % 4) for i, s in enumerate(spans)]
    ended(on.clock, *made)
    assert read_bytes(on.clock, device, region.all()).tolist() == [i + 1 for i in range(16) for _ in range(8)]
    flip(on, region, 3)
    assert isinstance(failed(on.clock, device.submit(Read(region.at(60, 4), np.empty(4, np.uint8)))), MediaError)


def test_commands_on_other_blocks_do_not_wait_for_each_other() -> None:
    on = site()
    device = checked(on, 64, [lambda device, inside: Delayed(device, inside, Latency(50), Latency(70))])
    region = device.alloc(256)
    made = [device.submit(Write(region.at(64 * i, 64), np.ones(64, dtype=np.uint8)), i) for i in range(4)]
    assert ended(on.clock, *made) == [71] * 4


def test_phantom_regions_pass_through() -> None:
    on = site()
    device = checked(on)
    region, real = device.alloc(1 << 20, phantom=True), device.alloc(64)
    ended(on.clock, device.submit(Copy(region.at(0, 64), real.all())))
    ended(on.clock, device.submit(Read(region.at(0, 64), np.empty(64, dtype=np.uint8))))
    flip(on, real, 0)
    assert isinstance(failed(on.clock, device.submit(Read(real.all(), np.empty(64, dtype=np.uint8)))), MediaError)


def test_an_estimate_counts_the_reads_that_compare() -> None:
    on = site()
    device = checked(on)
    one, other = device.alloc(256), device.alloc(256)
    whole, part = Read(one.all(), np.empty(256, np.uint8)), Read(one.at(1, 9), np.empty(9, np.uint8))
    gather = Launch(Gather(), ((one.at(0, 8),),), ((other.at(0, 8),),))
    for command, steps in ((whole, 1), (part, 2), (Copy(one.all(), other.all()), 2), (gather, 4)):
        begun = on.clock.now()
        assert device.estimate(command).duration_ns == steps
        assert ended(on.clock, device.submit(command)) == [begun + steps]


def test_a_region_in_use_is_not_freed_and_a_fresh_one_is_zeros_again() -> None:
    on = site()
    device = checked(on)
    region = filled(on.clock, device, 64)
    read = device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)))
    with pytest.raises(Busy):
        device.free(region)
    ended(on.clock, read)
    device.free(region)
    assert read_bytes(on.clock, device, device.alloc(64).all()).tolist() == [0] * 64


def test_what_another_device_writes_is_no_damage() -> None:
    on = site()
    device, other = checked(on), reference(on, [], 100, "emu:other")
    region, source = device.alloc(256), other.alloc(256)
    write_bytes(on.clock, other, source.all(), bytes(range(256)))
    held = other.submit(Copy(source.at(0, 100), region.at(0, 100)))
    beside = device.submit(Write(region.at(100, 20), np.full(20, 3, dtype=np.uint8)))
    read = device.submit(Read(region.at(120, 8), np.empty(8, dtype=np.uint8)))
    ended(on.clock, held, beside, read)
    expected = [*range(100), *[3] * 20, *[0] * 136]
    assert read_bytes(on.clock, device, region.all()).tolist() == expected
    flip(on, region, 70)
    assert isinstance(failed(on.clock, device.submit(Read(region.all(), np.empty(256, np.uint8)))), MediaError)
    flip(on, region, 70)
    flip(on, region, 200)
    assert isinstance(failed(on.clock, device.submit(Read(region.all(), np.empty(256, np.uint8)))), MediaError)


def test_what_a_device_writes_that_tells_nobody_of_arrivals_is_no_damage_once_it_has_ended() -> None:
    on = site()
    device, other = checked(on), reference(on, [], 100, "emu:other")
    region, source = device.alloc(256), other.alloc(256)
    write_bytes(on.clock, other, source.all(), bytes(range(256)))
    on.arrivals.clear()
    ended(on.clock, other.submit(Copy(source.at(0, 100), region.at(0, 100))))
    assert read_bytes(on.clock, device, region.at(0, 100)).tolist() == [*range(100)]
    on.arrivals.append(device._peer_began)  # type: ignore[attr-defined]  # what close takes away
    device.close()


def test_copies_by_a_gpu_into_checked_memory_are_no_damage(tmp_path: Path) -> None:
    path = write_machine(tmp_path)
    wrap = 'wrap = [{ kind = "checked", block_nbytes = 256 }, { kind = "throttled", bytes_per_s = 1e9 }]\n'
    text = path.read_text()
    for name in ("dram", "gpu"):
        text = text.replace(f'profile = "{name}.toml"\n', f'profile = "{name}.toml"\n{wrap}')
    path.write_text(text)
    with open_platform(path, check_hazards=True) as platform:
        gpu, host = platform.device("emu:gpu"), platform.device("emu:dram")
        a, b = filled(platform.clock, host, 4000, 1), gpu.alloc(4000)
        there = gpu.submit(Copy(a.all(), b.all()), 2)
        back = gpu.submit(Copy(b.at(0, 1000), a.at(500, 1000)), 4, [there])
        ended(platform.clock, there, back)
        expected = np.random.default_rng(1).integers(1, 256, 4000, dtype=np.uint8)
        assert np.array_equal(read_bytes(platform.clock, gpu, b.all(), 4), expected)
        expected[500:1500] = expected[:1000].copy()
        assert np.array_equal(read_bytes(platform.clock, host, a.all()), expected)


def test_after_a_command_that_failed_its_blocks_are_unknown() -> None:
    on = site()
    device = checked(on)
    region = filled(on.clock, device, 128)

    def torn(reads: list[Any], writes: list[Any]) -> None:
        stored(on, region)[0:10] = 77
        raise ValueError("torn")

    launch = Launch(Dense("torn", 0, 0, 0, torn), (), ((region.at(0, 64),),))
    assert "torn" in str(failed(on.clock, device.submit(launch)))
    assert read_bytes(on.clock, device, region.at(0, 10)).tolist() == [77] * 10
    flip(on, region, 100)
    assert isinstance(failed(on.clock, device.submit(Read(region.all(), np.empty(128, np.uint8)))), MediaError)


def test_a_real_device_is_checked_on_the_wall_clock() -> None:
    on = Site(clock=WallClock())
    device = wrapped(
        on,
        lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}),
        [lambda device, inside: Checked(device, inside, 4096)],
    )
    region, other = filled(on.clock, device, 10_000), device.alloc(10_000)
    ended(on.clock, device.submit(Copy(region.at(5, 9_000), other.at(77, 9_000))))
    assert np.array_equal(
        read_bytes(on.clock, device, other.at(77, 9_000)), read_bytes(on.clock, device, region.at(5, 9_000))
    )
    assert other.view is not None
    other.view[9_000] ^= 1
    launch = Launch(Gather(), ((other.at(8_192, 1_000),),), ((region.at(0, 1_000),),))
    assert isinstance(failed(on.clock, device.submit(launch)), MediaError)
    device.close()


@pytest.mark.parametrize("size", [0, 63, (1 << 24) + 1, 64.0, True])
def test_a_block_size_that_makes_no_sense_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match="allowed: 64 to"):
        checked(site(), size)


def test_a_block_that_is_off_the_grid_is_refused(tmp_path: Path) -> None:
    path = write_machine(tmp_path)
    wrap = 'profile = "nvme.toml"\nwrap = [{ kind = "checked", block_nbytes = 6144 }]\n'
    path.write_text(path.read_text().replace('profile = "nvme.toml"\n', wrap))
    with pytest.raises(
        ConfigurationError, match=r"devices.nvme: checked: block_nbytes 6144; allowed: multiples of 4096"
    ):
        open_platform(path)


class AgainstADict(RuleBasedStateMachine):
    """Any sequence of commands and damage: errors exactly where a block is not what was written, and never else."""

    BLOCK = 64

    def __init__(self) -> None:
        super().__init__()
        self.site = site()
        self.device = checked(self.site, self.BLOCK)
        self.clock = self.site.clock
        self.written: dict[Region, bytearray] = {}
        self.there: dict[Region, bytearray] = {}

    @initialize(sizes=st.lists(st.integers(1, 300), min_size=2, max_size=3))
    def regions(self, sizes: list[int]) -> None:
        for nbytes in sizes:
            region = self.device.alloc(nbytes)
            self.written[region], self.there[region] = bytearray(nbytes), bytearray(nbytes)

    def wrong(self, region: Region, spans: Spans, part_only: bool = False) -> bool:
        """Whether a block that the spans touch (or touch in part only) is damaged."""
        for low in range(0, region.nbytes, self.BLOCK):
            high = min(low + self.BLOCK, region.nbytes)
            rows = [(o, o + n) for o, n in spans.array.tolist() if n and o < high and o + n > low]
            whole = any(o <= low and end >= high for o, end in rows)
            damaged = self.written[region][low:high] != self.there[region][low:high]
            if rows and damaged and not (part_only and whole):
                return True
        return False

    def put(self, region: Region, spans: Spans, data: bytes) -> None:
        at = 0
        for offset, nbytes in spans.array.tolist():
            for model in (self.written[region], self.there[region]):
                model[offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes

    def get(self, region: Region, spans: Spans) -> bytes:
        return b"".join(bytes(self.there[region][o : o + n]) for o, n in spans.array.tolist())

    def pick(self, data: st.DataObject, most: int = 300) -> tuple[Region, Spans]:
        region = data.draw(st.sampled_from(sorted(self.written, key=lambda r: r.id)))
        cuts = sorted(
            data.draw(st.lists(st.integers(0, min(region.nbytes, most)), min_size=2, max_size=6, unique=True))
        )
        pairs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        return region, Spans(data.draw(st.permutations(pairs)))

    def run(self, command: Command, bad: bool) -> None:
        error = failed(self.clock, self.device.submit(command))
        assert isinstance(error, MediaError) if bad else error is None, (error, bad)

    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        region, spans = self.pick(data)
        new = bytes((value + i) % 256 for i in range(spans.nbytes))
        bad = self.wrong(region, spans, part_only=True)
        self.run(Write(Segment(region, spans), np.frombuffer(new, dtype=np.uint8)), bad)
        if not bad:
            self.put(region, spans, new)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        region, spans = self.pick(data)
        into = np.empty(spans.nbytes, dtype=np.uint8)
        bad = self.wrong(region, spans)
        self.run(Read(Segment(region, spans), into), bad)
        assert bad or into.tobytes() == self.get(region, spans)

    @rule(data=st.data(), launch=st.booleans(), shift=st.integers(0, 100))
    def move(self, data: st.DataObject, launch: bool, shift: int) -> None:
        region, spans = self.pick(data, 150)
        other = data.draw(st.sampled_from([r for r in self.written if r is not region]))
        nbytes = spans.nbytes
        if shift + nbytes > other.nbytes:
            return
        target = Spans.one(shift, nbytes)
        bad = self.wrong(region, spans) or self.wrong(other, target, part_only=True)
        command: Command = Copy(Segment(region, spans), Segment(other, target))
        if launch:
            command = Launch(Gather(), ((Segment(region, spans),),), ((Segment(other, target),),))
        self.run(command, bad)
        if not bad:
            self.put(other, target, self.get(region, spans))

    @rule(data=st.data(), change=st.integers(1, 255))
    def damage(self, data: st.DataObject, change: int) -> None:
        region = data.draw(st.sampled_from(sorted(self.written, key=lambda r: r.id)))
        at = data.draw(st.integers(0, region.nbytes - 1))
        stored(self.site, region)[at] ^= change
        self.there[region][at] ^= change

    @precondition(lambda self: any(self.written[r] != self.there[r] for r in self.written))
    @rule()
    def repair(self) -> None:
        for region, right in self.written.items():
            stored(self.site, region)[:] = np.frombuffer(bytes(right), dtype=np.uint8)
            self.there[region][:] = right

    @invariant()
    def the_device_holds_what_the_model_says(self) -> None:
        for region, there in self.there.items():
            assert stored(self.site, region).tobytes() == bytes(there)


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
