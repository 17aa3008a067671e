"""The model of a kernel on a machine with CXL cards: what its /sys says, its mailbox requests, its devdax mappings."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierloop.devices.system import resolved
from tierloop.emulators.kernel import Tree
from tierloop.emulators.kernel_cxl import CxlKernel, RegionPlan, cxl_machine
from tierloop.emulators.kernel_cxl_mapping import address_of
from tierloop.emulators.kernel_cxl_memdev import QUERY, SEND
from tierloop.emulators.kernel_cxl_memory import base_tree
from tierloop.firmware_models.cxl_card import CxlCard
from tierloop.firmware_models.cxl_codes import Code, Op
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart

MIB = 1 << 20
CXL = "/sys/bus/cxl/devices"
DAX = "/sys/bus/dax/devices"
NODES = "/sys/devices/system/node"


def pmem_card(serial: int = 0x22) -> CxlPart:
    """A card whose bytes are persistent."""
    return CxlPart(volatile_nbytes=0, persistent_nbytes=2 * GRAIN, serial=serial)


def pair(granule_nbytes: int = 256, kind: str = "ram") -> CxlKernel:
    """Two cards that make one interleave set."""
    cards = [CxlPart(serial=1), CxlPart(serial=2)] if kind == "ram" else [pmem_card(1), pmem_card(2)]
    plan = RegionPlan((0, 1), "ram" if kind == "ram" else "pmem", granule_nbytes=granule_nbytes)
    return cxl_machine(cards, regions=[plan])


def mapped(kernel: CxlKernel, nbytes: int = 4 * MIB, offset: int = 0, name: str = "dax0.0") -> mmap.mmap:
    """A mapping of a dax device."""
    fd = kernel.open(f"/dev/{name}", os.O_RDWR)
    try:
        return kernel.mmap(fd, nbytes, offset)
    finally:
        kernel.close(fd)


def refused(call: int) -> pytest.RaisesExc[OSError]:
    """An OSError of that errno."""
    return pytest.RaisesExc(OSError, check=lambda error: error.errno == call)


# -- what /sys says


def test_a_card_says_who_it_is_and_what_it_holds() -> None:
    kernel = cxl_machine([CxlPart(serial=0xABC, volatile_nbytes=3 * GRAIN, persistent_nbytes=GRAIN)])
    said = {name: kernel.read_text(f"{CXL}/mem0/{name}") for name in ("serial", "ram/size", "pmem/size", "numa_node")}
    assert said == {"serial": "0xabc", "ram/size": hex(3 * GRAIN), "pmem/size": hex(GRAIN), "numa_node": "0"}
    assert resolved(kernel, f"{CXL}/mem0/driver") == "/sys/bus/cxl/drivers/cxl_mem"
    assert resolved(kernel, f"{CXL}/endpoint2/uport") == resolved(kernel, f"{CXL}/mem0")


def test_a_region_names_its_decoders_and_they_name_it() -> None:
    kernel = pair()
    region = f"{CXL}/region0"
    assert [kernel.read_text(f"{region}/target{way}") for way in (0, 1)] == ["decoder2.0", "decoder3.0"]
    for way in (0, 1):
        decoder = f"{CXL}/{kernel.read_text(f'{region}/target{way}')}"
        assert kernel.read_text(f"{decoder}/region") == "region0"
        assert kernel.read_text(f"{decoder}/interleave_ways") == "2"
        assert int(kernel.read_text(f"{decoder}/dpa_size"), 16) == 2 * GRAIN
        assert kernel.read_text(f"{decoder}/start") == kernel.read_text(f"{region}/resource")
    assert int(kernel.read_text(f"{region}/size"), 16) == 4 * GRAIN
    assert kernel.read_text(f"{CXL}/decoder1.0/target_list") == "0,1"


def test_a_dax_device_hangs_below_its_region() -> None:
    kernel = cxl_machine()
    assert resolved(kernel, f"{DAX}/dax0.0").startswith(resolved(kernel, f"{CXL}/region0") + "/")
    assert kernel.read_text(f"{DAX}/dax0.0/size") == str(2 * GRAIN)
    assert kernel.read_text(f"{DAX}/dax0.0/../dax_region/align") == str(2 * MIB)
    assert resolved(kernel, f"{DAX}/dax0.0/driver") == "/sys/bus/dax/drivers/device_dax"


def test_without_a_region_there_is_a_card_and_no_dax_device() -> None:
    kernel = cxl_machine(mode="memdev")
    assert kernel.listdir(DAX) == []
    assert kernel.read_text(f"{CXL}/decoder2.0/mode") == "none"
    assert kernel.listdir("/dev/cxl") == ["mem0"]


def test_persistent_memory_hangs_on_the_nvdimm_bus() -> None:
    kernel = cxl_machine([pmem_card()])
    assert "/ndbus0/" in resolved(kernel, f"{DAX}/dax0.0")
    assert kernel.read_text(f"{CXL}/region0/mode") == "pmem"
    assert len(kernel.read_text(f"{CXL}/region0/uuid")) == 36


def test_the_tree_is_one_that_reads_back() -> None:
    tree = pair().tree
    again = Tree.of(tree.text())
    assert (again.files, again.links) == (tree.files, tree.links)


def test_every_link_leads_somewhere() -> None:
    tree = cxl_machine([CxlPart(), pmem_card()], mode="system-ram").tree
    known = set(tree.files) | set(tree.folders)
    assert [link for link in tree.links if tree.real(link) not in known] == []


def test_the_tree_follows_the_card() -> None:
    kernel = cxl_machine([CxlPart(volatile_nbytes=GRAIN, partitionable_nbytes=GRAIN)], mode="memdev")
    assert kernel.read_text(f"{CXL}/mem0/ram/size") == hex(GRAIN)
    card = kernel.cards[0]
    card.state.next_volatile = 2 * GRAIN
    card.reset()
    assert kernel.read_text(f"{CXL}/mem0/ram/size") == hex(2 * GRAIN)


# -- as memory of a NUMA node


def test_memory_that_kmem_took_is_a_node_without_cores() -> None:
    kernel = cxl_machine(mode="system-ram")
    node = kernel.read_text(f"{DAX}/dax0.0/target_node")
    assert kernel.read_text(f"{NODES}/node{node}/cpulist") == ""
    assert kernel.read_text(f"{NODES}/online") == f"0-{node}"
    assert f"MemTotal:       {2 * GRAIN >> 10} kB" in kernel.read_text(f"{NODES}/node{node}/meminfo")
    blocks = [name for name in kernel.listdir(f"{NODES}/node{node}") if name.startswith("memory")]
    assert len(blocks) == 2 * GRAIN // int(kernel.read_text("/sys/devices/system/memory/block_size_bytes"), 16)
    assert {kernel.read_text(f"{NODES}/node{node}/{block}/valid_zones") for block in blocks} == {"Movable"}
    assert (
        "dax0.0" not in kernel.listdir("/dev") if "/dev" in kernel.tree.folders else not kernel.nodes.get("/dev/dax0.0")
    )


def test_two_cards_of_one_window_are_one_node() -> None:
    kernel = cxl_machine([CxlPart(serial=1), CxlPart(serial=2)], mode="system-ram")
    assert kernel.read_text(f"{NODES}/online") == "0-1"
    assert f"MemTotal:       {4 * GRAIN >> 10} kB" in kernel.read_text(f"{NODES}/node1/meminfo")
    assert kernel.read_text(f"{NODES}/node1/distance") == "20 10"


def test_a_node_has_the_speed_that_the_card_states() -> None:
    kernel = cxl_machine(mode="system-ram")
    link = kernel.cards[0].part.link
    at = f"{NODES}/node1/access0/initiators"
    assert int(kernel.read_text(f"{at}/read_latency")) == -(-link.idle_ps(False) // 1000)
    assert int(kernel.read_text(f"{at}/read_bandwidth")) == link.ceiling(False) // 10**6
    assert "node0" not in kernel.listdir(at), "Linux names no initiator of such a node"


def test_memory_that_is_not_online_is_no_memory_of_its_node() -> None:
    kernel = cxl_machine(regions=[RegionPlan((0,), mode="system-ram", online=False, movable=False)])
    assert kernel.read_text(f"{NODES}/has_memory") == "0"
    blocks = [name for name in kernel.listdir(f"{NODES}/node1") if name.startswith("memory")]
    assert {kernel.read_text(f"{NODES}/node1/{block}/state") for block in blocks} == {"offline"}


def test_a_machine_with_two_nodes_gets_a_third() -> None:
    base = base_tree()
    base.put(f"{NODES}/node1/cpulist", "4-7")
    base.put(f"{NODES}/online", "0-1")
    kernel = cxl_machine(mode="system-ram", base=base)
    assert kernel.read_text(f"{DAX}/dax0.0/target_node") == "2"
    assert kernel.read_text(f"{NODES}/online") == "0-2"


def test_another_driver_takes_the_device_and_gives_it_back() -> None:
    kernel = cxl_machine()
    fd = kernel.open("/dev/dax0.0", os.O_RDWR)
    kernel.bind(kernel.regions[0], "system-ram")
    with refused(errno.ENODEV):
        kernel.mmap(fd, 2 * MIB)
    with refused(errno.ENOENT):
        kernel.open("/dev/dax0.0", os.O_RDWR)
    kernel.bind(kernel.regions[0], "devdax")
    assert len(mapped(kernel)) == 4 * MIB
    assert "node1" not in kernel.listdir(NODES)


# -- devdax


def test_stores_to_a_mapping_are_in_the_card() -> None:
    kernel = cxl_machine()
    held = mapped(kernel, offset=2 * MIB)
    held[:5] = b"hello"
    assert kernel.cards[0].peek(2 * MIB, 5) == b"hello"
    assert kernel.load(kernel.regions[0].base + 2 * MIB).data[:5] == b"hello"
    kernel.cards[0].poke(2 * MIB, b"J")
    assert held[:5] == b"Jello"


def test_two_mappings_of_one_place_are_one_memory() -> None:
    kernel = cxl_machine()
    one, other = mapped(kernel), mapped(kernel)
    one[100:103] = b"abc"
    assert other[100:103] == b"abc"


@pytest.mark.parametrize("align", [4096, 2 * MIB])
def test_a_mapping_begins_on_its_alignment(align: int) -> None:
    kernel = cxl_machine(regions=[RegionPlan((0,), align=align)])
    held = [mapped(kernel, max(align, 8192)) for _ in range(5)]
    assert [address_of(mapping) % align for mapping in held] == [0] * 5


@pytest.mark.parametrize(
    ("nbytes", "offset"),
    [(4096, 0), (MIB, 0), (3 * MIB, 0), (2 * MIB, 4096), (2 * MIB, 2 * GRAIN), (2 * GRAIN, 2 * MIB)],
)
def test_a_mapping_off_the_grid_is_refused(nbytes: int, offset: int) -> None:
    with refused(errno.EINVAL):
        mapped(cxl_machine(), nbytes, offset)


def test_a_dax_device_is_neither_read_nor_written_and_has_no_size() -> None:
    kernel = cxl_machine()
    fd = kernel.open("/dev/dax0.0", os.O_RDWR)
    with refused(errno.EINVAL):
        kernel.pread(fd, memoryview(bytearray(64)), 0)
    with refused(errno.EINVAL):
        kernel.pwrite(fd, memoryview(bytearray(64)), 0)
    assert (kernel.fstat(fd).kind, kernel.size(fd)) == ("character device", 0)


@pytest.mark.parametrize("granule", [256, 4096, 16384])
def test_granules_of_a_set_lie_on_its_cards_in_turn(granule: int) -> None:
    kernel = pair(granule)
    held = mapped(kernel)
    data = np.random.default_rng(1).integers(0, 256, 2 * MIB, dtype=np.uint8)
    held[: 2 * MIB] = data.tobytes()
    dealt = data.reshape(-1, 2, granule)
    for way, card in enumerate(kernel.cards):
        assert card.peek(0, MIB) == dealt[:, way].tobytes()
    base = kernel.regions[0].base
    assert kernel.load(base + granule + 64).data == data[granule + 64 : granule + 128].tobytes()


@pytest.mark.parametrize("granule", [256, 16384])
def test_a_set_that_is_taken_apart_leaves_its_bytes_on_the_cards(granule: int) -> None:
    kernel = pair(granule)
    mapped(kernel)[3 * 16384 : 3 * 16384 + 600] = bytes(range(200)) * 3
    before = [card.peek(0, MIB) for card in kernel.cards]
    kernel.destroy_region(kernel.regions[0])
    assert [card.peek(0, MIB) for card in kernel.cards] == before
    assert [any(data) for data in before] == [granule == 256, True]


def test_a_window_with_xor_arithmetic_chooses_cards_by_parity() -> None:
    kernel = cxl_machine([CxlPart(serial=1), CxlPart(serial=2)], regions=[RegionPlan((0, 1), arithmetic="xor")])
    held = mapped(kernel)
    for number in range(16):
        held[number * 256] = 1 + number
    by_parity = [[1 + n for n in range(16) if n.bit_count() % 2 == way] for way in (0, 1)]
    assert [[card.peek(turn * 256, 1)[0] for turn in range(8)] for card in kernel.cards] == by_parity
    assert [kernel.load(kernel.regions[0].base + n * 256).data[0] for n in range(16)] == list(range(1, 17))


def test_three_cards_make_a_set() -> None:
    kernel = cxl_machine([CxlPart(serial=n) for n in range(3)], regions=[RegionPlan((2, 0, 1), granule_nbytes=4096)])
    held = mapped(kernel)
    for number in range(6):
        held[number * 4096] = 1 + number
    assert [[card.peek(turn * 4096, 1)[0] for turn in (0, 1)] for card in kernel.cards] == [[2, 5], [3, 6], [1, 4]]
    assert kernel.read_text(f"{CXL}/region0/target0") == "decoder4.0"


def test_a_region_that_one_card_refuses_leaves_nothing_on_the_others() -> None:
    cards = [CxlPart(serial=1), CxlPart(serial=2), CxlPart(serial=3, ways_3_6_12=False)]
    kernel = cxl_machine(cards, mode="memdev")
    with refused(errno.ENXIO):
        kernel.create_region(RegionPlan((0, 1, 2)))
    assert [card.state.decoders.committed for card in kernel.cards] == [[], [], []]
    assert kernel.create_region(RegionPlan((2, 0))).nbytes == 4 * GRAIN


def test_a_card_may_be_larger_than_this_machine() -> None:
    kernel = cxl_machine([CxlPart(volatile_nbytes=4096 * GRAIN)])
    held = mapped(kernel, offset=4095 * GRAIN)
    held[0] = 5
    assert kernel.cards[0].peek(4095 * GRAIN, 1) == b"\5"


def test_a_locked_region_stays_until_a_reset() -> None:
    kernel = cxl_machine(regions=[RegionPlan((0,), locked=True)])
    with refused(errno.EBUSY):
        kernel.destroy_region(kernel.regions[0])
    assert kernel.read_text(f"{CXL}/decoder2.0/locked") == "1"


def test_a_card_without_a_driver_has_no_endpoint() -> None:
    kernel = cxl_machine(mode="memdev")
    kernel.enable_memdev(0, False)
    assert [name for name in kernel.listdir(CXL) if name.startswith("endpoint")] == []
    assert "driver" not in kernel.listdir(f"{CXL}/mem0")
    with refused(errno.ENXIO):
        kernel.create_region(RegionPlan((0,)))
    kernel.enable_memdev(0)
    kernel.create_region(RegionPlan((0,)))
    with refused(errno.EBUSY):
        kernel.enable_memdev(0, False)


def test_persistent_bytes_outlive_the_power_and_volatile_ones_do_not() -> None:
    kernel = cxl_machine([CxlPart(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)])
    mapped(kernel, name="dax0.0")[:3] = b"ram"
    mapped(kernel, name="dax1.0")[:4] = b"pmem"
    kernel.power_cycle()
    assert mapped(kernel, name="dax0.0")[:3] == bytes(3)
    assert mapped(kernel, name="dax1.0")[:4] == b"pmem"


def test_a_persistent_set_keeps_its_bytes_too() -> None:
    kernel = pair(kind="pmem")
    data = bytes(range(256)) * 8
    mapped(kernel)[4096 : 4096 + len(data)] = data
    kernel.power_cycle()
    assert mapped(kernel)[4096 : 4096 + len(data)] == data
    assert kernel.cards[0].state.health.dirty_shutdowns == 1


def test_regions_take_what_is_left_and_no_more() -> None:
    kernel = cxl_machine(mode="memdev")
    first = kernel.create_region(RegionPlan((0,), nbytes=GRAIN))
    second = kernel.create_region(RegionPlan((0,)))
    assert (first.shares[0][2], second.shares[0][2], second.nbytes) == (0, GRAIN, GRAIN)
    with refused(errno.ENOSPC):
        kernel.create_region(RegionPlan((0,), nbytes=GRAIN))
    with refused(errno.EBUSY):
        kernel.destroy_region(first)


# -- lost pages

_TOUCH = """
import ctypes, os, sys
from tierloop.emulators.kernel_cxl import RegionPlan, cxl_machine
from tierloop.emulators.kernel_cxl_mapping import address_of
from tierloop.firmware_models.cxl_part import CxlPart

def touch(what, offset):
    kernel = cxl_machine([CxlPart(), CxlPart(serial=2)], regions=[RegionPlan((0, 1))])
    if what == "before":
        kernel.cards[1].poison(2048 + 64)
    held = kernel.mmap(kernel.open("/dev/dax0.0", os.O_RDWR), 4 << 20)
    if what == "before":
        return ctypes.string_at(address_of(held) + offset, 1)[0]
    held[:3 * 4096] = bytes([7]) * (3 * 4096)
    kernel.cards[1].poison(2048 + 64)
    if what == "heal":
        kernel.cards[1].state.cells.heal(2048 + 64, bytes(64))
    if what == "unplug":
        kernel.unplug(0)
    if what == "unbind":
        kernel.bind(kernel.regions[0], "system-ram")
        kernel.bind(kernel.regions[0], "devdax")
        assert kernel.mmap(kernel.open("/dev/dax0.0", os.O_RDWR), 4 << 20)[0] == 7
    return ctypes.string_at(address_of(held) + offset, 1)[0]

for case in sys.argv[1:]:
    what, offset = case.split(":")
    child = os.fork()
    if child == 0:
        os._exit(touch(what, int(offset)))
    status = os.waitpid(child, 0)[1]
    print(case, os.waitstatus_to_exitcode(status))
"""


def test_a_load_from_a_lost_page_raises_a_real_sigbus() -> None:
    loses = {"poison:4096", "poison:8191", "unplug:0", "unplug:2097152", "unbind:0", "before:4096"}
    keeps = {"poison:4095", "poison:8192", "heal:5000"}  # the byte that was stored is the exit status
    command = [sys.executable, "-c", _TOUCH, *loses, *keeps, "before:8192"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ended = {case: int(status) for case, status in map(str.split, done.stdout.splitlines())}
    assert ended.pop("before:8192") == 0
    assert ended == dict.fromkeys(loses, -signal.SIGBUS) | dict.fromkeys(keeps, 7)


def test_poison_that_came_before_the_mapping_is_in_it() -> None:
    kernel = cxl_machine()
    kernel.cards[0].poison(3 * 4096)
    held = mapped(kernel)
    assert kernel.regions[0].pages.lost == ((3 * 4096, 4 * 4096),)
    assert held[2 * 4096] == 0
    assert kernel.load(kernel.regions[0].base + 3 * 4096).poisoned


def test_a_mapping_that_was_closed_is_left_alone() -> None:
    kernel = cxl_machine()
    held = mapped(kernel)
    address = address_of(held)
    held.close()
    kernel.cards[0].poison(0)
    maps = Path("/proc/self/maps").read_text()
    assert not any(line.startswith(f"{address:x}-") and "memfd:cxl" in line for line in maps.splitlines())


def test_a_card_that_went_by_itself_is_not_mapped_again() -> None:
    kernel = cxl_machine()
    fd = kernel.open("/dev/dax0.0", os.O_RDWR)
    kernel.cards[0].remove()
    with refused(errno.ENXIO):
        kernel.mmap(fd, 2 * MIB)
    with refused(errno.ENXIO):
        send(kernel, 1)


def test_an_unplugged_card_is_gone_from_everywhere() -> None:
    kernel = cxl_machine([CxlPart(), CxlPart(serial=2)])
    fd = kernel.open("/dev/cxl/mem0", os.O_RDWR)
    kernel.unplug(0)
    with refused(errno.ENODEV):
        kernel.ioctl(fd, QUERY, bytearray(8))
    assert "mem0" not in kernel.listdir(CXL)
    assert kernel.listdir(DAX) == ["dax1.0"]
    assert len(mapped(kernel, name="dax1.0")) == 4 * MIB


# -- the mailbox


def send(
    kernel: CxlKernel,
    number: int,
    payload: bytes = b"",
    room: int = 256,
    raw: int = 0,
    flags: int = 0,
    at: int | None = None,
) -> tuple[int, bytes]:
    """Send a command: what the card answered."""
    given, answer = (
        ctypes.create_string_buffer(payload, max(1, len(payload))),
        ctypes.create_string_buffer(max(1, room)),
    )
    place = ctypes.addressof(given) if at is None else at
    word = struct.pack("<IIIIiIQiIQ", number, flags, raw, 0, len(payload), 0, place, room, 0, ctypes.addressof(answer))
    argument = bytearray(word)
    fd = kernel.open("/dev/cxl/mem0", os.O_RDWR)
    kernel.ioctl(fd, SEND, argument)
    kernel.close(fd)
    return struct.unpack_from("<I", argument, 12)[0], answer.raw[: struct.unpack_from("<i", argument, 32)[0]]


def test_the_requests_have_the_numbers_of_linux() -> None:
    assert (QUERY, SEND) == (0x8008CE01, 0xC030CE02)


def test_a_card_identifies_itself() -> None:
    kernel = cxl_machine([CxlPart(volatile_nbytes=3 * GRAIN, persistent_nbytes=GRAIN, firmware="FW 7")])
    code, answer = send(kernel, 1)
    assert (code, len(answer), answer[:16].rstrip(b"\0")) == (0, 0x43, b"FW 7")
    assert struct.unpack_from("<4Q", answer, 16) == (4, 3, 1, 0)


def test_health_is_what_the_back_door_made_it() -> None:
    kernel = cxl_machine()
    kernel.cards[0].state.health.life_used = 33
    kernel.cards[0].state.health.temperature = -4
    _, answer = send(kernel, 7)
    assert (len(answer), answer[3], struct.unpack_from("<h", answer, 4)[0]) == (18, 33, -4)


def test_what_the_card_refuses_is_told_in_the_return_code() -> None:
    kernel = cxl_machine()
    kernel.cards[0].answer_next(Code.RETRY)
    assert send(kernel, 6, struct.pack("<II", 0, 16)) == (Code.RETRY, b"")
    assert send(kernel, 6, struct.pack("<II", 1 << 20, 16)) == (Code.INVALID_INPUT, b"")
    assert send(kernel, 6, struct.pack("<II", 0, 16)) == (Code.SUCCESS, bytes(16))


@pytest.mark.parametrize("number", [0, 15, 16, 17, 19, 20, 99])
def test_poison_is_not_for_programs(number: int) -> None:
    with refused(errno.ENOTTY):
        send(cxl_machine(), number, bytes(16))


@pytest.mark.parametrize(
    ("number", "given", "code"),
    [
        (1, {"payload": b"x"}, errno.ENOMEM),
        (1, {"room": 66}, errno.ENOMEM),
        (1, {"flags": 2}, errno.EINVAL),
        (1, {"raw": 1}, errno.EINVAL),
        (8, {"payload": bytes(4096)}, errno.EINVAL),
        (6, {"payload": bytes(8), "at": 8}, errno.EFAULT),
        (2, {"raw": int(Op.GET_POISON)}, errno.EPERM),
        (13, {}, errno.ENOTTY),
    ],
)
def test_what_linux_refuses_is_refused(number: int, given: dict[str, int], code: int) -> None:
    with refused(code):
        send(cxl_machine(), number, **given)  # type: ignore[arg-type]


def test_the_kernel_keeps_labels_and_partitions_of_a_persistent_card() -> None:
    kernel = cxl_machine([CxlPart(0, GRAIN, GRAIN)])
    for number, payload in ((9, bytes(10)), (10, bytes(16)), (14, b"\0")):
        with refused(errno.EBUSY):
            send(kernel, number, payload)
    assert send(kernel, 13) == (0, b"\1")


def test_a_partition_may_be_asked_for_but_not_at_once() -> None:
    card = CxlCard(CxlPart(GRAIN, 0, GRAIN))
    card.state.partition(2 * GRAIN)
    kernel = cxl_machine([card], mode="memdev")
    with refused(errno.EBUSY):
        send(kernel, 9, struct.pack("<QBx", 1, 1))
    assert send(kernel, 9, struct.pack("<QBx", 1, 0)) == (0, b"")
    assert card.state.next_volatile == GRAIN


def test_raw_commands_pass_where_the_kernel_was_built_for_them() -> None:
    kernel = cxl_machine(raw="checked")
    code, answer = send(kernel, 2, raw=int(Op.IDENTIFY))
    assert (code, len(answer)) == (0, 0x43)
    for op in (Op.INJECT_POISON, Op.SANITIZE, Op.SET_LSA):
        with refused(errno.EPERM):
            send(kernel, 2, bytes(8), raw=int(op))
    kernel = cxl_machine(raw="all")
    assert send(kernel, 2, bytes(8), raw=int(Op.INJECT_POISON)) == (0, b"")
    assert kernel.regions[0].pages.lost == ((0, 4096),)


def test_the_commands_are_listed_with_their_lengths() -> None:
    kernel = cxl_machine([pmem_card()])
    fd = kernel.open("/dev/cxl/mem0", os.O_RDWR)
    count = bytearray(8)
    kernel.ioctl(fd, QUERY, count)
    n = struct.unpack_from("<I", count)[0]
    listed = bytearray(8 + 16 * n)
    struct.pack_into("<I", listed, 0, n)
    kernel.ioctl(fd, QUERY, listed)
    rows = {row[0]: row[1:] for row in struct.iter_unpack("<4I", listed[8:])}
    assert rows[1] == (1, 0, 0x43)
    assert rows[10] == (3, 0xFFFFFFFF, 0)
    assert rows[9][0] == 2  # the kernel keeps it, and this card does not have it
    with refused(errno.EFAULT):
        kernel.ioctl(fd, QUERY, bytearray(struct.pack("<II", 5, 0)))


def test_a_request_of_another_number_is_none() -> None:
    kernel = cxl_machine()
    fd = kernel.open("/dev/cxl/mem0", os.O_RDWR)
    with refused(errno.ENOTTY):
        kernel.ioctl(fd, SEND + 1, bytearray(48))


def test_plans_that_no_machine_can_have_are_refused() -> None:
    kernel = cxl_machine([CxlCard()], mode="memdev")
    for plan in (
        RegionPlan((0, 0)),
        RegionPlan((1,)),
        RegionPlan(()),
        RegionPlan((0,), granule_nbytes=100),
        RegionPlan((0,), align=8192),
        RegionPlan((0,), nbytes=GRAIN + 4096),
    ):
        with pytest.raises(ValueError, match="region"):
            kernel.create_region(plan)
    assert kernel.regions == []
