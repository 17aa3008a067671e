"""The model of NUMA memory: what it allows, where it puts pages, and that no call can break it."""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numa_rig import PAGE, scratch, small
from tierloop.devices.drivers import numa, numa_mapping
from tierloop.emulators.kernel import ModelKernel


def bind(kernel: ModelKernel, address: int, pages: int, mode: numa.Mode, nodes: list[int]) -> None:
    numa.bind(kernel, "dram", address, pages * PAGE, mode, nodes)


# -- legality: what is allowed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"address": 8}, errno.EINVAL),
        ({"mode": 99}, errno.EINVAL),
        ({"mode": numa.MPOL_BIND | 0x2000}, errno.EINVAL),
        ({"mask": 0}, errno.EINVAL),
        ({"mask": 1 << 3}, errno.EINVAL),
        ({"mode": numa.MPOL_DEFAULT}, errno.EINVAL),
        ({"maxnode": 1}, errno.EINVAL),
        ({"maxnode": 1 << 20}, errno.EINVAL),
        ({"flags": 8}, errno.EINVAL),
        ({"address": 1 << 46}, errno.EFAULT),
        ({"nbytes": -PAGE}, errno.EINVAL),
    ],
)
def test_mbind_refuses_what_linux_refuses(change: dict[str, int], number: int) -> None:
    two = small()
    memory, address = scratch(two.kernel, 1)
    given = {"address": 0, "nbytes": PAGE, "mode": numa.MPOL_BIND, "mask": 1, "maxnode": 65, "flags": 0, **change}
    mask = np.array([given["mask"]], dtype=np.uint64)
    first = given["address"] if given["address"] >= 1 << 40 else address + given["address"]
    with pytest.raises(OSError, match=r".") as caught:
        two.kernel.syscall(
            numa.SYS_MBIND, first, given["nbytes"], given["mode"], mask.ctypes.data, given["maxnode"], given["flags"]
        )
    assert caught.value.errno == number
    assert numa.policy_of(two.kernel, address) == (numa.MPOL_DEFAULT, frozenset())
    del memory


def test_nodes_that_cannot_be_used_are_dropped_without_a_word() -> None:
    two = small(n4=0)
    memory, address = scratch(two.kernel, 1)
    bind(two.kernel, address, 1, "interleave", [2, 3, 4])
    assert numa.policy_of(two.kernel, address)[1] == {2}
    del memory


def test_moving_to_a_node_that_the_process_may_not_use_is_refused() -> None:
    two = small()
    two.memory.nodes[1] = type(two.memory.nodes[1])(1 << 20, allowed=False)
    memory, address = scratch(two.kernel, 1)
    two.memory.touch(address, PAGE)
    with pytest.raises(PermissionError):
        numa.move(two.kernel, address, PAGE, 1)
    del memory


def test_pinned_pages_and_full_nodes_say_so_page_by_page() -> None:
    two = small(n4=1)
    memory, address = scratch(two.kernel, 3)
    two.memory.touch(address, 3 * PAGE)
    two.memory.pin(address, PAGE)
    assert numa.move(two.kernel, address, 3 * PAGE, 4).tolist() == [-errno.EBUSY, 4, -errno.ENOMEM]
    del memory


# -- history: which page was put where ---------------------------------------------------------------------------------


def test_bind_fills_the_first_node_and_then_the_next() -> None:
    two = small(n2=3)
    memory, address = scratch(two.kernel, 5)
    bind(two.kernel, address, 5, "bind", [2, 4])
    numa.touch(two.kernel, "dram", address, 5 * PAGE)
    assert two.memory.pages_at(address, 5 * PAGE) == [2, 2, 2, 4, 4]
    del memory


def test_a_preference_goes_elsewhere_when_the_node_is_full() -> None:
    two = small(n2=3)
    memory, address = scratch(two.kernel, 5)
    bind(two.kernel, address, 5, "preferred", [2])
    numa.touch(two.kernel, "dram", address, 5 * PAGE)
    assert two.memory.pages_at(address, 5 * PAGE) == [2, 2, 2, 0, 0]
    del memory


def test_interleaving_takes_turns() -> None:
    two = small()
    memory, address = scratch(two.kernel, 6)
    bind(two.kernel, address, 6, "interleave", [1, 4])
    numa.touch(two.kernel, "dram", address, 6 * PAGE)
    assert sorted(two.memory.pages_at(address, 2 * PAGE), key=str) == [1, 4]
    assert two.memory.pages_at(address, 6 * PAGE) == two.memory.pages_at(address, 2 * PAGE) * 3
    del memory


def test_a_policy_rules_its_range_and_what_was_touched_before_stays() -> None:
    two = small()
    memory, address = scratch(two.kernel, 4)
    two.memory.touch(address, PAGE)
    bind(two.kernel, address, 3, "bind", [4])
    numa.touch(two.kernel, "dram", address, 4 * PAGE)
    assert two.memory.pages_at(address, 4 * PAGE) == [0, 4, 4, 0]
    del memory


def test_pins_drive_pages_out_of_movable_nodes_and_they_do_not_come_back() -> None:
    two = small()
    memory, address = scratch(two.kernel, 4)
    bind(two.kernel, address, 4, "bind", [2])
    numa.touch(two.kernel, "dram", address, 4 * PAGE)
    two.memory.pin(address + PAGE, 2 * PAGE)
    two.memory.unpin(address + PAGE, 2 * PAGE)
    assert numa.nodes_of(two.kernel, address, 4 * PAGE).tolist() == [2, 0, 0, 2]
    assert (two.memory.used[0], two.memory.used[2]) == (2 * PAGE, 2 * PAGE)
    del memory


def test_stores_of_the_process_count_from_the_first_look_where_the_kernel_cannot_populate() -> None:
    two = small(populates=False)
    memory, address = scratch(two.kernel, 2)
    bind(two.kernel, address, 1, "bind", [4])
    assert numa.touch(two.kernel, "dram", address, 2 * PAGE) is False
    memory[:] = 1
    assert numa.nodes_of(two.kernel, address, 2 * PAGE).tolist() == [4, 0]


# -- no call breaks it ------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([0, 1, 2, 63, 64, 65, PAGE, PAGE - 1, -1, 1 << 46, (1 << 63) - PAGE]),
)
PLACES = st.sampled_from(["mine", "mine + 8", "other", "mask", "answers"])
CALLS = st.sampled_from(
    [
        numa.SYS_MBIND,
        numa.SYS_GET_MEMPOLICY,
        numa.SYS_MOVE_PAGES,
        numa.SYS_MADVISE,
        numa_mapping.SYS_MUNMAP,
        numa_mapping.SYS_SCHED_SETAFFINITY,
    ]
)


@settings(max_examples=120)
@given(st.lists(st.tuples(CALLS, st.lists(st.one_of(VALUES, PLACES), min_size=6, max_size=6)), max_size=12))
def test_no_call_breaks_it_or_moves_the_pages_of_another(calls: list[tuple[int, list[int | str]]]) -> None:
    two = small()
    mine, here = scratch(two.kernel, 4)
    other, there = scratch(two.kernel, 4)
    bind(two.kernel, there, 4, "bind", [4])
    numa.touch(two.kernel, "dram", there, 4 * PAGE)
    other[:] = 9
    with mmap.mmap(-1, PAGE) as buffer:
        seen = ctypes.c_char.from_buffer(buffer)
        mask = ctypes.addressof(seen)
        places = {"mine": here, "mine + 8": here + 8, "other": there, "mask": mask, "answers": mask + 2048}
        for number, values in calls:
            before = two.memory.pages_at(there, 4 * PAGE)
            arguments = [places[value] if isinstance(value, str) else value for value in values]
            if number == numa_mapping.SYS_MUNMAP and arguments[0] == there:
                continue
            writes = number in (numa.SYS_GET_MEMPOLICY, numa.SYS_MOVE_PAGES)
            if writes and any(value in (here, here + 8, there) for value in arguments[:6]):
                arguments = [mask + 2048 if value in (here, here + 8, there) else value for value in arguments]
            with suppress(OSError):
                assert two.kernel.syscall(number, *arguments) >= 0
            assert two.memory.pages_at(there, 4 * PAGE) == before
            assert sum(two.memory.used.values()) % PAGE == 0
        del seen
    assert (other == 9).all()
    del mine
