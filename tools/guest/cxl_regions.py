"""CXL memories of a guest made into dax devices: by sysfs where the tools of Debian cannot do it (volatile ones).

A region is set up once per boot. `system_ram` and `devdax` change what the memory of one is used as, back and forth.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tierloop.devices.drivers.cxl_parts import Dax, Topology
from tierloop.devices.drivers.cxl_steps import CXL, create_file, region_steps
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.errors import NotPresent, ProtocolError, Timeout
from tierloop.devices.system import HOST
from tierloop.tools.guest.machine import Cxl

_APPEARS_S = 60.0
_TOOL_S = 180.0


def memdev_of(topology: Topology, memory: Cxl) -> str:
    """The name that the kernel gave a memory this time. Raises NotPresent."""
    for memdev in topology.memdevs:
        if memdev.serial == memory.serial:
            return memdev.name
    raise NotPresent("guest", "cxl", f"the kernel shows no memory with the serial number {memory.serial:#x}")


def volatile_region(memories: tuple[Cxl, ...]) -> Dax:
    """All of these memories, interleaved over 256 B, as one devdax. They sit on one bridge.

    The kernel gives a new volatile region to itself (the driver kmem) where it can; it is taken back.

    Raises OSError where the kernel refuses a step, with the file that was written to; NotPresent, Timeout.
    """
    topology = cxl_topology()
    decoders = [_endpoint_decoder(topology, memory) for memory in memories]
    window = window_of(topology, memories[0])
    before = {dax.name for dax in topology.daxes}
    region = (Path(CXL) / create_file(window)).read_text().strip()
    pairs = [(decoder, memory.mib << 20) for decoder, memory in zip(decoders, memories, strict=True)]
    for step in region_steps(window, region, pairs):
        _write(Path(CXL) / step.path, step.value)
    dax = new_dax(before)
    devdax(dax.name)
    return next(one for one in cxl_topology().daxes if one.name == dax.name)


def persistent_region(memory: Cxl) -> Dax:
    """A persistent memory as a dax device. Raises NotPresent, ProtocolError, Timeout."""
    topology = cxl_topology()
    before = {dax.name for dax in topology.daxes}
    window, memdev = window_of(topology, memory), memdev_of(topology, memory)
    call("cxl", "create-region", "-m", "-t", "pmem", "-d", window, "-w", "1", memdev)
    call("ndctl", "create-namespace", "-m", "devdax")
    return new_dax(before)


def system_ram(dax: str) -> int:
    """Let the kernel use a dax device as memory; returns the number of its node."""
    call("daxctl", "reconfigure-device", "--mode=system-ram", dax)
    return int(Path(f"/sys/bus/dax/devices/{dax}/target_node").read_text())


def devdax(dax: str) -> str:
    """Take the memory back from the kernel; returns the path of the device."""
    call("daxctl", "reconfigure-device", "--mode=devdax", "-f", dax)
    return f"/dev/{dax}"


def call(*command: str) -> str:
    """What a tool prints. Raises ProtocolError with what it complains of, Timeout."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except subprocess.TimeoutExpired:
        raise Timeout("guest", command[0], f"{' '.join(command)} did not end within {_TOOL_S:g} s") from None
    if done.returncode:
        raise ProtocolError("guest", command[0], f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    return done.stdout


def window_of(topology: Topology, memory: Cxl) -> str:
    """The root's decoder that leads to a memory. Raises NotPresent."""
    memdev = topology.memdev(memdev_of(topology, memory))
    assert memdev is not None
    kind = "pmem" if memory.persistent else "ram"
    for decoder in topology.windows(memdev, kind):
        return decoder.name
    raise NotPresent("guest", "cxl", f"no window of the platform leads to {memdev.name} and takes {kind}")


def _endpoint_decoder(topology: Topology, memory: Cxl) -> str:
    name = memdev_of(topology, memory)
    for port in topology.ports:
        if port.kind == "endpoint" and port.device == name:
            return port.decoders[0].name
    raise NotPresent("guest", "cxl", f"{name} has no endpoint: the kernel could not enumerate the ports above it")


def new_dax(before: set[str]) -> Dax:
    """The dax device that was not there before, as soon as it has a node. Raises Timeout."""
    deadline = time.monotonic() + _APPEARS_S
    while time.monotonic() < deadline:
        for dax in cxl_topology(HOST).daxes:
            if dax.name not in before and os.path.exists(f"/dev/{dax.name}"):
                return dax
        time.sleep(0.05)
    raise Timeout("guest", "cxl", f"no dax device appeared within {_APPEARS_S:g} s")


def _write(path: Path, value: str | int) -> None:
    try:
        path.write_text(str(value))
    except OSError as error:
        raise OSError(error.errno, f"{value!r} is refused: {error.strerror}", str(path)) from error
