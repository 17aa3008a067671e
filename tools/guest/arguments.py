"""QEMU's command line, built from a machine's description. Nothing is started and no file is touched here.

What the tests rely on, and why it is so:

- Emulated processors (TCG) with `-hypervisor`: Linux refuses to set a CXL region up where it believes that it cannot
  flush caches, which it believes of every virtual machine.
- Memory that appears later stays offline until somebody brings it online (`memhp_default_state=offline`).
- Every device that does DMA has a large bounce buffer: pages of a CXL memory are no plain memory to QEMU, and without
  one, DMA to them breaks the device for good.
- Block devices are a stack `file` -> throttle -> [blkdebug] -> raw, named `file-S`, `limit-S`, `fault-S` and `top-S`
  after the serial number S, and the device is `drive-S`. CXL devices are `cxl-NAME`. QMP uses these names.
- Two QMP sockets: one for the host, one that the guest reaches at 10.0.2.100:4444. There is no other network, but for a
  wire between two guests where one is asked for. Ports of the network are told apart by their addresses (MAC).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tierloop.tools.guest.machine import CXL_UNIT_MIB, Cxl, Drive, Machine

GUEST_QMP = "10.0.2.100:4444"
RELAY = Path(__file__).resolve().parent / "relay.py"
PORT_MAC, WIRE_MACS = "52:54:00:10:00:01", ("52:54:00:10:01:01", "52:54:00:10:01:02")
_BOUNCE_NBYTES = 64 << 20
_WINDOW_MIB = 4096
_HOTPLUG_MIB = 16384
_IO_ERROR = 5


@dataclass(frozen=True)
class Files:
    """What a run lies in: layers, the run's own folder, the folder for sockets (short, as sockets need), results."""

    layers: Path
    run: Path
    sockets: Path
    results: Path | None = None

    def image(self, drive: Drive) -> Path:
        """The file that a drive keeps its bytes in."""
        return self.run / f"{drive.serial}.img"


@dataclass(frozen=True)
class Wire:
    """One end of a wire between two guests: datagrams between two sockets in a folder, so that neither has to be first.

    What is sent while the other end is not there is lost, as on a wire that is not plugged in.
    """

    folder: Path
    end: Literal[0, 1]

    @property
    def address(self) -> str:
        """The IPv4 address of this end, in a network of 256."""
        return f"10.0.3.{1 + self.end}"

    @property
    def mac(self) -> str:
        """The address of its port."""
        return WIRE_MACS[self.end]

    @property
    def socket(self) -> Path:
        """Where this end takes datagrams."""
        return self.folder / f"end{self.end}"

    @property
    def other(self) -> Wire:
        """The other end."""
        return Wire(self.folder, 0 if self.end else 1)


@dataclass(frozen=True)
class Choices:
    """How a guest is run, whatever machine it is."""

    accelerator: str = "tcg"
    interactive: bool = False
    kernel_words: tuple[str, ...] = ()
    qemu_words: tuple[str, ...] = ()
    qemu: str = ""
    wire: Wire | None = None


def command_line(machine: Machine, files: Files, choices: Choices) -> list[str]:
    """The words that start this machine."""
    return [
        choices.qemu or str(files.layers / "qemu/usr/bin/qemu-system-x86_64"),
        *_firmware(files.layers),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *_processor(choices),
        *_memory(machine),
        *_tables(machine),
        *_kernel(files, choices),
        *_shares(files),
        *_network(files, choices.wire),
        *(word for slot, drive in enumerate(machine.drives, 32) for word in _drive(drive, files, slot)),
        *_cxl(machine),
        *_globals(),
        *choices.qemu_words,
    ]


def _firmware(layers: Path) -> Iterator[str]:
    for folder in ("qemu", "seabios"):
        yield from ("-L", str(layers / "qemu/usr/share" / folder))


def _processor(choices: Choices) -> list[str]:
    if choices.accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host,-hypervisor"]
    return ["-accel", "tcg,thread=multi", "-cpu", "max,-hypervisor"]


def _memory(machine: Machine) -> Iterator[str]:
    total = sum(node.mib for node in machine.nodes)
    cpus = sum(node.cpus for node in machine.nodes)
    windows = "".join(
        f",cxl-fmw.{at}.targets.0=bridge.{at},cxl-fmw.{at}.size={_window_mib(memories)}M"
        for at, memories in enumerate(machine.bridges.values())
    )
    hmat = "on" if machine.paths else "off"
    yield from ("-M", f"q35,cxl={'on' if machine.cxl else 'off'},hmat={hmat}{windows}")
    yield from ("-m", f"{total}M,maxmem={total + _HOTPLUG_MIB}M,slots=8")
    yield from ("-smp", f"{cpus},sockets={cpus},cores=1,threads=1")
    for node in machine.nodes:
        yield from _object("memory-backend-ram", f"memory-{node.id}", size=node.mib << 20)
        initiator = f",initiator={machine.initiator(node)}" if machine.paths else ""
        yield from ("-numa", f"node,nodeid={node.id},memdev=memory-{node.id}{initiator}")
    for port in sorted({memory.port_node for memory in machine.cxl}):
        yield from ("-numa", f"node,nodeid={port}")
    sockets = [node.id for node in machine.nodes for _ in range(node.cpus)]
    for socket, node_id in enumerate(sockets):
        yield from ("-numa", f"cpu,node-id={node_id},socket-id={socket}")


def _tables(machine: Machine) -> Iterator[str]:
    for a, b, value in machine.distances:
        yield from ("-numa", f"dist,src={a},dst={b},val={value}")
    for way in machine.paths:
        which = f"hmat-lb,initiator={way.source},target={way.target},hierarchy=memory"
        yield from ("-numa", f"{which},data-type=access-latency,latency={way.latency_ns}")
        yield from ("-numa", f"{which},data-type=access-bandwidth,bandwidth={way.mb_per_s}M")


def _kernel(files: Files, choices: Choices) -> Iterator[str]:
    words = ("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "memhp_default_state=offline")
    yield from ("-kernel", str(files.layers / "vmlinuz"), "-initrd", str(files.layers / "first.gz"))
    yield from ("-append", " ".join((*words, *choices.kernel_words)))
    yield from ("-chardev", f"file,id=console,path={_escaped(files.run / 'console')}", "-serial", "chardev:console")
    if choices.interactive:
        yield from ("-chardev", "stdio,id=terminal,signal=off", "-serial", "chardev:terminal")


def _shares(files: Files) -> Iterator[str]:
    shares: list[tuple[str, Path, str]] = [
        ("host", Path("/"), ",readonly=on,multidevs=remap"),
        ("guest", files.layers / "guest", ",readonly=on"),
        ("run", files.run, ""),
    ]
    if files.results is not None:
        shares.append(("results", files.results, ""))
    for name, path, more in shares:
        yield from ("-fsdev", f"local,id=share-{name},path={_escaped(path)},security_model=none{more}")
        yield from _device("virtio-9p-pci", fsdev=f"share-{name}", mount_tag=name, bus="pcie.0")


def _network(files: Files, wire: Wire | None) -> Iterator[str]:
    for side in ("host", "guest"):
        yield from ("-qmp", f"unix:{_escaped(files.sockets / side)},server=on,wait=off")
    relay = _escaped(shlex.join([sys.executable, str(RELAY), str(files.sockets / "guest")]))
    yield from ("-netdev", f"user,id=net,restrict=on,guestfwd=tcp:{GUEST_QMP}-cmd:{relay}")
    yield from _device("virtio-net-pci", netdev="net", bus="pcie.0", romfile="", mac=PORT_MAC)
    if wire is not None:
        ends = ((name, _escaped(one.socket)) for name, one in (("local", wire), ("remote", wire.other)))
        places = ",".join(f"{name}.type=unix,{name}.path={path}" for name, path in ends)
        yield from ("-netdev", f"dgram,id=wire,{places}")
        yield from _device("virtio-net-pci", netdev="wire", bus="pcie.0", romfile="", mac=wire.mac)


def _drive(drive: Drive, files: Files, slot: int) -> Iterator[str]:
    name = drive.serial
    yield from _object("throttle-group", f"limits-{name}", limits=limits(drive.mib_per_s << 20, drive.iops))
    file = {"driver": "file", "filename": str(files.image(drive)), "node-name": f"file-{name}", "aio": "threads"}
    yield from _block(file)
    yield from _block(
        {"driver": "throttle", "node-name": f"limit-{name}", "throttle-group": f"limits-{name}", "file": f"file-{name}"}
    )
    below = f"limit-{name}"
    if drive.error_sectors:
        below = f"fault-{name}"
        yield from _block(faulty_node(below, drive.serial, drive.error_sectors))
    yield from _block({"driver": "raw", "node-name": f"top-{name}", "file": below})
    if drive.hotplug:
        yield from _device("pcie-root-port", id=f"port-{name}", bus="pcie.0", chassis=slot, slot=slot)
    yield from _device(**drive_device(drive))


def drive_device(drive: Drive) -> dict[str, Any]:
    """A drive as QEMU's device, at the start and when it is plugged in again.

    `share-rw`: QEMU lets go of the block nodes of a drive that was pulled out some time later.
    """
    name = drive.serial
    bus = f"port-{name}" if drive.hotplug else "pcie.0"
    return {
        "driver": "nvme",
        "id": f"drive-{name}",
        "drive": f"top-{name}",
        "serial": name,
        "bus": bus,
        "share-rw": True,
    }


def limits(bytes_per_s: int, iops: int) -> dict[str, int]:
    """Limits of a drive as QEMU takes them; 0 is none."""
    return {"bps-total": bytes_per_s, "iops-total": iops}


def faulty_node(name: str, serial: str, sectors: Sequence[int]) -> dict[str, Any]:
    """A block node in which reads of these sectors of 512 B fail, for ever."""
    rules = [
        {"event": "none", "iotype": "read", "errno": _IO_ERROR, "sector": sector, "once": False} for sector in sectors
    ]
    return {"driver": "blkdebug", "node-name": name, "image": f"limit-{serial}", "inject-error": rules}


def refusing_node(name: str, serial: str) -> dict[str, Any]:
    """A block node in which the next flush fails; not all, because QEMU itself flushes a node before it changes it."""
    rule = {"event": "none", "iotype": "flush", "errno": _IO_ERROR, "once": True}
    return {"driver": "blkdebug", "node-name": name, "image": f"limit-{serial}", "inject-error": [rule]}


def _cxl(machine: Machine) -> Iterator[str]:
    for at, (name, memories) in enumerate(machine.bridges.items()):
        yield from _device("pxb-cxl", id=f"bridge.{at}", bus="pcie.0", bus_nr=16 * (at + 1))
        yield from _object(
            "acpi-generic-port", f"generic-{name}", **{"pci-bus": f"bridge.{at}", "node": memories[0].port_node}
        )
        for port, memory in enumerate(memories):
            slot = 8 * at + port + 2
            yield from _device("cxl-rp", id=f"port-{memory.name}", bus=f"bridge.{at}", port=port, chassis=0, slot=slot)
            yield from _memory_device(memory)


def _memory_device(memory: Cxl) -> Iterator[str]:
    bytes_of = f"bytes-{memory.name}"
    yield from _object("memory-backend-ram", bytes_of, size=memory.mib << 20, share=True)
    device: dict[str, Any] = {"id": f"cxl-{memory.name}", "bus": f"port-{memory.name}", "sn": memory.serial}
    if memory.persistent:
        yield from _object("memory-backend-ram", f"labels-{memory.name}", size=1 << 20, share=True)
        device |= {"persistent-memdev": bytes_of, "lsa": f"labels-{memory.name}"}
    else:
        device |= {"volatile-memdev": bytes_of}
    yield from _device("cxl-type3", **device)


def _window_mib(memories: Sequence[Cxl]) -> int:
    unit = CXL_UNIT_MIB * len(memories)
    total = sum(memory.mib for memory in memories)
    return max(_WINDOW_MIB, -(-total // unit) * unit)


def _globals() -> Iterator[str]:
    for driver in ("virtio-9p-pci", "virtio-net-pci", "nvme"):
        yield from ("-global", f"{driver}.x-max-bounce-buffer-size={_BOUNCE_NBYTES}")


def _device(driver: str, **values: Any) -> tuple[str, str]:
    return "-device", json.dumps({"driver": driver, **values})


def _object(kind: str, name: str, **values: Any) -> tuple[str, str]:
    return "-object", json.dumps({"qom-type": kind, "id": name, **values})


def _block(node: dict[str, Any]) -> tuple[str, str]:
    return "-blockdev", json.dumps(node)


def _escaped(value: Path | str) -> str:
    """A value as QEMU's comma-separated options take it."""
    return str(value).replace(",", ",,")
