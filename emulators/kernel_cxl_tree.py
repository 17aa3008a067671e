"""What Linux 6.12 shows below /sys of CXL cards: made from the state of the cards, never stored.

- pci0000:0c is the host bridge; cards stand behind a root port each, with `mem<N>` below them.
- /sys/devices/platform/ACPI0017:00/root0 is the tree of ports: root0 with a decoder for each fixed memory window, port1
  (the host bridge) with a decoder for each region, and an endpoint for each card with the decoders that it has.
- Below the window's decoder stand its regions; below a `ram` region its dax device, while that of a `pmem` region hangs
  on the nvdimm bus.
- /sys/bus/cxl and /sys/bus/dax link to all of them.
- A dax device that kmem has taken is memory (kernel_cxl_memory.py).
"""

from __future__ import annotations

import posixpath
import uuid
from typing import NamedTuple

from tierloop.emulators.kernel import Tree
from tierloop.emulators.kernel_cxl_memory import link, put_memory
from tierloop.firmware_models.cxl_card import CxlCard
from tierloop.firmware_models.cxl_decoders import Decoder

_ROOT = "/sys/devices/platform/ACPI0017:00/root0"
_PORT = f"{_ROOT}/port1"
_BRIDGE = "/sys/devices/pci0000:0c"
_NVDIMM = f"{_ROOT}/nvdimm-bridge0/ndbus0"


class DaxView(NamedTuple):
    """A dax device: which driver has it, and what it looks like as memory."""

    name: str
    mode: str
    align: int
    target_node: int
    online: bool
    movable: bool


class RegionView(NamedTuple):
    """A region; `decoders` are (card, decoder number) by way."""

    number: int
    kind: str
    base: int
    nbytes: int
    granule_nbytes: int
    decoders: tuple[tuple[int, int], ...]
    dax: DaxView


class CxlView(NamedTuple):
    """All that is shown; `windows` are (kind, base, bytes, NUMA node), `disabled` cards have no driver."""

    cards: tuple[CxlCard, ...]
    windows: tuple[tuple[str, int, int, int], ...]
    regions: tuple[RegionView, ...]
    disabled: frozenset[int] = frozenset()


def cxl_tree(base: Tree, view: CxlView) -> Tree:
    """The tree of the machine with its cards."""
    tree = Tree()
    tree.files, tree.links = dict(base.files), dict(base.links)
    tree.folders = {path: set(names) for path, names in base.folders.items()}
    _buses(tree)
    for number, card in enumerate(view.cards):
        if not card.removed:
            _memdev(tree, number, card, number not in view.disabled)
            if number not in view.disabled:
                _endpoint(tree, view, number, card)
    _ports(tree, view)
    for region in view.regions:
        _region(tree, view, region)
    return tree


def _buses(tree: Tree) -> None:
    for name in ("cxl_mem", "cxl_port", "cxl_region", "cxl_pmem", "cxl_nvdimm"):
        _folder(tree, f"/sys/bus/cxl/drivers/{name}")
    for name in ("device_dax", "kmem"):
        _folder(tree, f"/sys/bus/dax/drivers/{name}")
    _folder(tree, "/sys/bus/cxl/devices")
    _folder(tree, "/sys/bus/dax/devices")


def _memdev(tree: Tree, number: int, card: CxlCard, enabled: bool) -> None:
    state, part = card.state, card.part
    pci = f"{_BRIDGE}/0000:0c:{number:02x}.0/0000:{0x0D + number:02x}:00.0"
    for name, text in {"class": "0x050210", "vendor": "0x1e98", "device": "0x0d93", "numa_node": "0"}.items():
        tree.put(f"{pci}/{name}", text)
    _bound(tree, "pci", pci, "cxl_pci")
    at = f"{pci}/mem{number}"
    volatile, persistent = state.partitions
    for name, text in {
        "dev": f"251:{number}",
        "firmware_version": part.firmware,
        "label_storage_size": str(part.lsa_nbytes),
        "numa_node": "0",
        "payload_max": str(part.payload_nbytes),
        "pmem/size": hex(persistent),
        "ram/size": hex(volatile),
        "security/state": "sanitize" if state.erasing else "disabled",
        "serial": hex(part.serial),
    }.items():
        tree.put(f"{at}/{name}", text)
    if enabled:
        _bound(tree, "cxl", at, "cxl_mem")
    else:
        _on_bus(tree, "cxl", at)


def _ports(tree: Tree, view: CxlView) -> None:
    living = [number for number, card in enumerate(view.cards) if not card.removed]
    tree.put(f"{_ROOT}/devtype", "cxl_port")
    tree.put(f"{_ROOT}/modalias", "cxl:t3*")
    tree.put(f"{_ROOT}/decoders_committed", str(len(view.windows)))
    link(tree, f"{_ROOT}/uport", "/sys/devices/platform/ACPI0017:00")
    link(tree, f"{_ROOT}/dport12", _BRIDGE)
    _on_bus(tree, "cxl", _ROOT)
    for number, (kind, base, nbytes, _) in enumerate(view.windows):
        at = f"{_ROOT}/decoder0.{number}"
        _decoder(tree, at, "cxl_decoder_root", base, nbytes, 1, 256, True)
        next_region = f"region{max([region.number for region in view.regions], default=-1) + 1}"
        for name in ("ram", "pmem"):
            tree.put(f"{at}/cap_{name}", str(int(name == kind)))
        tree.put(f"{at}/cap_type2", "0")
        tree.put(f"{at}/cap_type3", "1")
        tree.put(f"{at}/target_list", "12")
        tree.put(f"{at}/qos_class", str(number))
        tree.put(f"{at}/create_{kind}_region", next_region)
    tree.put(f"{_PORT}/devtype", "cxl_port")
    tree.put(f"{_PORT}/modalias", "cxl:t3*")
    tree.put(f"{_PORT}/decoders_committed", str(len(view.regions)))
    link(tree, f"{_PORT}/uport", _BRIDGE)
    link(tree, f"{_PORT}/parent_dport", _BRIDGE)
    for number in living:
        link(tree, f"{_PORT}/dport{number}", f"{_BRIDGE}/0000:0c:{number:02x}.0")
    _bound(tree, "cxl", _PORT, "cxl_port")
    for place in range(max(4, len(view.regions))):
        at = f"{_PORT}/decoder1.{place}"
        region = view.regions[place] if place < len(view.regions) else None
        if region is None:
            _decoder(tree, at, "cxl_decoder_switch", 0, 0, 1, 256, False)
        else:
            ways = len(region.decoders)
            _decoder(tree, at, "cxl_decoder_switch", region.base, region.nbytes, ways, region.granule_nbytes, False)
        tree.put(f"{at}/target_type", "expander")
        tree.put(f"{at}/target_list", ",".join(str(card) for card, _ in region.decoders) if region else "0")
        tree.put(f"{at}/region", f"region{region.number}" if region else "")


def _endpoint(tree: Tree, view: CxlView, number: int, card: CxlCard) -> None:
    at = _endpoint_path(number)
    tree.put(f"{at}/devtype", "cxl_port")
    tree.put(f"{at}/modalias", "cxl:t3*")
    tree.put(f"{at}/decoders_committed", str(len(card.state.decoders.committed)))
    tree.put(f"{at}/CDAT", card.cdat())
    link(tree, f"{at}/uport", f"{_BRIDGE}/0000:0c:{number:02x}.0/0000:{0x0D + number:02x}:00.0/mem{number}")
    link(tree, f"{at}/parent_dport", f"{_BRIDGE}/0000:0c:{number:02x}.0")
    _bound(tree, "cxl", at, "cxl_port")
    for place in range(card.part.decoders):
        committed = card.state.decoders.committed
        decoder = committed[place] if place < len(committed) else None
        _endpoint_decoder(tree, view, number, card, place, decoder)


def _endpoint_decoder(
    tree: Tree, view: CxlView, number: int, card: CxlCard, place: int, decoder: Decoder | None
) -> None:
    at = f"{_endpoint_path(number)}/decoder{number + 2}.{place}"
    if decoder is None:
        _decoder(tree, at, "cxl_decoder_endpoint", 0, 0, 1, 256, False)
        mode, dpa, share = "none", None, 0
    else:
        numbers = (decoder.base, decoder.nbytes, decoder.ways, decoder.granule_nbytes)
        _decoder(tree, at, "cxl_decoder_endpoint", *numbers, decoder.locked)
        mode = "ram" if decoder.dpa < card.state.volatile_nbytes else "pmem"
        dpa, share = decoder.dpa, decoder.nbytes // decoder.ways
    region = next((region for region in view.regions if (number, place) in region.decoders), None)
    tree.put(f"{at}/target_type", "expander")
    tree.put(f"{at}/mode", mode)
    tree.put(f"{at}/dpa_size", f"{share:#018x}")
    tree.put(f"{at}/dpa_resource", hex((1 << 64) - 1 if dpa is None else dpa))
    tree.put(f"{at}/region", f"region{region.number}" if region else "")


def _region(tree: Tree, view: CxlView, region: RegionView) -> None:
    window = next(i for i, window in enumerate(view.windows) if window[0] == region.kind)
    at = f"{_ROOT}/decoder0.{window}/region{region.number}"
    name = f"{region.number}:{region.kind}:{region.base}"
    alive = not any(view.cards[card].removed for card, _ in region.decoders)
    for key, text in {
        "commit": "1",
        "devtype": "cxl_region",
        "interleave_granularity": str(region.granule_nbytes),
        "interleave_ways": str(len(region.decoders)),
        "modalias": "cxl:t6*",
        "mode": region.kind,
        "resource": hex(region.base),
        "size": hex(region.nbytes),
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, name)) if region.kind == "pmem" else "",
    }.items():
        tree.put(f"{at}/{key}", text)
    for way, (card, decoder) in enumerate(region.decoders):
        tree.put(f"{at}/target{way}", f"decoder{card + 2}.{decoder}")
    speed = _region_speed(view, region)
    for access in (0, 1):
        for key, number in zip(
            ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth"), speed, strict=True
        ):
            tree.put(f"{at}/access{access}/{key}", str(number))
    if not alive:
        _on_bus(tree, "cxl", at)
        return
    _bound(tree, "cxl", at, "cxl_region")
    _dax(tree, at, region)
    if region.dax.mode == "system-ram":
        dax = region.dax
        put_memory(tree, dax.target_node, region.base, region.nbytes, dax.online, dax.movable, speed)


def _dax(tree: Tree, region_at: str, region: RegionView) -> None:
    dax = region.dax
    if region.kind == "ram":
        parent = f"{region_at}/dax_region{region.number}"
        tree.put(f"{parent}/devtype", "cxl_dax_region")
        tree.put(f"{parent}/modalias", "cxl:t7*")
        _on_bus(tree, "cxl", parent)
    else:
        _pmem(tree, region_at, region)
        parent = f"{_NVDIMM}/region{region.number}/dax{region.number}.0"
    for key, text in {
        "align": str(dax.align),
        "available_size": "0",
        "id": str(region.number),
        "size": str(region.nbytes),
    }.items():
        tree.put(f"{parent}/dax_region/{key}", text)
    at = f"{parent}/{dax.name}"
    for key, text in {
        "align": str(dax.align),
        "dev": f"252:{region.number}",
        "mapping0/end": hex(region.base + region.nbytes - 1),
        "mapping0/page_offset": "0x0",
        "mapping0/start": hex(region.base),
        "memmap_on_memory": "1",
        "modalias": "dax:t0",
        "numa_node": "0",
        "resource": hex(region.base),
        "size": str(region.nbytes),
        "target_node": str(dax.target_node),
    }.items():
        tree.put(f"{at}/{key}", text)
    driver = {"devdax": "device_dax", "system-ram": "kmem"}.get(dax.mode)
    if driver is None:
        _on_bus(tree, "dax", at)
    else:
        _bound(tree, "dax", at, driver)


def _pmem(tree: Tree, region_at: str, region: RegionView) -> None:
    cxl = f"{region_at}/pmem_region{region.number}"
    tree.put(f"{cxl}/devtype", "cxl_pmem_region")
    _bound(tree, "cxl", cxl, "cxl_pmem_region")
    tree.put(f"{_ROOT}/nvdimm-bridge0/devtype", "cxl_nvdimm_bridge")
    _on_bus(tree, "cxl", f"{_ROOT}/nvdimm-bridge0")
    at = f"{_NVDIMM}/region{region.number}"
    for key, text in {
        "align": str(1 << 24),
        "devtype": "nd_pmem",
        "mappings": str(len(region.decoders)),
        "nstype": "2",
        "numa_node": "0",
        "persistence_domain": "memory_controller",
        "read_only": "0",
        "resource": hex(region.base),
        "size": str(region.nbytes),
        "target_node": str(region.dax.target_node),
    }.items():
        tree.put(f"{at}/{key}", text)
    _on_bus(tree, "nd", at)


def _region_speed(view: CxlView, region: RegionView) -> tuple[int, int, int, int]:
    """(read ns, write ns, read MB/s, write MB/s) from what the cards say of themselves: the slowest, and the sum."""
    links = [view.cards[card].part.link for card, _ in region.decoders]
    ways = len(links)
    latencies = [max(-(-link.idle_ps(write) // 1000) for link in links) for write in (False, True)]
    rates = [min(link.ceiling(write) // 1_000_000 for link in links) * ways for write in (False, True)]
    return latencies[0], latencies[1], rates[0], rates[1]


def _decoder(
    tree: Tree, at: str, devtype: str, base: int, nbytes: int, ways: int, granule_nbytes: int, locked: bool
) -> None:
    for key, text in {
        "devtype": devtype,
        "interleave_granularity": str(granule_nbytes),
        "interleave_ways": str(ways),
        "locked": str(int(locked)),
        "modalias": "cxl:t2*" if devtype == "cxl_decoder_root" else "cxl:t1*",
        "size": hex(nbytes),
        "start": hex(base),
    }.items():
        tree.put(f"{at}/{key}", text)
    _on_bus(tree, "cxl", at)


def _endpoint_path(card: int) -> str:
    return f"{_PORT}/endpoint{card + 2}"


def _on_bus(tree: Tree, bus: str, at: str) -> None:
    name = posixpath.basename(at)
    link(tree, f"/sys/bus/{bus}/devices/{name}", at)
    link(tree, f"{at}/subsystem", f"/sys/bus/{bus}")


def _bound(tree: Tree, bus: str, at: str, driver: str) -> None:
    _on_bus(tree, bus, at)
    link(tree, f"{at}/driver", f"/sys/bus/{bus}/drivers/{driver}")
    link(tree, f"/sys/bus/{bus}/drivers/{driver}/{posixpath.basename(at)}", at)


def _folder(tree: Tree, path: str) -> None:
    tree.put(f"{path}/.", "")
    del tree.files[f"{path}/."]
