"""Real drivers on models of hardware: a platform in which drivers of devices/drivers run unchanged.

The drivers do not know; what they say of themselves tells (`DeviceInfo.model`). Beside the devices under test stands
this machine's own memory, whose cores and regions the drivers need as on silicon. Every model offers its back door to
the conformance suite's fault level (devices/faulty_host.py).

Opened by `tierloop conformance KIND:model`, and by tests; there is no name for a platform file, because nothing that a
file names is a model by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import CxlDevice, open_cxl
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.nvme import NvmeDevice, open_nvme
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.errors import ConfigurationError, Unsupported, nearest
from tierloop.devices.faulty_host import Ability, offer
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.emulators.kernel_cxl import CxlKernel, CxlRegion, RegionPlan, cxl_machine
from tierloop.emulators.kernel_nvme import NvmeMachine, nvme_machine
from tierloop.firmware_models.pnm_card import PnmCard, PnmParts

if TYPE_CHECKING:
    from tierloop.emulators.host_accelerator import HostAccelerator

HOST_NBYTES = 256 << 20
DRIVE_NBYTES = GPU_NBYTES = 64 << 20
LINE_NBYTES, PAGE_NBYTES = 64, 4096
DEADLINE_S = 4.0
"""How long a device may take: what hangs on purpose ends soon, and a busy host is not taken for one that hangs."""


def open_modelled(kinds: Sequence[str], site: Site) -> Platform:
    """A platform of this machine's memory and cores, and of a real driver on a model of each kind: `nvme0`, `cxl0`, …

    Raises ConfigurationError for a kind that has no model.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigurationError(f"there is no model {kind!r}; {nearest(kind, sorted(KINDS))}")
    mapped = ["cxl0"] if "cxl" in kinds else []
    devices: dict[str, Device] = {}
    with ExitStack() as undo:
        devices["cpu0"] = open_cpu("cpu0", site, {"capacity": HOST_NBYTES, "reaches": mapped})
        undo.callback(devices["cpu0"].close)
        for kind in kinds:
            name = f"{kind}0"
            devices[name] = KINDS[kind](site, name, ["cpu0", *(memory for memory in mapped if memory != name)])
            undo.callback(devices[name].close)
        platform = Platform("real drivers on models", site, devices, "cpu0")
        undo.pop_all()
        return platform


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
        raise Unsupported(self._device.info.name, "hang", "a load has no deadline: it comes back, or the machine stops")

    def unplug(self) -> None:
        self._machine.unplug(0)


class GpuBackDoor:
    """Of the stand-in for a GPU: an event that is never reached, and a context that is lost."""

    abilities: frozenset[Ability] = frozenset({"hang", "unplug"})
    grain_nbytes = 1

    def __init__(self, name: str, accelerator: HostAccelerator) -> None:
        self._name, self._accelerator = name, accelerator

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        raise Unsupported(self._name, "unreadable", "a GPU that meets an error it cannot correct is lost as a whole")

    def hang(self) -> None:
        self._accelerator.hold()

    def unplug(self) -> None:
        self._accelerator.lose()


class NvmeBackDoor:
    """Of the drive's controller: blocks that cannot be read, completions that are lost, and the slot."""

    abilities: frozenset[Ability] = frozenset({"unreadable", "hang", "unplug"})

    def __init__(self, machine: NvmeMachine, device: NvmeDevice) -> None:
        self._machine, self._device = machine, device
        self.grain_nbytes = device.info.memories[0].alignment

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        first = (self._device.offset_of(region) + offset) // self.grain_nbytes
        with self._machine.guard:
            self._machine.controller.inject_read_error(1, first, -(-nbytes // self.grain_nbytes))

    def hang(self) -> None:
        with self._machine.guard:
            self._machine.controller.drop()

    def unplug(self) -> None:
        self._machine.unplug()


class PnmBackDoor:
    """Of the card: bytes of its memory that are lost, answers that it keeps back, and the slot."""

    abilities: frozenset[Ability] = frozenset({"unreadable", "hang", "unplug"})
    grain_nbytes = 1

    def __init__(self, card: PnmCard) -> None:
        self._card = card

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        self._card.poison(region.id, offset, nbytes)

    def hang(self) -> None:
        self._card.hold()

    def unplug(self) -> None:
        self._card.lose()


def _cxl(site: Site, name: str, _reaches: list[str]) -> Device:
    machine = cxl_machine(regions=(RegionPlan((0,), align=PAGE_NBYTES),))
    device = open_cxl(name, site, {"path": "/dev/dax0.0"}, machine)
    offer(site, name, CxlBackDoor(machine, machine.regions[0], device))
    return device


def _gpu(site: Site, name: str, reaches: list[str]) -> Device:
    from tierloop.emulators.host_accelerator import HostAccelerator  # torch takes seconds to import

    accelerator = HostAccelerator(capacity=GPU_NBYTES)
    options = {"capacity": GPU_NBYTES, "reaches": reaches, "deadline_s": DEADLINE_S}
    device = open_gpu(name, site, options, accelerator=accelerator)
    offer(site, name, GpuBackDoor(name, accelerator))
    return device


def _nvme(site: Site, name: str, reaches: list[str]) -> Device:
    machine = nvme_machine(DRIVE_NBYTES)
    options = {"path": "/dev/ng0n1", "reaches": reaches, "queues": 2, "deadline_s": DEADLINE_S}
    device = open_nvme(name, site, options, machine)
    offer(site, name, NvmeBackDoor(machine, device))
    return device


def _pnm(site: Site, name: str, reaches: list[str]) -> Device:
    card = PnmCard(PnmParts(engines=4, entries=16, capacity=64 << 20))
    device = open_pnm(name, site, {"reaches": reaches, "deadline_ms": int(1e3 * DEADLINE_S)}, window=card.bus())
    offer(site, name, PnmBackDoor(card))
    return device


KINDS: dict[str, Callable[[Site, str, list[str]], Device]] = {"cxl": _cxl, "gpu": _gpu, "nvme": _nvme, "pnm": _pnm}
"""What opens a device of each kind: (site, name, memories that it is to reach)."""
