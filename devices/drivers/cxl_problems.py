"""What is not usable about CXL hardware: the reason, and the command that would change it.

The commands are those of the cxl, ndctl and daxctl tools, and plain writes to sysfs; all of them need root. They are
shown to people and never run. One sentence per problem, from the memory device towards the program.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierloop.devices.drivers.cxl_parts import Dax, Decoder, Memdev, Node, Problem, Region, Topology
from tierloop.devices.drivers.cxl_steps import CXL, region_command

MEMORY = "/sys/devices/system/memory"
_PORT = {"root": "", "switch": "", "endpoint": "-e "}
"""How cxl enable-port is told which kind of port it is."""


def problems_of(topology: Topology) -> tuple[Problem, ...]:
    """Everything that stands in the way, in the order of the topology's parts."""
    found = [problem for memdev in topology.memdevs for problem in _of_memdev(topology, memdev)]
    found += [
        Problem(port.name, f"the {port.kind} port has no driver", f"cxl enable-port {_PORT[port.kind]}{port.name}")
        for port in topology.ports
        if not port.enabled
    ]
    found += [problem for region in topology.regions for problem in _of_region(topology, region)]
    found += [problem for dax in topology.daxes for problem in _of_dax(topology, dax)]
    found += [problem for node in topology.nodes for problem in _of_node(node)]
    if topology.auto_online not in ("", "offline") and topology.daxes:
        found.append(
            Problem(
                "memory",
                f"the kernel brings new memory online by itself (auto_online_blocks = {topology.auto_online}), so "
                "daxctl cannot choose between movable and not",
                f"echo offline > {MEMORY}/auto_online_blocks",
            )
        )
    return tuple(found)


def _of_memdev(topology: Topology, memdev: Memdev) -> Iterator[Problem]:
    if not memdev.enabled:
        yield Problem(memdev.name, "disabled: no driver is bound to it", f"cxl enable-memdev {memdev.name}")
        return
    if memdev.endpoint is None:
        if any(port.kind == "root" for port in topology.ports):
            reason = "enabled, but no endpoint stands for it: a bridge or switch above it failed (dmesg says why)"
            yield Problem(memdev.name, reason, f"cxl disable-memdev {memdev.name} && cxl enable-memdev {memdev.name}")
        else:
            yield Problem(memdev.name, "enabled, but the platform's root is not there", "modprobe cxl_acpi")
        return
    mine = [decoder for port in topology.ports if port.name == memdev.endpoint for decoder in port.decoders]
    for decoder in mine:
        if decoder.target_type == "accelerator":
            yield Problem(decoder.name, "its type is accelerator: its bytes belong to a device that caches them")
        if decoder.locked and decoder.region is None:
            yield Problem(decoder.name, "locked by firmware and in no region: it stays so until the machine is reset")
    mapped = {decoder.mode for decoder in mine if decoder.region}
    kinds = [kind for kind, nbytes in (("ram", memdev.ram_nbytes), ("pmem", memdev.pmem_nbytes)) if nbytes]
    if not kinds:
        dynamic = f"; {len(memdev.dynamic)} dynamic partitions wait for capacity" if memdev.dynamic else ""
        yield Problem(memdev.name, f"it has no capacity{dynamic}")
    for kind in kinds:
        if kind in mapped:
            continue
        window = next(iter(topology.windows(memdev, kind)), None)
        if window is None:
            where = f" behind {memdev.bridge}" if memdev.bridge else ""
            yield Problem(memdev.name, f"no region, and no window of the platform takes {kind}{where} (see the CEDT)")
        else:
            yield Problem(memdev.name, f"no region maps its {kind}", _create_region(memdev, mine, window, kind))


def _create_region(memdev: Memdev, mine: list[Decoder], window: Decoder, kind: str) -> str:
    """How to make a region of all that a memdev has of one kind."""
    free = next((decoder for decoder in mine if decoder.region is None), None)
    if kind == "ram" and free is not None:
        return region_command(window.name, [(free.name, memdev.ram_nbytes)], window.granule_nbytes or 256)
    return f"cxl create-region -m -t {kind} -d {window.name} -w 1 {memdev.name}"


def _of_region(topology: Topology, region: Region) -> Iterator[Problem]:
    missing = [name for name in region.memdevs if (memdev := topology.memdev(name)) is None or not memdev.enabled]
    if missing:
        disabled = [name for name in missing if topology.memdev(name) is not None]
        yield Problem(
            region.name,
            f"of its interleave set {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not enabled",
            f"cxl enable-memdev {' '.join(disabled)}" if disabled else "",
        )
    if region.committed and region.enabled:
        if not missing and all(dax.region != region.name for dax in topology.daxes):
            yield Problem(
                region.name,
                "enabled, but no dax device shows its memory",
                f"ndctl create-namespace -m devdax -r {region.name}" if region.mode == "pmem" else "modprobe dax_cxl",
            )
    elif region.committed:
        yield Problem(region.name, "committed, but its driver is not bound", f"cxl enable-region {region.name}")
    elif region.ways and len(region.targets) == region.ways and region.nbytes:
        yield Problem(
            region.name, "not committed: its decoders are not programmed", f"echo 1 > {CXL}/{region.name}/commit"
        )
    else:
        yield Problem(
            region.name,
            f"not committed, and not complete: {region.nbytes} bytes, {len(region.targets)} targets for "
            f"{region.ways or 'an unknown number of'} ways",
            f"cxl destroy-region {region.name}, then cxl create-region",
        )


def _of_dax(topology: Topology, dax: Dax) -> Iterator[Problem]:
    if dax.driver is None:
        yield Problem(
            dax.name, "disabled: no driver is bound to it", f"daxctl reconfigure-device --mode=devdax {dax.name}"
        )
    elif dax.mode not in ("devdax", "system-ram"):
        yield Problem(
            dax.name,
            f"its driver is {dax.driver}, which this one does not know",
            f"daxctl reconfigure-device --mode=devdax {dax.name}",
        )
    if not dax.nbytes:
        yield Problem(
            dax.name,
            "it has no size: nothing of its region is given to it" if dax.nbytes == 0 else "its size is not known",
            f"daxctl reconfigure-device --mode=devdax {dax.name}" if dax.nbytes is None else "daxctl create-device",
        )
    if dax.mode == "system-ram" and dax.target_node is None:
        yield Problem(dax.name, "in mode system-ram, and its node is not known")
    region = topology.region(dax.region)
    if region is not None and not region.enabled:
        yield Problem(dax.name, f"its region {region.name} is {region.state}", f"cxl enable-region {region.name}")


def _of_node(node: Node) -> Iterator[Problem]:
    daxes = " ".join(node.daxes)
    name = f"node{node.number}"
    if node.offline:
        yield Problem(name, f"{node.offline} of its memory blocks are offline", f"daxctl online-memory {daxes}")
    if not node.online and not node.offline:
        yield Problem(name, "it has no memory blocks: its range is smaller than one, or off their grid")
    if node.movable:
        yield Problem(
            name,
            f"{node.movable} of its memory blocks are movable: pages that are pinned for DMA are moved off the node",
            f"daxctl offline-memory {daxes} && daxctl online-memory --no-movable {daxes}",
        )


def to_devdax(dax: Dax) -> str:
    """The command that makes a dax device one that can be mapped; from system-ram its pages have to be moved away."""
    force = "-f " if dax.mode == "system-ram" else ""
    return f"daxctl reconfigure-device --mode=devdax {force}{dax.name}"


def to_system_ram(dax: Dax) -> str:
    """The command that makes a dax device a node from which pinned pages are not moved."""
    return f"daxctl reconfigure-device --mode=system-ram --no-movable {dax.name}"
