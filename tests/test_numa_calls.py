"""Binding memory to nodes and asking where it lies: on this kernel where it lets us, and on a model of one."""

from __future__ import annotations

import errno
import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numa_rig import PAGE, a_node_of_this_machine, machine, scratch, small
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.numa_mapping import advise, mapped, run_on
from tierloop.devices.errors import ConfigurationError, Misaligned, NoPermission, OutOfMemory, ProtocolError
from tierloop.devices.system import HOST, System
from tierloop.emulators.kernel import ModelKernel


@pytest.fixture(params=["this kernel", "model"])
def system(request: pytest.FixtureRequest) -> System:
    """A kernel whose node 0 may be bound to, and which has no node 7."""
    if request.param == "model":
        return machine("two-sockets-cxl").kernel
    if a_node_of_this_machine() != 0:
        pytest.skip("this process may not use node 0")
    return HOST


MODES = {"bind": 2, "preferred": 1, "interleave": 3, "weighted-interleave": 2}


@pytest.mark.parametrize("mode", numa.MODES)
def test_a_range_gets_the_policy_that_was_asked_for(system: System, mode: numa.Mode) -> None:
    memory, address = scratch(system, 4)
    numa.bind(system, "dram", address, PAGE, mode, [0], [3] if mode == "weighted-interleave" else None)
    number, nodes = numa.policy_of(system, address)
    kernels_own = mode == "weighted-interleave" and number == numa.MPOL_WEIGHTED_INTERLEAVE
    assert number == MODES[mode] or kernels_own
    assert nodes == {0}
    assert numa.policy_of(system, address + PAGE)[0] == numa.MPOL_DEFAULT
    del memory


def test_pages_lie_nowhere_until_they_are_touched(system: System) -> None:
    memory, address = scratch(system, 4)
    numa.bind(system, "dram", address, 4 * PAGE, "bind", [0])
    advise(system, memory, huge=False)
    assert numa.nodes_of(system, address, 4 * PAGE).tolist() == [-errno.ENOENT] * 4
    if not numa.touch(system, "dram", address, 2 * PAGE):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert numa.nodes_of(system, address, 4 * PAGE).tolist() == [0, 0, -errno.ENOENT, -errno.ENOENT]
    assert not memory.any()


def test_more_pages_than_one_call_takes_are_asked_for_in_pieces(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "_PAGES_PER_CALL", 3)
    memory, address = scratch(system, 8)
    advise(system, memory, huge=False)
    numa.touch(system, "dram", address + 2 * PAGE, 5 * PAGE)
    assert (numa.nodes_of(system, address, 8 * PAGE) >= 0).tolist() == [False] * 2 + [True] * 5 + [False]


def test_a_page_that_is_not_mapped_says_so(system: System) -> None:
    with pytest.raises((ProtocolError, OutOfMemory)):
        numa.bind(system, "dram", 1 << 46, PAGE, "bind", [0])
    assert numa.nodes_of(system, 1 << 46, PAGE)[0] in (-errno.EFAULT, -errno.ENOENT)


def test_moving_to_where_pages_are_leaves_them_there(system: System) -> None:
    memory, address = scratch(system, 2)
    memory[:] = 7
    numa.touch(system, "dram", address, 2 * PAGE)
    assert numa.move(system, address, 2 * PAGE, 0).tolist() == [0, 0]
    assert (memory == 7).all()


def test_a_node_that_is_not_there_is_refused_by_the_kernel(system: System) -> None:
    memory, address = scratch(system, 1)
    numa.touch(system, "dram", address, PAGE)
    with pytest.raises(ProtocolError, match=r"dram: bind: \d+ bytes to nodes \[7\]: .*EINVAL"):
        numa.bind(system, "dram", address, PAGE, "bind", [7])
    with pytest.raises(OSError, match=r".") as caught:
        numa.move(system, address, PAGE, 7)
    assert caught.value.errno == errno.ENODEV
    del memory


def test_the_kernel_is_told_one_bit_more_than_the_highest_node_needs(system: System) -> None:
    memory, address = scratch(system, 1)
    mask = np.array([1], dtype=np.uint64)
    arguments = (numa.SYS_MBIND, address, PAGE, numa.MPOL_BIND, mask.ctypes.data)
    with pytest.raises(OSError, match=r".") as caught:
        system.syscall(*arguments, 1, 0)
    assert caught.value.errno == errno.EINVAL
    assert system.syscall(*arguments, 2, 0) == 0
    del memory


def test_ranges_that_are_not_whole_pages_are_refused_before_the_kernel_sees_them(system: System) -> None:
    memory, address = scratch(system, 2)
    for first, nbytes in ((address + 1, PAGE), (address, PAGE - 1), (address, 0)):
        with pytest.raises(Misaligned, match="whole pages"):
            numa.bind(system, "dram", first, nbytes, "bind", [0])
    with pytest.raises(ValueError, match="whole pages"):
        numa.nodes_of(system, address + 8, PAGE)
    del memory


def test_a_process_that_may_bind_is_told_so_and_nothing_has_changed(system: System) -> None:
    assert numa.refusal(system) == ""
    memory, address = scratch(system, 1)
    assert numa.policy_of(system, address) == (numa.MPOL_DEFAULT, frozenset())
    del memory


def test_the_probe_asks_the_call_that_binds_and_not_the_one_that_asks() -> None:  # C3
    container = machine("restricted-cpuset")
    container.memory.forbid("get_mempolicy")
    assert numa.refusal(container.kernel) == ""
    container.memory.forbid("mbind")
    assert "--cap-add SYS_NICE" in numa.refusal(container.kernel)


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSYS, "CONFIG_NUMA"), (errno.EINVAL, "EINVAL")])
def test_the_probe_keeps_apart_what_went_wrong(number: int, says: str) -> None:
    one = machine("laptop")
    one.memory.forbid("mbind", number)
    assert says in numa.refusal(one.kernel)


def test_a_kernel_without_the_call_has_no_permission_to_give() -> None:
    assert "CONFIG_NUMA" in numa.refusal(ModelKernel())


def test_what_a_container_forbids_is_no_permission_and_says_what_to_do() -> None:
    container = machine("restricted-cpuset")
    container.memory.forbid("mbind")
    memory, address = scratch(container.kernel, 1)
    with pytest.raises(NoPermission, match="CAP_SYS_NICE"):
        numa.bind(container.kernel, "dram", address, PAGE, "bind", [1])
    del memory


def test_nodes_past_the_first_word_of_the_mask_are_named_right() -> None:
    nodes = [0, 63, 64, 130, numa.HIGHEST_NODE]
    assert numa.nodes_in(numa.mask_of(nodes)) == nodes


@pytest.mark.parametrize(
    ("mode", "nodes", "weights", "says"),
    [
        ("near", [0], None, "placement = 'near'; allowed: bind, preferred"),
        ("bind", [], None, "at least one"),
        ("bind", [-1], None, r"nodes = \[-1\]"),
        ("bind", [True], None, r"nodes = \[True\]"),
        ("bind", [1024], None, "from 0 to 1023"),
        ("bind", [0, 0], None, "named twice"),
        ("bind", [0], [1], "weights are for"),
        ("weighted-interleave", [0, 1], [1], "one integer from 1 to 255 for each of 2"),
        ("weighted-interleave", [0], [0], "from 1 to 255"),
        ("weighted-interleave", [0], [256], "from 1 to 255"),
    ],
)
def test_policies_that_make_no_sense_are_refused(mode: str, nodes: list[int], weights: list[int], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        numa.check_policy("dram", mode, nodes, weights)


# -- weighted interleaving ------------------------------------------------------------------------------------------


@given(
    pages=st.integers(1, 1 << 18),
    weights=st.lists(st.integers(1, 255), min_size=1, max_size=5),
    page=st.sampled_from([PAGE, 2 << 20]),
)
def test_runs_cover_a_range_in_order_and_keep_to_the_weights(pages: int, weights: list[int], page: int) -> None:
    nodes = list(range(0, 2 * len(weights), 2))
    nbytes = pages * page
    runs = numa.runs(nbytes, nodes, weights, page)
    ends = [offset + length for offset, length, _ in runs]
    assert [offset for offset, _, _ in runs] == [0, *ends[:-1]]
    assert ends[-1] == nbytes
    assert all(offset % page == length % page == 0 for offset, length, _ in runs)
    assert len(runs) <= numa.MOST_RUNS
    shares = [sum(length for _, length, node in runs if node == n) for n in nodes]
    grain = max(page, runs[0][1] // weights[0])
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * sum(weights) - weight * nbytes) < grain * sum(weights) ** 2
        assert nbytes % (grain * sum(weights)) or share * sum(weights) == weight * nbytes


def test_weights_decide_how_many_pages_lie_on_each_node() -> None:
    two = machine("two-sockets-cxl")
    memory, address = scratch(two.kernel, 40)
    numa.bind(two.kernel, "dram", address, 40 * PAGE, "weighted-interleave", [0, 2], [3, 1])
    numa.touch(two.kernel, "dram", address, 40 * PAGE)
    assert numa.nodes_of(two.kernel, address, 40 * PAGE).tolist() == [0, 0, 0, 2] * 10
    del memory


def test_the_kernels_own_weights_are_used_where_they_are_the_ones_asked_for() -> None:
    two = machine("two-sockets-cxl")
    memory, address = scratch(two.kernel, 4)
    numa.bind(two.kernel, "dram", address, 4 * PAGE, "weighted-interleave", [0, 2], [2, 2])
    assert numa.policy_of(two.kernel, address) == (numa.MPOL_WEIGHTED_INTERLEAVE, frozenset({0, 2}))
    numa.bind(two.kernel, "dram", address, 4 * PAGE, "weighted-interleave", [0, 2], [2, 1])
    assert numa.policy_of(two.kernel, address) == (numa.MPOL_BIND, frozenset({0}))
    del memory


def test_a_long_range_is_cut_into_few_mappings() -> None:
    assert len(numa.runs(1 << 40, [0, 1, 2], [5, 3, 1])) <= numa.MOST_RUNS


# -- memory that is mapped ------------------------------------------------------------------------------------------


def test_mapped_memory_is_zeroed_and_outlives_the_first_array(system: System) -> None:
    memory = mapped(system, "dram", 3 * PAGE)
    part = memory[PAGE : PAGE + 10]
    del memory
    gc.collect()
    part[:] = 5
    assert part.tolist() == [5] * 10


def test_memory_is_given_back_with_the_last_array() -> None:
    two = small(n2=3)
    for _ in range(4):
        memory, address = scratch(two.kernel, 3)
        numa.bind(two.kernel, "dram", address, 3 * PAGE, "bind", [2])
        numa.touch(two.kernel, "dram", address, 3 * PAGE)
        assert two.memory.used[2] == 3 * PAGE
        del memory
    assert two.memory.used[2] == 0


def test_pages_that_cannot_be_had_are_out_of_memory() -> None:
    two = small(n2=3)
    memory, address = scratch(two.kernel, 4)
    numa.bind(two.kernel, "dram", address, 4 * PAGE, "bind", [2])
    with pytest.raises(OutOfMemory, match="cannot all be had on the nodes asked for"):
        numa.touch(two.kernel, "dram", address, 4 * PAGE)
    del memory


def test_a_pool_of_huge_pages_that_is_empty_says_what_root_has_to_do(system: System) -> None:
    with pytest.raises(
        OutOfMemory, match="too few huge pages of 1024 MiB are free; 1 more are needed: root raises /sys"
    ):
        mapped(system, "dram", 1 << 30, page=1 << 30)


def test_affinity_is_asked_of_the_system() -> None:
    container = machine("restricted-cpuset")
    run_on(container.kernel, {8, 10})
    run_on(container.kernel, ())
    assert container.memory.bound_to == [{8, 10}]
    with pytest.raises(OSError, match="Invalid"):
        run_on(container.kernel, {0})
    with pytest.raises(OSError, match="no machine has a core"):
        run_on(container.kernel, {1 << 20})
