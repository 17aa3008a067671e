"""The cxl driver on the model of a machine with CXL cards: the same bytes of code as on silicon, poison included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from tests.cxl_rig import MIB, PAGE, a_site, pair
from tierloop.devices.commands import Copy, Flush
from tierloop.devices.conformance import Suite
from tierloop.devices.drivers import cache_lines
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.cxl_mailbox import Mailbox
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.errors import MediaError, NoPermission, NotPresent, OutOfMemory, Unsupported
from tierloop.devices.persistent import keeper
from tierloop.devices.placement import Placements
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.emulators.kernel_cxl import CxlKernel, RegionPlan, cxl_machine
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart

DAX = {"path": "/dev/dax0.0", "capacity": 8 * MIB}


def machine(*plans: RegionPlan, cards: Sequence[CxlPart] = (CxlPart(),)) -> CxlKernel:
    """A machine with these regions, whose dax devices are aligned to pages unless their plans say otherwise."""
    return cxl_machine(cards, regions=plans or (RegionPlan((0,), align=PAGE),))


class TestOnACard(Suite):
    """One volatile card, mapped in pieces of 2 MiB."""

    device: ClassVar[str] = "cxl0"
    examples: ClassVar[int] = 10

    def open(self, site: Site) -> Platform:
        return pair(site, DAX, cxl_machine())


class TestOnAnInterleaveSet(Suite):
    """Two cards, 256 bytes on each in turn."""

    device: ClassVar[str] = "cxl0"
    levels: ClassVar[tuple[str, ...]] = ("memory",)

    def open(self, site: Site) -> Platform:
        cards = [CxlPart(serial=1), CxlPart(serial=2)]
        return pair(site, DAX, machine(RegionPlan((0, 1)), cards=cards))


class TestOnANode(Suite):
    """The card's memory as a node, with a model of where pages lie."""

    device: ClassVar[str] = "cxl0"
    levels: ClassVar[tuple[str, ...]] = ("memory",)

    def open(self, site: Site) -> Platform:
        kernel = cxl_machine(mode="system-ram")
        NumaMemory.of(kernel)
        return pair(site, {"node": 1, "capacity": 8 * MIB}, kernel)


site = a_site


def filled(platform: Platform, nbytes: int, value: int) -> Region:
    region = platform.device("cxl0").alloc(nbytes)
    data = np.full(nbytes, value, dtype=np.uint8)
    write_bytes(platform.site.clock, platform.device("cpu0"), region.all(), data)
    return region


def test_what_the_cores_write_is_in_the_card(site: Site) -> None:
    kernel = machine()
    platform = pair(site, DAX, kernel)
    filled(platform, PAGE, 3)
    assert kernel.cards[0].peek(0, 8) == b"\3" * 8
    platform.close()


def test_granules_of_an_interleave_set_are_on_its_cards_in_turn(site: Site) -> None:
    kernel = machine(RegionPlan((0, 1), align=PAGE), cards=[CxlPart(serial=1), CxlPart(serial=2)])
    platform = pair(site, DAX, kernel)
    region = platform.device("cxl0").alloc(1024)
    assert region.view is not None
    region.view[:] = np.repeat([1, 2, 3, 4], 256)
    assert [kernel.cards[card].peek(0, 512)[::256] for card in (0, 1)] == [b"\1\3", b"\2\4"]
    assert platform.device("cxl0").info.notes["interleave"] == "2 ways of 256 B over mem0, mem1"
    platform.close()


def test_a_poisoned_line_ends_the_command_and_spares_its_neighbours(site: Site) -> None:
    kernel = machine()
    platform = pair(site, DAX, kernel)
    cpu = platform.device("cpu0")
    bad, good, host = filled(platform, 2 * PAGE, 3), filled(platform, 2 * PAGE, 4), cpu.alloc(2 * PAGE)
    kernel.cards[0].poison(PAGE + 128)
    with pytest.raises(MediaError, match=rf"cpu0: copy: <region 0 .*: byte {PAGE} is lost"):
        wait(site.clock, cpu.submit(Copy(bad.all(), host.all())))
    wait(site.clock, cpu.submit(Copy(good.all(), host.all())))
    assert (read_bytes(site.clock, cpu, host.all()) == 4).all()
    assert (read_bytes(site.clock, cpu, bad.at(0, PAGE)) == 3).all()
    platform.close()


def test_a_poisoned_line_costs_a_whole_piece_of_the_alignment(site: Site) -> None:
    kernel = cxl_machine()
    platform = pair(site, DAX, kernel)
    cpu, memory = platform.device("cpu0"), platform.device("cxl0")
    first, second = filled(platform, MIB, 3), filled(platform, MIB, 4)
    kernel.cards[0].poison(0)
    with pytest.raises(MediaError):
        read_bytes(site.clock, cpu, first.at(0, 1))
    with pytest.raises(MediaError):
        read_bytes(site.clock, cpu, second.at(0, 1))
    for region in (first, second):
        memory.free(region)
    with pytest.raises(OutOfMemory, match=f"{2 * MIB} are lost"):
        memory.alloc(8 * MIB)
    assert memory.alloc(6 * MIB).view is not None
    platform.close()


def test_a_card_that_is_pulled_out_loses_its_bytes_and_not_the_process(site: Site) -> None:
    kernel = machine()
    platform = pair(site, DAX, kernel)
    region = filled(platform, PAGE, 3)
    kernel.unplug(0)
    with pytest.raises(MediaError):
        read_bytes(site.clock, platform.device("cpu0"), region.all())
    platform.close()


def test_flushed_bytes_of_a_persistent_card_outlive_its_power(site: Site) -> None:
    if cache_lines.instruction() is None:
        pytest.skip("how to write cache lines back is not known on this processor")
    part = CxlPart(volatile_nbytes=0, persistent_nbytes=2 * GRAIN, serial=0x22)
    kernel = machine(RegionPlan((0,), "pmem", align=PAGE), cards=[part])
    platform = pair(site, DAX, kernel)
    cpu, memory = platform.device("cpu0"), platform.device("cxl0")
    memory.alloc(PAGE)
    region = filled(platform, 2 * PAGE, 7)
    wait(site.clock, cpu.submit(Flush(region.all())))
    keeping = keeper(memory)
    assert keeping is not None
    offset = keeping.offset_of(region)
    platform.close()
    kernel.power_cycle()
    again = open_cxl("cxl0", site, DAX, kernel)
    found = again.adopt(offset, 2 * PAGE)
    assert found.view is not None
    assert (found.view == 7).all()
    again.close()


def test_bytes_of_a_node_are_looked_at_and_reported(site: Site) -> None:
    kernel = cxl_machine(mode="system-ram")
    memory = NumaMemory.of(kernel)
    device = open_cxl("cxl0", site, {"serial": kernel.cards[0].part.serial, "capacity": MIB}, kernel)
    region = device.alloc(4 * PAGE)
    assert region.view is not None
    assert memory.pages_at(region.view.ctypes.data, 4 * PAGE) == [1] * 4
    assert Placements.of(site).report()["memories"]["cxl0"]["pages_per_node"] == {"1": 4}
    device.free(region)
    device.close()


def test_the_card_states_its_rates(site: Site) -> None:
    kernel = machine()
    device = open_cxl("cxl0", site, DAX, kernel)
    link = kernel.cards[0].part.link
    assert device.rates.read_latency_ns == -(-link.idle_ps(False) // 1000)
    assert device.rates.read_bytes_per_s == link.ceiling(False) // 1_000_000 * 1_000_000
    device.close()


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("memdev", NotPresent, r"there are: none; mem0: no region maps its ram; to change it: cd /sys/"),
        ("unbound", Unsupported, r"in mode disabled: .*daxctl reconfigure-device --mode=devdax dax0\.0"),
        ("system-ram", Unsupported, r"in mode system-ram: it is node 1 now"),
    ],
)
def test_a_machine_that_is_not_ready_says_what_it_lacks(
    site: Site, mode: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_cxl("cxl0", site, DAX, cxl_machine(mode=mode))  # type: ignore[arg-type]  # one of the modes


def test_its_tree_gives_nothing_to_complain_about() -> None:
    cards = [CxlPart(serial=1, persistent_nbytes=GRAIN), CxlPart(serial=2)]
    topology = cxl_topology(machine(RegionPlan((0, 1)), cards=cards))
    assert topology.complaints == ()
    assert [(one.subject, one.command) for one in topology.problems] == [
        ("mem0", "cxl create-region -m -t pmem -d decoder0.1 -w 1 mem0")
    ]


def test_the_mailbox_of_a_card_answers() -> None:
    kernel = cxl_machine(raw="all")
    box = Mailbox("cxl0", "/dev/cxl/mem0", kernel)
    identity, health = box.identity(), box.health()
    assert identity.capacity == kernel.cards[0].part.volatile_nbytes
    assert (health.media_status, health.replacement_needed) == ("normal", False)
    assert box.poison(0, MIB).records == ()
    kernel.cards[0].poison(4096)
    (record,) = box.poison(0, MIB).records
    assert (record.dpa, record.nbytes, record.source) == (4096, 64, "internal")


def test_a_kernel_without_raw_commands_keeps_the_poison_list_to_itself() -> None:
    with pytest.raises(NoPermission, match="CONFIG_CXL_MEM_RAW_COMMANDS"):
        Mailbox("cxl0", "/dev/cxl/mem0", cxl_machine()).poison(0, MIB)
