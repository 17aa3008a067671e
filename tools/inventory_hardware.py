"""The hardware half of `doctor`'s inventory: drives, CXL memory, GPUs and nodes of this machine, each with its state.

Everything is read below /sys; nothing is opened but nodes of memory, and nothing is written.
"""

from __future__ import annotations

from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import cxl_topology
from tierloop.devices.drivers.gpu_probe import gpus
from tierloop.devices.drivers.numa_tiering import tiering
from tierloop.devices.drivers.numa_topology import NumaTopology, numa_topology, shown
from tierloop.devices.drivers.nvme_drives import nvme_drives, state_advice
from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.devices.site import Site
from tierloop.devices.system import System
from tierloop.tools.found import Found
from tierloop.tools.table import amount


def cpus_on_nodes(system: System) -> list[Found]:
    """The cpu device on each node with memory: whether it opens there, and what a report about it should not hide."""
    topology = numa_topology(system)
    behind = [f"the kernel may move its pages: {one}" for one in tiering(system)]
    found = []
    for number, node in sorted(topology.nodes.items()):
        name = f"cpu with node = {number}"
        if not node.has_memory:
            found.append(Found(name, "cpu", "real", False, ("the node has no memory",), "cpu"))
            continue
        try:
            open_cpu(name, Site(clock=WallClock()), {"node": number}, system).close()
        except (ConfigurationError, DeviceError) as error:
            found.append(Found(name, "cpu", "real", False, (str(error),), "cpu"))
            continue
        found.append(Found(name, "cpu", "real", True, (*_of_node(topology, number), *behind), "cpu"))
    return found


def _of_node(topology: NumaTopology, number: int) -> list[str]:
    node = topology.nodes[number]
    remarks = []
    cores = topology.cpus_near([number])
    if not node.has_cpu:
        remarks.append(f"it has no cores; those of the nearest node do the work ({shown(cores)})")
    elif cores != node.cpus:
        remarks.append(f"this process may use cores {shown(cores)} of {shown(node.cpus)}")
    if node.movable_nbytes:
        remarks.append("its memory is movable: pages that are pinned for DMA leave it")
    path = topology.path(cores, "cpu", number)
    if path.latency_ns:
        remarks.append(f"the firmware says {path.latency_ns} ns and {path.read_bytes_per_s / 1e9:,.0f} GB/s for reads")
    else:
        remarks.append("the firmware says nothing of its latency and rates (no HMAT)")
    return remarks


def drives(system: System) -> list[Found]:
    """Every namespace of every NVMe controller by the node that the nvme driver would open, and who has it in use."""
    found = []
    for drive in nvme_drives(system):
        what = f"{drive.model or 'unknown model'}, serial {drive.serial or 'unknown'}, firmware {drive.firmware or '?'}"
        advice = state_advice(drive.controller, drive.state)
        if not drive.namespaces:
            found.append(Found(drive.controller, "nvme", "real", False, (what, advice or "no namespace"), "nvme"))
        for namespace in drive.namespaces:
            path = namespace.generic or namespace.block or namespace.name
            reasons = [f"{amount(namespace.nbytes)}; {what}"]
            if namespace.in_use or advice:
                reasons += [reason for reason in (namespace.in_use, advice) if reason]
            else:
                reasons.append(f"overwritten when opened; `tierloop doctor --path {path}` only reads its first block")
            found.append(Found(path, "nvme", "real", not (namespace.in_use or advice), tuple(reasons), "nvme"))
    return found


def cxl_parts(system: System) -> list[Found]:
    """Every form of CXL memory that the cxl driver could open, and what keeps the rest from being one."""
    topology = cxl_topology(system)
    found = []
    for dax in topology.daxes:
        if dax.driver != "device_dax":
            continue
        size = amount(dax.nbytes) if dax.nbytes is not None else "unknown size"
        what = f"{size}, in pieces of {dax.align} bytes; overwritten when opened"
        found.append(Found(f"/dev/{dax.name}", "cxl", "real", dax.nbytes is not None, (what,), "cxl"))
    for node in topology.nodes:
        state = f"memory of {', '.join(node.daxes)}: {node.online} blocks online, {node.offline} offline"
        movable = f", {node.movable} of them movable (pinned pages leave them)" if node.movable else ""
        found.append(Found(f"cxl with node = {node.number}", "cxl", "real", node.online > 0, (state + movable,), "cxl"))
    for problem in topology.problems:
        found.append(Found(problem.subject, "cxl", "real", False, (_told(problem.reason, problem.command),), "cxl"))
    if topology.complaints:
        found.append(Found("/sys/bus/cxl", "cxl", "real", False, topology.complaints, "cxl"))
    return found or [Found("cxl", "cxl", "real", False, ("there is no CXL memory here",), "cxl")]


def gpus_seen() -> list[Found]:
    """Every GPU that torch sees, or one line that says why it sees none; nothing is opened."""
    try:
        seen = gpus()
    except ImportError as error:
        return [Found("gpu", "gpu", "real", False, (str(error),), "gpu")]
    on = ", ".join(part for part in (seen.runtime, seen.driver) if part)
    found = []
    for gpu in seen.found:
        where = f"PCI {gpu.slot.bus_address or 'unknown'}, NUMA node {gpu.slot.numa_node}"
        what = f"{gpu.name}, {amount(gpu.total_nbytes)}, compute capability {gpu.compute_capability}, {where}; {on}"
        found.append(Found(gpu.device, "gpu", "real", True, (what, *seen.reasons), "gpu"))
    return found or [Found("gpu", "gpu", "real", False, seen.reasons, "gpu")]


def _told(reason: str, command: str) -> str:
    return f"{reason}; to change it: {command}" if command else reason
