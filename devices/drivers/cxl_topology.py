"""What CXL hardware is here, what state each part is in, and what would make it usable.

Between a memory device and bytes that a program can reach stand four things, and each can be missing or not ready:

    memdev   memN         a memory device: enabled when the kernel's driver is bound to it
    region   regionN      addresses that decoders map onto one memdev or an interleave set of several: reset, committed
                          (decoders are programmed) or enabled (its driver is bound)
    dax      daxX.Y       a region's memory as a device: mode devdax (/dev/daxX.Y can be mapped), system-ram (it is a
                          NUMA node), disabled
    node     N            the NUMA node that system-ram became: memory blocks are online or offline, movable or not

`cxl_topology` reads them from sysfs. What is not usable stands in `problems` with the reason and the command that would
fix it, where there is one. Nothing that sysfs says or leaves out makes it fail: what cannot be read or is garbage is
None, and a sentence in `complaints`. Sizes are in bytes. Numbers of devices differ from boot to boot; serials do not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from tierloop.devices.drivers.cxl_parts import Dax, Decoder, Memdev, Node, Port, Region, Topology
from tierloop.devices.drivers.cxl_problems import MEMORY, problems_of
from tierloop.devices.drivers.cxl_steps import CXL
from tierloop.devices.drivers.cxl_sysfs import Folder
from tierloop.devices.drivers.numa_topology import NODES
from tierloop.devices.system import HOST, System

DAX = "/sys/bus/dax/devices"

_REGION = re.compile(r"/(region\d+)/dax_region\d+(?:/|$)")
_BRIDGE = re.compile(r"/(pci[0-9a-f]{4,}:[0-9a-f]{2})/")
_PCI = re.compile(r"/([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/mem\d+$")


def cxl_topology(system: System = HOST) -> Topology:
    """Read everything. Raises nothing: see `Topology.complaints`."""
    complaints: list[str] = []
    names = Folder.at(system, CXL, complaints).names()
    folders = {name: Folder.at(system, f"{CXL}/{name}", complaints) for name in names}
    ports = tuple(
        _port(folder, [folders[d] for d in names if d.startswith(f"decoder{number[0]}.")])
        for name, folder in folders.items()
        if re.fullmatch(r"(root|port|endpoint)\d+", name) and (number := re.findall(r"\d+$", name))
    )
    endpoints = {port.device: port.name for port in ports if port.kind == "endpoint"}
    owner = {d.name: port.device for port in ports if port.kind == "endpoint" for d in port.decoders}
    memdevs = tuple(
        _memdev(folder, endpoints.get(name)) for name, folder in folders.items() if re.fullmatch(r"mem\d+", name)
    )
    regions = tuple(_region(folder, owner) for name, folder in folders.items() if re.fullmatch(r"region\d+", name))
    dax_names = Folder.at(system, DAX, complaints).names("dax")
    daxes = tuple(_dax(Folder.at(system, f"{DAX}/{name}", complaints), regions) for name in dax_names)
    memory = Folder.at(system, MEMORY, complaints)
    found = Topology(
        memdevs,
        ports,
        regions,
        daxes,
        _nodes(system, daxes, memory),
        (memory.text("auto_online_blocks") or "") if daxes else "",
    )
    return replace(found, problems=problems_of(found), complaints=tuple(dict.fromkeys(complaints)))


def _memdev(folder: Folder, endpoint: str | None) -> Memdev:
    address, bridge = _PCI.search(folder.path), _BRIDGE.search(folder.path)
    parts = [name for name in folder.names() if re.fullmatch(r"dynamic_ram_[a-z]|dc\d+", name)]
    return Memdev(
        name=folder.name,
        serial=folder.number("serial"),
        ram_nbytes=folder.number("ram/size") or 0,
        pmem_nbytes=folder.number("pmem/size") or 0,
        numa_node=folder.node("numa_node"),
        firmware=folder.text("firmware_version") or "",
        payload_nbytes=folder.number("payload_max"),
        label_nbytes=folder.number("label_storage_size"),
        enabled=folder.link("driver") is not None,
        bus_address=address[1] if address else None,
        endpoint=endpoint,
        dynamic=tuple((name, folder.number(f"{name}/size") or 0) for name in parts),
        bridge=bridge[1] if bridge else None,
    )


def _port(folder: Folder, decoders: list[Folder]) -> Port:
    name = folder.name
    kind: Literal["root", "switch", "endpoint"] = (
        "root" if name.startswith("root") else "endpoint" if name.startswith("endpoint") else "switch"
    )
    below = [(port[5:], folder.link(port)) for port in folder.names("dport")]
    return Port(
        name,
        kind,
        folder.link("uport"),
        kind == "root" or folder.link("driver") is not None,
        tuple(_decoder(decoder, name, kind) for decoder in decoders),
        tuple((number, device) for number, device in below if device is not None),
    )


def _decoder(folder: Folder, port: str, kind: Literal["root", "switch", "endpoint"]) -> Decoder:
    ram_or_pmem = ("ram", "pmem", "type2", "type3")
    takes = [what for what in ram_or_pmem if kind == "root" and folder.number(f"cap_{what}")]
    targets = folder.text("target_list") if kind != "endpoint" else None
    return Decoder(
        name=folder.name,
        port=port,
        kind=kind,
        start=folder.number("start"),
        nbytes=folder.number("size"),
        ways=folder.number("interleave_ways"),
        granule_nbytes=folder.number("interleave_granularity"),
        target_type=folder.text("target_type") or "",
        locked=folder.text("locked") == "1",
        region=folder.text("region") or None,
        mode=(folder.text("mode") or "") if kind == "endpoint" else "",
        dpa=folder.number("dpa_resource") if kind == "endpoint" else None,
        dpa_nbytes=folder.number("dpa_size") if kind == "endpoint" else None,
        targets=tuple(targets.split(",")) if targets else (),
        takes=frozenset(takes),
    )


def _region(folder: Folder, owner: dict[str, str | None]) -> Region:
    names = [name for name in folder.names("target") if re.fullmatch(r"target\d+", name)]
    targets = tuple(target for name in names if (target := folder.text(name)))
    return Region(
        name=folder.name,
        uuid=folder.text("uuid") or "",
        nbytes=folder.number("size") or 0,
        resource=folder.number("resource"),
        ways=folder.number("interleave_ways"),
        granule_nbytes=folder.number("interleave_granularity"),
        mode=folder.text("mode") or "",
        committed=folder.text("commit") == "1",
        enabled=folder.link("driver") is not None,
        targets=targets,
        memdevs=tuple(owner.get(target) or f"the device of {target}" for target in targets),
    )


def _dax(folder: Folder, regions: tuple[Region, ...]) -> Dax:
    resource = folder.number("resource") or None  # 0 where the process may not see addresses
    above = _REGION.search(folder.path)
    region = next((r for r in regions if above and r.name == above[1]), None)
    if region is None and resource is not None:
        region = next((r for r in regions if r.resource and r.resource <= resource < r.resource + r.nbytes), None)
    align = folder.number("align")
    return Dax(
        name=folder.name,
        nbytes=folder.number("size"),
        align=align if align is not None else folder.number("dax_region/align") or folder.number("../dax_region/align"),
        target_node=folder.node("target_node"),
        numa_node=folder.node("numa_node"),
        resource=resource,
        driver=folder.link("driver"),
        region=region.name if region is not None else None,
        persistent="/ndbus" in folder.path or (region is not None and region.mode == "pmem"),
    )


def _nodes(system: System, daxes: tuple[Dax, ...], memory: Folder) -> tuple[Node, ...]:
    block_nbytes = memory.number("block_size_bytes", 16) if daxes else None
    of_node: dict[int, list[Dax]] = {}
    for dax in daxes:
        if dax.mode == "system-ram" and dax.target_node is not None:
            of_node.setdefault(dax.target_node, []).append(dax)
    return tuple(_node(system, number, there, memory, block_nbytes) for number, there in sorted(of_node.items()))


def _node(system: System, number: int, daxes: list[Dax], memory: Folder, block_nbytes: int | None) -> Node:
    online = offline = movable = 0
    for name in Folder(system, f"{NODES}/node{number}", memory.complaints).names("memory"):
        if not re.fullmatch(r"memory\d+", name) or not _of_dax(int(name[6:]), daxes, block_nbytes):
            continue
        block = memory.below(name)
        if block.text("state") == "online":
            online += 1
            movable += (block.text("valid_zones") or "").split()[:1] == ["Movable"]
        else:
            offline += 1
    return Node(number, tuple(dax.name for dax in daxes), online, offline, movable, block_nbytes)


def _of_dax(block: int, daxes: list[Dax], block_nbytes: int | None) -> bool:
    """Whether a memory block is of these devices; all of a node's are where addresses are hidden."""
    if block_nbytes is None or any(dax.resource is None or dax.nbytes is None for dax in daxes):
        return True
    address = block * block_nbytes
    return any(dax.resource <= address < dax.resource + dax.nbytes for dax in daxes)  # type: ignore[operator]  # above
