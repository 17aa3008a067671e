"""How fast memory behind CXL is said to be: by the options, by the kernel for the whole path, or by the device itself.

The first of these that says anything counts, and the driver says which it was:

1. the options of the platform file;
2. what the kernel has put together for initiators near the region or node (HMAT and CDAT, links and switches included):
   `access0` of the region, else of the node; latencies in ns, rates in MB/s, read as 10⁶ bytes as in a CDAT;
3. the CDAT of the memory devices below the region, without links and switches. Of an interleave set the latency is
   that of the slowest device, and the rate is that of the slowest times the number of ways.

Nothing is measured here, and where nobody says anything it is 0: unknown.
"""

from __future__ import annotations

from tierloop.devices.drivers.cxl_cdat import Rates, parse
from tierloop.devices.drivers.cxl_opening import Backing
from tierloop.devices.drivers.cxl_options import Options
from tierloop.devices.drivers.cxl_parts import Topology
from tierloop.devices.drivers.cxl_steps import CXL
from tierloop.devices.drivers.cxl_sysfs import Folder
from tierloop.devices.drivers.numa_topology import NODES
from tierloop.devices.errors import DeviceError
from tierloop.devices.info import Path
from tierloop.devices.site import Site
from tierloop.devices.system import System, from_os

_MB = 1_000_000


def stated_paths(site: Site) -> dict[str, Path]:
    """How each memory that no node stands for is reached, as its driver states it: what a cpu device falls back on."""
    paths: dict[str, Path] = site.shared.setdefault("stated_paths", {})
    return paths


def rates_of(device: str, options: Options, backing: Backing) -> tuple[Rates, str]:
    """The rates of opened memory, and who says so. What cannot be read is a sentence in `backing.why`."""
    if options.says_rates:
        given = options.read_latency_ns, options.write_latency_ns, options.read_bytes_per_s, options.write_bytes_per_s
        return Rates(*given), "said by the options"
    topology, dax = backing.topology, backing.dax
    region = topology.region(dax.region) if dax is not None else None
    folders = [f"{CXL}/{region.name}/access0"] if region is not None else []
    if backing.node is not None:
        folders.append(f"{NODES}/node{backing.node}/access0/initiators")
    for folder in folders:
        said = _of_kernel(backing.system, folder)
        if any(said):
            return said, f"said by the kernel ({folder}), for the whole path"
    if region is not None:
        said = _of_set(device, backing, topology, region.targets)
        if any(said):
            return said, "said by the CDAT of the memory devices, without links and switches"
    return Rates(), "nobody says"


def _of_kernel(system: System, path: str) -> Rates:
    folder = Folder.at(system, path, [])
    latencies = [folder.number(name) or 0 for name in ("read_latency", "write_latency")]
    rates = [(folder.number(name) or 0) * _MB for name in ("read_bandwidth", "write_bandwidth")]
    return Rates(*latencies, *rates)


def _of_set(device: str, backing: Backing, topology: Topology, targets: tuple[str, ...]) -> Rates:
    """The rates of an interleave set; unknown where one of its devices says nothing."""
    found: list[Rates] = []
    for target in targets:
        decoder = topology.decoder(target)
        if decoder is None or decoder.dpa is None:
            return Rates()
        path = f"{CXL}/{decoder.port}/CDAT"
        try:
            found.append(parse(device, backing.system.read_bytes(path)).rates(decoder.dpa))
        except DeviceError as error:
            backing.why.append(f"{path}: {error}")
            return Rates()
        except OSError as error:
            backing.why.append(str(from_os(device, "cdat", error, path)))
            return Rates()
    if not found:
        return Rates()
    latencies = [max(column) if all(column) else 0 for column in list(zip(*found, strict=True))[:2]]
    rates = [min(column) * len(found) if all(column) else 0 for column in list(zip(*found, strict=True))[2:]]
    return Rates(*latencies, *rates)
