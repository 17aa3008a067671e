"""Attention over rows that lie on every kind of memory of the guest has the bits of attention over rows in one place.

Each memory holds one run of splits: node 0, the node without processors, CXL memory as a node and as a devdax, and
an NVMe drive, whose rows are copied to node 0 first. All but those are attended where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.attention_case import Case, Float32, Int64, Layout, same_bits
from tests.guest.drives import APPEARS_S, generic_path, sound
from tests.guest.memories import dax_of, interleavable, lone
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Copy, Launch, Read, Write
from tierloop.devices.device import Device
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.system import HOST
from tierloop.tools.guest import cxl_regions
from tierloop.tools.guest.machine import Machine

MIB = 1 << 20
PLACES = ("cpu0", "cpu1", "cxl0", "cxl1", "nvme0")
SPLIT_TOKENS, SPLITS_EACH = 16, 2


@pytest.fixture
def platform(machine: Machine) -> Iterator[Platform]:
    """Node 0 with its cores, the node without, a devdax, a node of CXL memory, a drive."""
    without = [node.id for node in machine.nodes if not node.cpus]
    if not without:
        pytest.skip("this machine has no node without processors")
    alone, several = lone(machine), interleavable(machine)
    dax, lent = dax_of(machine, alone), dax_of(machine, several)
    node = cxl_regions.system_ram(lent)
    site = Site(clock=WallClock(), checker=HazardChecker())
    serial = sound(machine).serial
    devices: dict[str, Device] = {
        "cpu1": open_cpu("cpu1", site, {"capacity": 8 * MIB, "node": without[0], "threads": 1}),
        "cxl0": open_cxl("cxl0", site, {"path": f"/dev/{dax}", "capacity": 4 * MIB}),
        "cxl1": open_cxl("cxl1", site, {"node": node, "capacity": 4 * MIB}),
        "nvme0": open_nvme(
            "nvme0", site, {"path": generic_path(serial, APPEARS_S), "capacity": 4 * MIB, "reaches": ["cpu0"]}
        ),
    }
    near = {"capacity": 16 * MIB, "node": 0, "threads": 1, "reaches": ["cpu1", "cxl0", "cxl1"]}
    devices = {"cpu0": open_cpu("cpu0", site, near), **devices}
    made = Platform("guest", site, devices, "cpu0")
    yield made
    made.close()
    cxl_regions.devdax(lent)


def done(platform: Platform, device: str, command: Command) -> None:
    """Carry one command out."""
    completion = platform.devices[device].submit(command)
    platform.site.clock.run_until(lambda: completion.done, platform.site.clock.now() + 120_000_000_000)
    completion.result()


def stored(platform: Platform, place: str, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Region:
    """A region on a device with these bytes."""
    grid = 4096
    region = platform.devices[place].alloc(-(-data.nbytes // grid) * grid)
    padded = np.zeros(region.nbytes, dtype=np.uint8)
    padded[: data.nbytes] = data
    done(platform, "nvme0" if place == "nvme0" else "cpu0", Write(region.all(), padded))
    return region


def attended(platform: Platform, case: Case, place: Layout, rows: list[Region], roots: Int64) -> Float32:
    """States of the roots, computed by the cores of node 0 where the rows lie."""
    near = platform.devices["cpu0"]
    queries = stored(platform, "cpu0", case.queries.view(np.uint8).reshape(-1))
    shape = (len(roots), case.q_len, case.group, 2 + case.head_dim_v)
    nbytes = 4 * int(np.prod(shape))
    target = near.alloc(nbytes)
    reads = (
        (queries.at(0, case.queries.nbytes),),
        (Segment(rows[0], place.keys[0].spans),),
        (Segment(rows[1], place.values[0].spans),),
    )
    done(platform, "cpu0", Launch(case.attend_args(place.runs, roots), reads, ((target.at(0, nbytes),),)))
    into = np.empty(nbytes, dtype=np.uint8)
    done(platform, "cpu0", Read(target.at(0, nbytes), into))
    return into.view(np.float32).reshape(shape)


def test_rows_on_every_memory_are_attended_to_the_bits_of_rows_in_one(platform: Platform) -> None:
    case = Case(num_kv_heads=2, group=2, tokens=SPLIT_TOKENS * SPLITS_EACH * len(PLACES), split_tokens=SPLIT_TOKENS)
    rows = case.all_rows()
    parts = rows[:, 2] // (SPLIT_TOKENS * SPLITS_EACH)
    states, roots = [], []
    for at, place in enumerate(PLACES):
        mine, others = rows[parts == at], rows[parts != at]
        where = case.layout(mine, "paged")
        regions = []
        for operand in (where.keys, where.values):
            view = operand[0].region.view
            assert view is not None
            region = stored(platform, place, view)
            if place == "nvme0":
                near = platform.devices["cpu0"].alloc(region.nbytes)
                done(platform, "nvme0", Copy(region.all(), near.all()))
                region = near
            regions.append(region)
        cut = case.roots_of(mine, others)
        states.append(attended(platform, case, where, regions, cut))
        roots.append(cut)
        assert_lies(platform, place, regions)
    split = case.output(np.concatenate(states), np.concatenate(roots))
    dense = case.attention(rows)
    assert same_bits(split, dense)
    exact, bound = case.expected(rows)
    assert (np.abs(split - exact) <= bound).all()


def assert_lies(platform: Platform, place: str, regions: list[Region]) -> None:
    """The pages of a place that is a node lie there, and nowhere else."""
    node = {"cpu0": 0, "cpu1": platform.devices["cpu1"].info.numa_node, "cxl1": platform.devices["cxl1"].info.numa_node}
    if node.get(place) is None:
        return
    for region in regions:
        assert region.view is not None
        start = region.view.ctypes.data // numa.PAGE * numa.PAGE
        end = -(-(region.view.ctypes.data + region.nbytes) // numa.PAGE) * numa.PAGE
        found = set(numa.nodes_of(HOST, start, end - start).tolist())
        assert found == {node[place]}, f"{place}: pages lie on {found}"
