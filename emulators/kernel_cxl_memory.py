"""What Linux shows below /sys of memory that kmem has made of a dax device, and of a machine's memory before that.

A NUMA node without cores, its blocks, its distances, the tier it is in, and how fast the first node's cores reach it,
in ns and MB/s. Memory that is not online has blocks, but is no memory of its node yet. Devices of one window are one
node.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from tierloop.emulators.kernel import Tree

BLOCK_NBYTES = 128 << 20
_NODES = "/sys/devices/system/node"
_MEMORY = "/sys/devices/system/memory"
_DRAM_LATENCY_NS, _DRAM_MB_PER_S = 80, 200_000
"""What the tree of the rest of the machine says where it says nothing else."""


def base_tree(cores: int = 4, nbytes: int = 2 << 30) -> Tree:
    """The rest of a machine: one NUMA node with cores and memory."""
    tree = Tree()
    last = nbytes // BLOCK_NBYTES - 1
    put_node(tree, 0, f"0-{cores - 1}", range(last + 1), "online", "Normal")
    for name, text in {
        "possible": "0",
        "online": "0",
        "has_cpu": "0",
        "has_memory": "0",
        "has_normal_memory": "0",
    }.items():
        tree.put(f"{_NODES}/{name}", text)
    tree.put(f"{_NODES}/node0/distance", "10")
    tree.put(f"{_MEMORY}/block_size_bytes", f"{BLOCK_NBYTES:x}")
    tree.put(f"{_MEMORY}/auto_online_blocks", "offline")
    _speed(tree, 0, 0, _DRAM_LATENCY_NS, _DRAM_LATENCY_NS, _DRAM_MB_PER_S, _DRAM_MB_PER_S)
    return tree


def put_node(tree: Tree, node: int, cores: str, blocks: range, state: str, zone: str) -> None:
    """A NUMA node and its memory blocks."""
    at = f"{_NODES}/node{node}"
    nbytes = len(blocks) * BLOCK_NBYTES if state == "online" else 0
    tree.put(f"{at}/cpulist", cores)
    tree.put(
        f"{at}/meminfo", f"Node {node} MemTotal:       {nbytes >> 10} kB\nNode {node} MemFree:        {nbytes >> 10} kB"
    )
    for number in blocks:
        block = f"{_MEMORY}/memory{number}"
        tree.put(f"{block}/state", state)
        tree.put(f"{block}/online", str(int(state == "online")))
        tree.put(f"{block}/phys_index", f"{number:08x}")
        tree.put(f"{block}/removable", "1")
        tree.put(f"{block}/valid_zones", zone)
        tree.link(f"{block}/node{node}", f"../../node/node{node}")
        tree.link(f"{at}/memory{number}", f"../../memory/memory{number}")


def put_memory(
    tree: Tree, node: int, base: int, nbytes: int, online: bool, movable: bool, speed: tuple[int, int, int, int]
) -> None:
    """A dax device that kmem has taken: whole blocks of [base, base + nbytes) belong to that node, new or not."""
    first, last = -(-base // BLOCK_NBYTES), (base + nbytes) // BLOCK_NBYTES
    new = f"{_NODES}/node{node}/cpulist" not in tree.files
    state = "online" if online else "offline"
    zone = "Movable" if movable else "Normal"
    earlier = 0 if new else _total_kb(tree, node)
    put_node(tree, node, "", range(first, last), state, zone)
    total = earlier + _total_kb(tree, node)
    tree.put(
        f"{_NODES}/node{node}/meminfo",
        f"Node {node} MemTotal:       {total} kB\nNode {node} MemFree:        {total} kB",
    )
    if not new:
        return
    others = [int(name[4:]) for name in tree.folders[_NODES] if name[4:].isdigit() and name.startswith("node")]
    for other in others:
        place = f"{_NODES}/node{other}/distance"
        row = tree.files.get(place, b"").decode().split()
        tree.put(place, " ".join([*row, "20"]) if other != node else " ".join(["20"] * (len(others) - 1) + ["10"]))
    for name in ("possible", "online", "has_memory") if online else ("possible",):
        _add_to_list(tree, f"{_NODES}/{name}", node)
    _speed(tree, node, None, *speed)
    ns, mb_per_s = speed[0] + speed[1], speed[2] + speed[3]
    tier = 576 * ns // (2 * _DRAM_LATENCY_NS) * 2 * _DRAM_MB_PER_S // max(1, mb_per_s) >> 7
    tree.put(f"/sys/devices/virtual/memory_tiering/memory_tier{tier}/nodelist", str(node))


def link(tree: Tree, path: str, target: str) -> None:
    """A link, relative as they are below /sys: it ends with the target's name, also where it leads upwards."""
    folder, name = posixpath.split(target)
    tree.link(path, posixpath.normpath(posixpath.join(posixpath.relpath(folder, posixpath.dirname(path)), name)))


def _speed(tree: Tree, node: int, initiator: int | None, *speed: int) -> None:
    """How fast a node is; Linux names no initiator where the numbers come from a CXL region."""
    for access in (0, 1):
        at = f"{_NODES}/node{node}/access{access}/initiators"
        names = ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")
        for name, number in zip(names, speed, strict=True):
            tree.put(f"{at}/{name}", str(number))
        if initiator is None:
            continue
        link(tree, f"{at}/node{initiator}", f"{_NODES}/node{initiator}")
        link(tree, f"{_NODES}/node{initiator}/access{access}/targets/node{node}", f"{_NODES}/node{node}")


def _total_kb(tree: Tree, node: int) -> int:
    return int(tree.files[f"{_NODES}/node{node}/meminfo"].split()[3])


def _add_to_list(tree: Tree, path: str, node: int) -> None:
    numbers = {node}
    for piece in tree.files.get(path, b"").decode().strip().split(","):
        first, _, last = piece.partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    tree.put(path, ",".join(_runs(sorted(numbers))))


def _runs(numbers: list[int]) -> Iterator[str]:
    first = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield str(number) if first == place else f"{numbers[first]}-{number}"
            first = place + 1
