"""What tests do to the hardware of a guest while it runs, over QMP, from the host or from within the guest.

Names are those of the machine's description: a drive goes by its serial number, a CXL memory by its name. `DriveDoor`
makes the conformance suite's `FaultyHost` of one drive.

How it is done, and what is not obvious about it:

- Limits belong to a throttle group of each drive; QEMU lets a burst of a tenth of a second pass at first.
- A lost sector is a rule of a block node (blkdebug) that is put in the drive's way while it runs; the guest sees an
  unrecovered read error, and writes to the sector succeed but do not mend it.
- A drive hangs by a second limit, of one byte per second, that has been used up for the next hours. It sits on the
  device, not on the throttle group: only there are commands that wait let go when it is lifted, and a block node that
  is changed while commands wait in a group stops QEMU for good. What uses the limit up is a read that nobody waits
  for: QEMU would stop if the guest had used it up before.
- A drive that was pulled out can be plugged in again; it keeps its bytes and gets another number. What lies in its way
  is changed while it is out, because the guest looks for partitions as soon as it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tierloop.devices.errors import ConfigurationError, NotPresent, Timeout, nearest
from tierloop.devices.faulty_host import Ability
from tierloop.devices.regions import Region
from tierloop.tools.guest.arguments import drive_device, faulty_node, limits, refusing_node
from tierloop.tools.guest.machine import Cxl, Drive, Machine
from tierloop.tools.guest.qmp import Qmp, QmpError

SECTOR = 512
_MOST_SECTORS = 4096
_LINE = 64
_UNPLUG_S = 30.0
_USED_UP_NBYTES = 65536


class Hardware:
    """The hardware of one guest. Every method raises QmpError with QEMU's words where QEMU refuses."""

    def __init__(self, qmp: Qmp, machine: Machine) -> None:
        self.machine = machine
        self._qmp = qmp
        self._nodes = {drive.serial: f"fault-{drive.serial}" for drive in machine.drives if drive.error_sectors}
        self._made = 0

    def limit(self, serial: str, bytes_per_s: int = 0, iops: int = 0) -> None:
        """Limits of a drive from now on; 0 is none."""
        drive = self._drive(serial)
        if bytes_per_s < 0 or iops < 0:
            raise ConfigurationError(f"limits of {serial}: {bytes_per_s} bytes/s, {iops} per s; allowed: 0 or more")
        self._limits(drive, bytes_per_s, iops)

    def lose(self, serial: str, sectors: Sequence[int]) -> None:
        """From now on exactly these sectors (512 B each) of a drive cannot be read; none: all can."""
        drive = self._drive(serial)
        if len(sectors) > _MOST_SECTORS or any(not 0 <= one < drive.mib << 11 for one in sectors):
            raise ConfigurationError(
                f"{len(sectors)} lost sectors of {serial}; allowed: up to {_MOST_SECTORS} in [0, {drive.mib << 11})"
            )
        self._stand_in_the_way(
            serial, partial(faulty_node, serial=serial, sectors=sorted(set(sectors))) if sectors else None
        )

    def hang(self, serial: str) -> None:
        """The next command of a drive and those after it do not come back, until `restore`."""
        self._brake(self._drive(serial), 1)
        self._monitor(f'qemu-io -d drive-{serial} "aio_read 0 {_USED_UP_NBYTES}"')

    def unplug(self, serial: str) -> None:
        """Pull a drive out, and wait until it is out. Raises Timeout where the guest does not let it go."""
        drive = self._drive(serial)
        if not drive.hotplug:
            raise ConfigurationError(f"drive {serial} is not in a slot that can be emptied (hotplug = true)")
        self._qmp.ask("device_del", id=f"drive-{serial}")
        deadline = time.monotonic() + _UNPLUG_S
        while self.plugged(serial):
            if time.monotonic() > deadline:
                raise Timeout("guest", "unplug", f"drive {serial} is still there after {_UNPLUG_S:g} s")
            time.sleep(0.05)

    def plug(self, serial: str) -> None:
        """Put a drive that was pulled out back into its slot."""
        if not self.plugged(serial):
            self._qmp.ask("device_add", **drive_device(self._drive(serial)))

    def plugged(self, serial: str) -> bool:
        """Whether the drive is there."""
        found = self._qmp.ask("qom-list", path="/machine/peripheral")
        return any(one["name"] == f"drive-{serial}" for one in found)

    def refuse_a_flush(self, serial: str) -> None:
        """The next flush of a drive fails, and all of its sectors can be read."""
        self._stand_in_the_way(serial, lambda name: refusing_node(name, self._drive(serial).serial))

    def warn(self, serial: str, bits: int) -> None:
        """The critical warnings of a drive's SMART log, as bits."""
        if not 0 <= bits < 64:
            raise ConfigurationError(f"critical warnings of {serial}: {bits:#x}; allowed: six bits")
        path = f"/machine/peripheral/drive-{self._drive(serial).serial}"
        self._qmp.ask("qom-set", path=path, property="smart_critical_warning", value=bits)

    def poison(self, name: str, address: int, nbytes: int = _LINE) -> None:
        """Note a poisoned range of a CXL memory's device addresses: it stands in the list that the memory keeps."""
        memory = self._memory(name)
        if address % _LINE or nbytes % _LINE or not 0 <= address < address + nbytes <= memory.mib << 20:
            raise ConfigurationError(
                f"poison of {name}: {nbytes} bytes at {address:#x}; allowed: whole lines of {_LINE} bytes, inside"
            )
        self._qmp.ask("cxl-inject-poison", path=_qom(memory), start=address, length=nbytes)

    def media_event(self, name: str, address: int, log: str = "informational") -> None:
        """A general media event of a CXL memory, in one of its four logs."""
        told = {"flags": 1, "dpa": address, "descriptor": 3, "type": 3, "transaction-type": 192}
        path = _qom(self._memory(name))
        self._qmp.ask("cxl-inject-general-media-event", path=path, log=log, **told)

    def correctable_error(self, name: str, kind: str = "physical") -> None:
        """A correctable error of a CXL memory's link."""
        self._qmp.ask("cxl-inject-correctable-error", path=_qom(self._memory(name)), type=kind)

    def restore(self, serial: str) -> None:
        """A drive as it was described: plugged in, with its limits, its lost sectors and no warning."""
        drive = self._drive(serial)
        if self.plugged(serial):
            self._brake(drive, 0)
        self._limits(drive, drive.mib_per_s << 20, drive.iops)
        self.lose(serial, drive.error_sectors)
        self.plug(serial)
        self.warn(serial, 0)

    def _stand_in_the_way(self, serial: str, node_called: Callable[[str], dict[str, Any]] | None) -> None:
        """Put a block node between a drive and its bytes, or none; the one that is there goes."""
        if node_called is None and serial not in self._nodes:
            return
        self._made += 1
        old, new = self._nodes.pop(serial, None), f"limit-{serial}"
        if node_called is not None:
            new = self._nodes[serial] = f"fault-{serial}-{self._made}"
            self._qmp.ask("blockdev-add", **node_called(new))
        top = {"driver": "raw", "node-name": f"top-{serial}", "file": new}
        self._qmp.ask("blockdev-reopen", options=[top])
        if old is not None:
            self._qmp.ask("blockdev-del", **{"node-name": old})

    def _limits(self, drive: Drive, bytes_per_s: int, iops: int) -> None:
        path = f"/objects/limits-{drive.serial}"
        self._qmp.ask("qom-set", path=path, property="limits", value=limits(bytes_per_s, iops))

    def _brake(self, drive: Drive, bytes_per_s: int) -> None:
        rest = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
        self._qmp.ask("block_set_io_throttle", id=f"drive-{drive.serial}", bps=bytes_per_s, **rest)

    def _monitor(self, line: str) -> None:
        said = self._qmp.ask("human-monitor-command", **{"command-line": line})
        if said.startswith("Error") or "failed" in said:
            raise QmpError(line.split()[0], "HumanMonitor", said.strip())

    def _drive(self, serial: str) -> Drive:
        for drive in self.machine.drives:
            if drive.serial == serial:
                return drive
        known = [drive.serial for drive in self.machine.drives]
        raise NotPresent("guest", "drive", f"there is no drive {serial!r}: {nearest(serial, known)}")

    def _memory(self, name: str) -> Cxl:
        for memory in self.machine.cxl:
            if memory.name == name:
                return memory
        known = [memory.name for memory in self.machine.cxl]
        raise NotPresent("guest", "cxl", f"there is no CXL memory {name!r}: {nearest(name, known)}")


class DriveDoor:
    """The back door of one drive, for the conformance suite; `offset_of` says where a region begins on the drive,
    `lost` which sectors cannot be read to begin with."""

    def __init__(
        self, hardware: Hardware, serial: str, offset_of: Callable[[Region], int], lost: Sequence[int] = ()
    ) -> None:
        self._hardware = hardware
        self._serial = serial
        self._offset_of = offset_of
        self._lost = set(lost)
        drives = {drive.serial: drive for drive in hardware.machine.drives}
        self.grain_nbytes = SECTOR
        plain: frozenset[Ability] = frozenset({"unreadable", "hang"})
        self.abilities: frozenset[Ability] = plain | ({"unplug"} if drives[serial].hotplug else set())

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        """From now on these bytes cannot be read: whole sectors of the drive."""
        start = self._offset_of(region) + offset
        self._lost.update(range(start // SECTOR, -(-(start + nbytes) // SECTOR)))
        self._hardware.lose(self._serial, sorted(self._lost))

    def hang(self) -> None:
        """The next command does not come back."""
        self._hardware.hang(self._serial)

    def unplug(self) -> None:
        """The drive is pulled out."""
        self._hardware.unplug(self._serial)


def _qom(memory: Cxl) -> str:
    return f"/machine/peripheral/cxl-{memory.name}"


def from_inside(machine: Machine) -> tuple[Hardware, Qmp]:
    """The hardware of the guest that this process runs in. Raises NotPresent outside of one."""
    qmp = Qmp.from_inside()
    return Hardware(qmp, machine), qmp
