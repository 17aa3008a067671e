"""This machine as a platform file: `doctor --write-platform`. What is found is written down.

Nothing that has an owner or contents is switched on: drives and dax devices, which their drivers overwrite, stand there
as comments with what is known of them. NUMA nodes with cores become cpu devices, nodes without cores and nodes that
came from CXL become memories of the driver `cxl`, GPUs become gpu devices; everybody reaches what he can map.
"""

from __future__ import annotations

from tierloop.devices.drivers.cxl import cxl_topology
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.drivers.nvme_drives import nvme_drives
from tierloop.devices.errors import NotPresent
from tierloop.devices.system import System
from tierloop.tools.table import amount

_HEAD = """description = "what was found on this machine"
clock = "wall"
host = "{host}"
"""
_COMMENT = """
# Take the marks away if what is on it may be lost.
"""


def platform_text(system: System, gpus: list[str]) -> str:
    """The platform file; `gpus` are the devices that torch sees (cuda:0, …). Raises NotPresent without a node."""
    topology, cxl = numa_topology(system), cxl_topology(system)
    from_cxl = {node.number for node in cxl.nodes}
    usable = [
        number
        for number, node in sorted(topology.nodes.items())
        if node.has_memory and number in topology.allowed_nodes
    ]
    hosts = [number for number in usable if topology.nodes[number].has_cpu and number not in from_cxl]
    cards = [number for number in usable if number not in hosts]
    if not hosts:
        raise NotPresent("doctor", "write", "there is no NUMA node with cores and memory that this process may use")
    memories = [f"cpu{number}" for number in hosts] + [f"cxl{number}" for number in cards]
    parts = [_HEAD.format(host=memories[0])]
    for number in hosts:
        others = [memory for memory in memories if memory != f"cpu{number}"]
        parts.append(_device(f"cpu{number}", {"driver": '"cpu"', "node": str(number)}, others))
    for number in cards:
        parts.append(_device(f"cxl{number}", {"driver": '"cxl"', "node": str(number)}, []))
    for number, gpu in enumerate(gpus):
        reached = [f"cpu{host}" for host in hosts]
        parts.append(_device(f"gpu{number}", {"driver": '"gpu"', "device": f'"{gpu}"'}, reached))
    return "\n".join([*parts, *_owned(system, [f"cpu{host}" for host in hosts])])


def _owned(system: System, hosts: list[str]) -> list[str]:
    """Dax devices and drives, as comments."""
    parts = []
    for dax in cxl_topology(system).daxes:
        if dax.driver == "device_dax":
            what = f"{amount(dax.nbytes or 0)} of CXL memory; name it in the `reaches` of the cpu devices as well"
            parts.append(_marked(what, _device(dax.name.replace(".", "-"), _path("cxl", f"/dev/{dax.name}"), [])))
    for drive in nvme_drives(system):
        for namespace in drive.namespaces:
            path = namespace.generic or namespace.block
            if path is None or namespace.in_use:
                continue
            what = f"{drive.model}, serial {drive.serial}, {amount(namespace.nbytes)}"
            parts.append(_marked(what, _device(namespace.name, _path("nvme", path), hosts)))
    return [_COMMENT.strip(), *parts] if parts else []


def _path(driver: str, path: str) -> dict[str, str]:
    return {"driver": f'"{driver}"', "path": f'"{path}"'}


def _device(name: str, keys: dict[str, str], reaches: list[str]) -> str:
    lines = [f"[devices.{name}]", *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join([*lines, *(f"reaches.{memory} = []" for memory in reaches)]) + "\n"


def _marked(what: str, text: str) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in what)
    return "\n".join(f"# {line}".rstrip() for line in (printable, *text.splitlines())) + "\n"
