"""Real drivers on models of hardware: for each kind a platform in which the driver of devices/drivers runs unchanged.

The drivers do not know; what they say of themselves tells (`DeviceInfo.model`). Beside the device under test stands
this machine's own memory, whose cores and regions the driver needs as on silicon. Every model offers its back door to
the conformance suite's fault level (devices/faulty_host.py).

Opened by `tierloop conformance KIND:model`, and by tests; there is no name for a platform file, because nothing that a
file names is a model by accident.
"""

from __future__ import annotations

from collections.abc import Callable

from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import CxlDevice, open_cxl
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.faulty_host import Ability, offer
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.emulators.kernel_cxl import CxlKernel, CxlRegion, RegionPlan, cxl_machine
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine
from tierloop.firmware_models.pnm_card import PnmCard, PnmParts

HOST_NBYTES = 256 << 20
LINE_NBYTES, PAGE_NBYTES = 64, 4096
DRIVE_NBYTES = 64 << 20
DEADLINE_S = 2.0
"""How long a device may take, so that what hangs on purpose is given up soon."""


def open_modelled(kind: str, site: Site) -> tuple[Platform, str]:
    """A platform with a real driver on a model of that kind, and the device's name. Raises ConfigurationError."""
    if kind not in MACHINES:
        raise ConfigurationError(f"there is no model {kind!r}; {nearest(kind, sorted(MACHINES))}")
    return MACHINES[kind](site)


class PnmBackDoor:
    """Of the card: it can keep answers back, and leave the bus."""

    abilities: frozenset[Ability] = frozenset({"hang", "unplug"})
    grain_nbytes = 1

    def __init__(self, card: PnmCard) -> None:
        self._card = card

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        raise NotImplementedError("its protocol has no answer for bytes that are lost")

    def hang(self) -> None:
        self._card.hold()

    def unplug(self) -> None:
        self._card.lose()


def _pnm(site: Site) -> tuple[Platform, str]:
    card = PnmCard(PnmParts(engines=4, entries=16, capacity=64 << 20))
    cpu = open_cpu("cpu0", site, {"capacity": HOST_NBYTES})
    device = open_pnm("pnm0", site, {"reaches": ["cpu0"], "deadline_ms": int(1e3 * DEADLINE_S)}, window=card.bus())
    offer(site, "pnm0", PnmBackDoor(card))
    return Platform("pnm:model", site, {"cpu0": cpu, "pnm0": device}, "cpu0"), "pnm0"


class NvmeBackDoor:
    """Of the drive's controller: blocks that cannot be read, completions that are lost, and the slot."""

    abilities: frozenset[Ability] = frozenset({"unreadable", "hang", "unplug"})

    def __init__(self, machine: NvmeMachine, device: NvmeDevice) -> None:
        self._machine, self._device = machine, device
        self.grain_nbytes = device.info.memories[0].alignment

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        lba_nbytes = self._device.info.memories[0].alignment
        first = (self._device.offset_of(region) + offset) // lba_nbytes
        with self._machine.guard:
            self._machine.controller.inject_read_error(1, first, -(-nbytes // lba_nbytes))

    def hang(self) -> None:
        with self._machine.guard:
            self._machine.controller.drop()

    def unplug(self) -> None:
        self._machine.unplug()


class CxlBackDoor:
    """Of the card beneath a devdax: lines with poison in them, and the slot. A load always comes back."""

    abilities: frozenset[Ability] = frozenset({"unreadable", "unplug"})

    def __init__(self, machine: CxlKernel, region: CxlRegion, device: CxlDevice) -> None:
        self._machine, self._region, self._device = machine, region, device
        self.grain_nbytes = region.plan.align

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        first = self._device.offset_of(region) + offset
        with self._machine.guard:
            for line in range(first // LINE_NBYTES, -(-(first + nbytes) // LINE_NBYTES)):
                card, address = self._region.place(line * LINE_NBYTES)
                card.poison(address)

    def hang(self) -> None:
        raise NotImplementedError("a load has no deadline: it comes back, or the machine stops")

    def unplug(self) -> None:
        self._machine.unplug(0)


def _cxl(site: Site) -> tuple[Platform, str]:
    machine = cxl_machine(regions=(RegionPlan((0,), align=PAGE_NBYTES),))
    device = open_cxl("cxl0", site, {"path": "/dev/dax0.0"}, machine)
    cpu = open_cpu("cpu0", site, {"capacity": HOST_NBYTES, "reaches": ["cxl0"]})
    offer(site, "cxl0", CxlBackDoor(machine, machine.regions[0], device))
    return Platform("cxl:model", site, {"cpu0": cpu, "cxl0": device}, "cpu0"), "cxl0"


def _nvme(site: Site) -> tuple[Platform, str]:
    machine = nvme_machine(DRIVE_NBYTES)
    cpu = open_cpu("cpu0", site, {"capacity": HOST_NBYTES})
    options = {"path": "/dev/ng0n1", "reaches": ["cpu0"], "queues": 2, "deadline_s": DEADLINE_S}
    device = open_nvme("nvme0", site, options, machine)
    offer(site, "nvme0", NvmeBackDoor(machine, device))
    return Platform("nvme:model", site, {"cpu0": cpu, "nvme0": device}, "cpu0"), "nvme0"


MACHINES: dict[str, Callable[[Site], tuple[Platform, str]]] = {"cxl": _cxl, "nvme": _nvme, "pnm": _pnm}
"""By the name before `:model`."""
