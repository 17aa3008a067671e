"""Any sequence of commands, faults, closings and power failures against a dict of bytes: the nvme driver, both engines.

Recoverable faults (short transfers, EAGAIN, EINTR) must not be seen at all. After a failed write the bytes that it
named are unknown and are taken from the medium; nothing else may have changed. After a power failure every region that
was not touched since the last flush reads as it did then.
"""

from __future__ import annotations

import errno

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fake_system import FakeSystem
from tests.nvme_rig import Rig, bytes_of, host_memory, on_fake
from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.errors import MediaError, OutOfMemory
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait

PAGE, PAGES = 4096, 96
UNIT = 512


@st.composite
def pieces(draw: st.DrawFn, nbytes: int, disjoint: bool = False) -> Spans:
    """Spans on the grid inside nbytes, in any order."""
    units = nbytes // UNIT
    chosen: list[tuple[int, int]] = []
    used: set[int] = set()
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, units - 1))
        size = draw(st.integers(0, min(units - start, 40)))
        mine = set(range(start, start + size))
        if not (disjoint and mine & used):
            chosen.append((start * UNIT, size * UNIT))
            used |= mine
    return Spans(chosen)


class NvmeMachine(RuleBasedStateMachine):
    """The device on a small disk in memory, and what each region must hold."""

    rig: Rig

    @initialize(io=st.sampled_from(["io_uring", "posix"]), seed=st.integers(0, 99), zeroing=st.integers(0, 2))
    def open(self, io: str, seed: int, zeroing: int) -> None:
        system = FakeSystem(seed=seed, zero_range=zeroing == 0, punch_hole=zeroing <= 1)
        self.rig = on_fake(system, io=io, capacity=PAGES * PAGE, depth=4, reaches=["dram"])
        self.rig.open()
        self.dram = host_memory(PAGES * PAGE)
        self.model: dict[Region, bytearray] = {}
        self.flushed: dict[Region, bytes] = {}

    def pick(self, data: st.DataObject) -> Region:
        regions = list(self.model)
        return regions[data.draw(st.integers(0, len(regions) - 1))]

    def store(self, region: Region, spans: Spans, data: bytes) -> None:
        at = 0
        for offset, nbytes in spans.array.tolist():
            self.model[region][offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes
        self.flushed.pop(region, None)

    def load(self, region: Region, spans: Spans) -> bytes:
        return b"".join(bytes(self.model[region][o : o + n]) for o, n in spans.array.tolist())

    @rule(pages=st.integers(1, 40))
    def alloc(self, pages: int) -> None:
        taken = {self.rig.device.offset_of(r): r.nbytes for r in self.model}
        try:
            region = self.rig.device.alloc(pages * PAGE)
        except OutOfMemory:
            free, at = 0, 0
            for offset in [*sorted(taken), PAGES * PAGE]:
                free, at = max(free, offset - at), offset + taken.get(offset, 0)
            assert free < pages * PAGE
            return
        self.model[region] = bytearray(pages * PAGE)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        region = self.pick(data)
        self.rig.device.free(region)
        del self.model[region]
        self.flushed.pop(region, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 1 << 30))
    def write(self, data: st.DataObject, seed: int) -> None:
        region = self.pick(data)
        spans = data.draw(pieces(region.nbytes))
        new = bytes_of(seed, spans.nbytes)
        self.rig.write(Segment(region, spans), new)
        self.store(region, spans, new.tobytes())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), skew=st.sampled_from([0, 1, 512]))
    def read(self, data: st.DataObject, skew: int) -> None:
        region = self.pick(data)
        spans = data.draw(pieces(region.nbytes))
        into = np.empty(spans.nbytes + skew, dtype=np.uint8)[skew:]
        done = self.rig.run(Read(Segment(region, spans), into), queue=1)
        assert into.tobytes() == self.load(region, spans)
        assert done.media_nbytes >= spans.nbytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def copy_within(self, data: st.DataObject) -> None:
        source, target = self.pick(data), self.pick(data)
        into = data.draw(pieces(target.nbytes, disjoint=True))
        units = source.nbytes // UNIT
        wanted = into.nbytes // UNIT
        if wanted > units:
            return
        start = data.draw(st.integers(0, units - wanted)) * UNIT
        moved = self.load(source, Spans.one(start, into.nbytes))
        self.rig.run(Copy(source.at(start, into.nbytes), Segment(target, into)))
        self.store(target, into, moved)

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(), out=st.booleans(), cut=st.integers(0, 5000), start=st.integers(0, 1000), seed=st.integers(0, 99)
    )
    def copy_with_host_memory(self, data: st.DataObject, out: bool, cut: int, start: int, seed: int) -> None:
        region = self.pick(data)
        spans = data.draw(pieces(region.nbytes, disjoint=True))
        cut = min(cut, spans.nbytes)
        ragged = Spans([(start + spans.nbytes - cut, cut), (start, spans.nbytes - cut)])
        assert self.dram.view is not None
        self.dram.view[:] = bytes_of(seed, len(self.dram.view))
        mapped = b"".join(self.dram.view[o : o + n].tobytes() for o, n in ragged.array.tolist())
        here, there = Segment(region, spans), Segment(self.dram, ragged)
        self.rig.run(Copy(here, there) if out else Copy(there, here))
        if out:
            now = b"".join(self.dram.view[o : o + n].tobytes() for o, n in ragged.array.tolist())
            assert now == self.load(region, spans)
        else:
            self.store(region, spans, mapped)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), first=st.integers(0, 255), second=st.integers(0, 255))
    def pass_along_two_queues(self, data: st.DataObject, first: int, second: int) -> None:
        region = self.pick(data)
        a, b = np.full(region.nbytes, first, np.uint8), np.full(region.nbytes, second, np.uint8)
        into = np.empty(region.nbytes, dtype=np.uint8)
        one = self.rig.device.submit(Write(region.all(), a), queue=1)
        two = self.rig.device.submit(Write(region.all(), b), queue=0, after=[one])
        read = self.rig.device.submit(Read(region.all(), into), queue=1, after=[two])
        wait(self.rig.site.clock, [one, two, read])
        assert (into == second).all()
        self.store(region, Spans.one(0, region.nbytes), b.tobytes())

    @rule(
        call=st.sampled_from(["read", "write"]), times=st.integers(1, 3), moves=st.sampled_from([700, 512, 4096, 9000])
    )
    def let_transfers_stop_short(self, call: str, times: int, moves: int) -> None:
        self.rig.fake.inject(call, moves=moves, times=times)

    @rule(
        call=st.sampled_from(["read", "write", "sync", "enter"]),
        number=st.sampled_from([errno.EAGAIN, errno.EINTR]),
        times=st.integers(1, 3),
    )
    def let_calls_be_put_off(self, call: str, number: int, times: int) -> None:
        self.rig.fake.heal()  # what is put off more often in a row than the driver tries again is an error, and rightly
        self.rig.fake.inject(call, number, times=times)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def fail_a_write(self, data: st.DataObject, seed: int) -> None:
        region = self.pick(data)
        where = self.rig.device.offset_of(region)
        unit = data.draw(st.integers(0, region.nbytes // UNIT - 1))
        self.rig.fake.heal()
        self.rig.fake.inject("write", errno.EIO, offset=where + unit * UNIT)
        error = self.rig.error_of(Write(region.all(), bytes_of(seed, region.nbytes)))
        assert isinstance(error, MediaError)
        self.model[region][:] = self.rig.fake.contents("/medium")[where : where + region.nbytes]
        self.flushed.pop(region, None)

    @precondition(lambda self: self.model)
    @rule()
    def flush(self) -> None:
        self.rig.flush(next(iter(self.model)))
        self.flushed = {region: bytes(held) for region, held in self.model.items()}

    @rule(power_fails=st.booleans())
    def reopen(self, power_fails: bool) -> None:
        self.rig.fake.heal()
        held = self.flushed if power_fails else self.model
        places = {region: self.rig.device.offset_of(region) for region in held}
        if power_fails:
            self.rig.device.close()
            self.rig.fake.crash()
        else:
            self.rig.device.close()
        self.rig.opened.clear()
        self.rig.open()
        model: dict[Region, bytearray] = {}
        for old, content in held.items():
            model[self.rig.device.adopt(places[old], old.nbytes)] = bytearray(content)
        self.model = model
        self.flushed = {region: bytes(content) for region, content in model.items()} if power_fails else {}

    @invariant()
    def every_region_holds_what_it_must(self) -> None:
        contents = self.rig.fake.contents("/medium")
        for region, expected in self.model.items():
            where = self.rig.device.offset_of(region)
            assert contents[where : where + region.nbytes] == expected

    @invariant()
    def every_transfer_is_accounted_for(self) -> None:
        assert self.rig.device.counts.timeouts == 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()


NvmeMachine.TestCase.settings = settings(stateful_step_count=25)
TestNvme = NvmeMachine.TestCase
