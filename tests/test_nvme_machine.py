"""Any sequence of commands, faults, closings and power failures against a dict of bytes: the nvme driver, both engines.

Recoverable faults (short transfers, EAGAIN, EINTR) must not be seen at all.
"""

from __future__ import annotations

import errno

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.fake_system import FakeSystem
from tests.nvme_regions_rig import PAGE, PAGES, Regions, pieces
from tests.nvme_rig import host_memory, on_fake
from tests.seeded import bytes_of
from tierloop.devices.commands import Copy, Read, Write
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait

UNIT = 512


class NvmeMachine(Regions):
    """The device on a small disk in memory, and what each region must hold."""

    @initialize(io=st.sampled_from(["io_uring", "posix"]), seed=st.integers(0, 99), zeroing=st.integers(0, 2))
    def open(self, io: str, seed: int, zeroing: int) -> None:
        system = FakeSystem(seed=seed, zero_range=zeroing == 0, punch_hole=zeroing <= 1)
        self.hold(on_fake(system, io=io, capacity=PAGES * PAGE, depth=4, reaches=["dram"]), UNIT)
        self.dram = host_memory(PAGES * PAGE)

    def on_medium(self, region: Region) -> bytes:
        where = self.rig.device.offset_of(region)
        return self.rig.fake.contents("/medium")[where : where + region.nbytes]

    def heal(self) -> None:
        self.rig.fake.heal()

    def break_writes(self, offset: int) -> None:
        self.rig.fake.inject("write", errno.EIO, offset=offset)

    def close_device(self, power_fails: bool) -> None:
        self.heal()
        self.rig.device.close()
        if power_fails:
            self.rig.fake.crash()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), skew=st.sampled_from([0, 1, 512]))
    def read(self, data: st.DataObject, skew: int) -> None:
        done, nbytes = self.read_any(data, skew)
        assert done.media_nbytes >= nbytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def copy_within(self, data: st.DataObject) -> None:
        source, target = self.pick(data), self.pick(data)
        into = data.draw(pieces(target.nbytes, UNIT, disjoint=True))
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
        spans = data.draw(pieces(region.nbytes, UNIT, disjoint=True))
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

    @invariant()
    def every_transfer_is_accounted_for(self) -> None:
        assert self.rig.device.counts.timeouts == 0


NvmeMachine.TestCase.settings = settings(stateful_step_count=25)
TestNvme = NvmeMachine.TestCase
