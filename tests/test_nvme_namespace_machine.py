"""Any sequence of commands, faults, closings and power failures against a dict of bytes: NVMe passthrough.

Refusals that pass must not be seen at all. After a failed write the bytes that it named are unknown and are taken from
the drive; nothing else may have changed. After a power failure every region that was not touched since the last flush
reads as it did then, and so does whatever lies behind the device's capacity.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.nvme_rig import Rig, bytes_of, on_drive
from tierloop.devices.commands import Read, Write
from tierloop.devices.drivers.nvme_commands import FLUSH, READ, WRITE
from tierloop.devices.errors import MediaError, OutOfMemory
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.nvme_identify import NvmeFigures

PAGE, PAGES = 4096, 96
BEHIND = 16
"""Pages of the namespace that do not belong to the device."""


class NamespaceMachine(RuleBasedStateMachine):
    """The device on a small modelled drive, and what each region must hold."""

    rig: Rig

    @initialize(
        io=st.sampled_from(["io_uring", "ioctl"]),
        seed=st.integers(0, 99),
        mdts=st.integers(0, 3),
        shift=st.sampled_from([9, 12]),
        cache=st.booleans(),
    )
    def open(self, io: str, seed: int, mdts: int, shift: int, cache: bool) -> None:
        self.unit = 1 << shift
        figures = NvmeFigures(mdts=mdts, volatile_cache=cache)
        machine = nvme_machine((PAGES + BEHIND) * PAGE, self.unit, figures, seed=seed)
        self.foreign = bytes_of(7, BEHIND * PAGE).tobytes()
        machine.controller.poke(1, PAGES * PAGE >> shift, self.foreign)
        self.rig = on_drive(machine, io=io, capacity=PAGES * PAGE, depth=4)
        self.rig.open()
        self.model: dict[Region, bytearray] = {}
        self.flushed: dict[Region, bytes] = {}

    def spans(self, data: st.DataObject, nbytes: int) -> Spans:
        units = nbytes // self.unit
        chosen = []
        for _ in range(data.draw(st.integers(0, 4))):
            start = data.draw(st.integers(0, units - 1))
            chosen.append((start * self.unit, data.draw(st.integers(0, min(units - start, 40))) * self.unit))
        return Spans(chosen)

    def pick(self, data: st.DataObject) -> Region:
        return data.draw(st.sampled_from(list(self.model)))

    def on_drive(self, region: Region) -> bytes:
        place = self.rig.device.offset_of(region)
        with self.rig.machine.guard:
            peek = self.rig.machine.controller.peek
            return peek(1, place // self.unit, region.nbytes // self.unit)

    @rule(pages=st.integers(1, 40))
    def alloc(self, pages: int) -> None:
        try:
            region = self.rig.device.alloc(pages * PAGE)
        except OutOfMemory:
            assert sum(region.nbytes for region in self.model) + pages * PAGE > PAGE * PAGES // 2
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
        spans = self.spans(data, region.nbytes)
        new = bytes_of(seed, spans.nbytes)
        self.rig.write(Segment(region, spans), new)
        at = 0
        for offset, nbytes in spans.array.tolist():
            self.model[region][offset : offset + nbytes] = new[at : at + nbytes].tobytes()
            at += nbytes
        self.flushed.pop(region, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), skew=st.sampled_from([0, 1, 4, 512]))
    def read(self, data: st.DataObject, skew: int) -> None:
        region = self.pick(data)
        spans = self.spans(data, region.nbytes)
        into = np.empty(spans.nbytes + skew, dtype=np.uint8)[skew:]
        done = self.rig.run(Read(Segment(region, spans), into), queue=1)
        expected = b"".join(bytes(self.model[region][o : o + n]) for o, n in spans.array.tolist())
        assert into.tobytes() == expected
        assert done.media_nbytes == spans.nbytes

    @rule(
        opcode=st.sampled_from([READ, WRITE, FLUSH]),
        status=st.sampled_from([0x007, 0x021, 0x022, 0x082, 0x303]),
        times=st.integers(1, 3),
    )
    def let_commands_be_refused_for_now(self, opcode: int, status: int, times: int) -> None:
        with self.rig.machine.guard:
            self.rig.machine.controller.heal()
            self.rig.machine.controller.inject_status(opcode, status, times=times)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def fail_a_write(self, data: st.DataObject, seed: int) -> None:
        region = self.pick(data)
        unit = data.draw(st.integers(0, region.nbytes // self.unit - 1))
        with self.rig.machine.guard:
            self.rig.machine.controller.heal()
            self.rig.machine.controller.inject_write_fault(1, self.rig.device.offset_of(region) // self.unit + unit)
        error = self.rig.error_of(Write(region.all(), bytes_of(seed, region.nbytes)))
        assert isinstance(error, MediaError)
        with self.rig.machine.guard:
            self.rig.machine.controller.heal()
        self.model[region][:] = self.on_drive(region)
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
        machine = self.rig.machine
        if power_fails:
            with machine.guard:
                machine.controller.heal()
                machine.controller.power_off()
                machine.controller.power_on()
                machine.host.reset()
        self.rig.device.close()
        self.rig.opened.clear()
        self.rig.open()
        model = {self.rig.device.adopt(places[old], old.nbytes): bytearray(content) for old, content in held.items()}
        self.model = model
        self.flushed = {region: bytes(content) for region, content in model.items()} if power_fails else {}

    @invariant()
    def every_region_holds_what_it_must(self) -> None:
        for region, expected in self.model.items():
            assert self.on_drive(region) == expected

    @invariant()
    def what_is_not_the_devices_stays_as_it_is(self) -> None:
        if hasattr(self, "rig"):
            with self.rig.machine.guard:
                behind = self.rig.machine.controller.peek(1, PAGES * PAGE // self.unit, BEHIND * PAGE // self.unit)
            assert behind == self.foreign

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()


NamespaceMachine.TestCase.settings = settings(stateful_step_count=20, max_examples=25)
TestNamespaceMachine = NamespaceMachine.TestCase
