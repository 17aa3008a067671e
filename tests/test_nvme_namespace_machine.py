"""Any sequence of commands, faults, closings and power failures against a dict of bytes: NVMe passthrough.

Refusals that pass must not be seen at all, and whatever lies behind the device's capacity stays as it is.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.nvme_regions_rig import PAGE, PAGES, Regions
from tests.nvme_rig import on_drive
from tests.seeded import bytes_of
from tierloop.devices.drivers.nvme_commands import FLUSH, READ, WRITE
from tierloop.devices.regions import Region
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.nvme_identify import NvmeFigures

BEHIND = 16
"""Pages of the namespace that do not belong to the device."""


class NamespaceMachine(Regions):
    """The device on a small modelled drive, and what each region must hold."""

    @initialize(
        io=st.sampled_from(["io_uring", "ioctl"]),
        seed=st.integers(0, 99),
        mdts=st.integers(0, 3),
        shift=st.sampled_from([9, 12]),
        cache=st.booleans(),
    )
    def open(self, io: str, seed: int, mdts: int, shift: int, cache: bool) -> None:
        unit = 1 << shift
        figures = NvmeFigures(mdts=mdts, volatile_cache=cache)
        machine = nvme_machine((PAGES + BEHIND) * PAGE, unit, figures, seed=seed)
        self.foreign = bytes_of(7, BEHIND * PAGE).tobytes()
        machine.controller.poke(1, PAGES * PAGE >> shift, self.foreign)
        self.hold(on_drive(machine, io=io, capacity=PAGES * PAGE, depth=4), unit)

    def on_medium(self, region: Region) -> bytes:
        place = self.rig.device.offset_of(region)
        with self.rig.machine.guard:
            return self.rig.machine.controller.peek(1, place // self.unit, region.nbytes // self.unit)

    def heal(self) -> None:
        with self.rig.machine.guard:
            self.rig.machine.controller.heal()

    def break_writes(self, offset: int) -> None:
        with self.rig.machine.guard:
            self.rig.machine.controller.inject_write_fault(1, offset // self.unit)

    def close_device(self, power_fails: bool) -> None:
        if power_fails:
            machine = self.rig.machine
            self.heal()
            with machine.guard:
                machine.controller.power_off()
                machine.controller.power_on()
                machine.host.reset()
        self.rig.device.close()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), skew=st.sampled_from([0, 1, 4, 512]))
    def read(self, data: st.DataObject, skew: int) -> None:
        done, nbytes = self.read_any(data, skew)
        assert done.media_nbytes == nbytes

    @rule(
        opcode=st.sampled_from([READ, WRITE, FLUSH]),
        status=st.sampled_from([0x007, 0x021, 0x022, 0x082, 0x303]),
        times=st.integers(1, 3),
    )
    def let_commands_be_refused_for_now(self, opcode: int, status: int, times: int) -> None:
        with self.rig.machine.guard:
            self.rig.machine.controller.heal()
            self.rig.machine.controller.inject_status(opcode, status, times=times)

    @invariant()
    def what_is_not_the_devices_stays_as_it_is(self) -> None:
        if hasattr(self, "rig"):
            with self.rig.machine.guard:
                behind = self.rig.machine.controller.peek(1, PAGES * PAGE // self.unit, BEHIND * PAGE // self.unit)
            assert behind == self.foreign


NamespaceMachine.TestCase.settings = settings(stateful_step_count=20, max_examples=25)
TestNamespaceMachine = NamespaceMachine.TestCase
