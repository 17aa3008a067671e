"""Regions of an nvme device and what each must hold: what stateful machines share, whatever lies beneath the driver.

After a failed write the bytes that it named are unknown and are taken from the medium; nothing else may have changed.
After a power failure every region that was not touched since the last flush reads as it did then. A machine opens the
device and says how its medium is read, broken, healed and cut off.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.nvme_rig import Rig
from tests.seeded import bytes_of
from tierloop.devices.commands import Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.errors import MediaError, OutOfMemory
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

PAGE, PAGES = 4096, 96


@st.composite
def pieces(draw: st.DrawFn, nbytes: int, unit: int, disjoint: bool = False) -> Spans:
    """Spans on the grid inside nbytes, in any order."""
    units = nbytes // unit
    chosen: list[tuple[int, int]] = []
    used: set[int] = set()
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, units - 1))
        size = draw(st.integers(0, min(units - start, 40)))
        mine = set(range(start, start + size))
        if not (disjoint and mine & used):
            chosen.append((start * unit, size * unit))
            used |= mine
    return Spans(chosen)


class Regions(RuleBasedStateMachine):
    """A device of PAGES pages, and what each region must hold."""

    rig: Rig
    unit: int

    def hold(self, rig: Rig, unit: int) -> None:
        """Open the device, of which nothing is allocated."""
        self.rig, self.unit = rig, unit
        self.rig.open()
        self.model: dict[Region, bytearray] = {}
        self.flushed: dict[Region, bytes] = {}

    def on_medium(self, region: Region) -> bytes:
        """The bytes of a region, behind the driver's back."""
        raise NotImplementedError

    def heal(self) -> None:
        """Nothing fails any more."""
        raise NotImplementedError

    def break_writes(self, offset: int) -> None:
        """Writes of the block at this offset of the medium fail."""
        raise NotImplementedError

    def close_device(self, power_fails: bool) -> None:
        """Close the device, around a power failure if there is one."""
        raise NotImplementedError

    def pick(self, data: st.DataObject) -> Region:
        return data.draw(st.sampled_from(list(self.model)))

    def store(self, region: Region, spans: Spans, data: bytes) -> None:
        at = 0
        for offset, nbytes in spans.array.tolist():
            self.model[region][offset : offset + nbytes] = data[at : at + nbytes]
            at += nbytes
        self.flushed.pop(region, None)

    def load(self, region: Region, spans: Spans) -> bytes:
        return b"".join(bytes(self.model[region][o : o + n]) for o, n in spans.array.tolist())

    def read_any(self, data: st.DataObject, skew: int) -> tuple[Completion, int]:
        """Read pieces of a region into memory `skew` bytes off; returns the completion and how many bytes."""
        region = self.pick(data)
        spans = data.draw(pieces(region.nbytes, self.unit))
        into = np.empty(spans.nbytes + skew, dtype=np.uint8)[skew:]
        done = self.rig.run(Read(Segment(region, spans), into), queue=1)
        assert into.tobytes() == self.load(region, spans)
        return done, spans.nbytes

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
        spans = data.draw(pieces(region.nbytes, self.unit))
        new = bytes_of(seed, spans.nbytes)
        self.rig.write(Segment(region, spans), new)
        self.store(region, spans, new.tobytes())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def fail_a_write(self, data: st.DataObject, seed: int) -> None:
        region = self.pick(data)
        unit = data.draw(st.integers(0, region.nbytes // self.unit - 1))
        self.heal()
        self.break_writes(self.rig.device.offset_of(region) + unit * self.unit)
        error = self.rig.error_of(Write(region.all(), bytes_of(seed, region.nbytes)))
        assert isinstance(error, MediaError)
        self.heal()
        self.model[region][:] = self.on_medium(region)
        self.flushed.pop(region, None)

    @precondition(lambda self: self.model)
    @rule()
    def flush(self) -> None:
        self.rig.flush(next(iter(self.model)))
        self.flushed = {region: bytes(held) for region, held in self.model.items()}

    @rule(power_fails=st.booleans())
    def reopen(self, power_fails: bool) -> None:
        held = self.flushed if power_fails else self.model
        places = {region: self.rig.device.offset_of(region) for region in held}
        self.close_device(power_fails)
        self.rig.opened.clear()
        self.rig.open()
        model = {self.rig.device.adopt(places[old], old.nbytes): bytearray(content) for old, content in held.items()}
        self.model = model
        self.flushed = {region: bytes(content) for region, content in model.items()} if power_fails else {}

    @invariant()
    def every_region_holds_what_it_must(self) -> None:
        for region, expected in self.model.items():
            assert self.on_medium(region) == expected

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
