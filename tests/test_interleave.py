"""Interleave sets: bytes per member, time as the members' links and media allow, capacity, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import DEFINED, LINKS, PROFILES, duration, finish, memory, number, write_machine
from tests.seeded import bytes_of
from tierloop.devices.commands import Copy, Flush, Launch, Read
from tierloop.devices.conformance import Suite
from tierloop.devices.errors import Busy, ConfigurationError, Gone, OutOfMemory, OutOfRange
from tierloop.devices.kernels.contract import Chase, Gather
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.emulators.interleave import InterleavedDevice
from tierloop.emulators.placement import PAGE_NBYTES, Dealt, Filled, Striped
from tierloop.firmware_models.hdm import Interleave

MB = 1_000_000
PAGE = PAGE_NBYTES


def card(name: str) -> str:
    return f'[devices.{name}]\ndriver = "emulated"\nprofile = "cxl.toml"\n'


def link(name: str, ends: tuple[str, str], rate: float) -> str:
    return f'[links.{name}]\nends = ["{ends[0]}", "{ends[1]}"]\nbytes_per_s = {rate}\nlatency_ns = 40\n{DEFINED}\n'


DEVICES = {
    "dram": """[devices.dram]
driver = "emulated"
profile = "dram.toml"
reaches.one = ["one"]
reaches.two = ["two"]
reaches.slow = ["slow"]
""",
    "gpu": """[devices.gpu]
driver = "emulated"
profile = "gpu.toml"
reaches.dram = ["pcie"]
reaches.one = ["pcie", "one"]
reaches.two = ["pcie", "two"]
""",
    "nvme": '[devices.nvme]\ndriver = "emulated"\nprofile = "nvme.toml"\n'
    'reaches.dram = ["half"]\nreaches.one = ["half", "one"]\nreaches.two = ["half", "two"]\n',
    "pnm": '[devices.pnm]\ndriver = "emulated"\nprofile = "pnm.toml"\nreaches.dram = ["half2"]\n',
    "one": card("one"),
    "two": card("two"),
    "slow": '[devices.slow]\ndriver = "emulated"\nprofile = "slow.toml"\n',
}
SLOW = 'kind = "cxl"\nsummary = "a slower card"\n' + memory(1 << 24, 1_000_000_000, 1_000_000_000, 700)
HDM = 'policy = "hdm"\n'


def pool(options: str, members: Sequence[str] = ("one", "two"), name: str = "pool") -> str:
    return f'[devices.{name}]\ndriver = "interleaved"\nmembers = {list(members)}\n{options}'


def open_pool(
    folder: Path,
    *pools: str,
    order: Sequence[str] = tuple(DEVICES),
    profiles: dict[str, str] | None = None,
    last: bool = True,
    change: tuple[str, str] = ("", ""),
    **options: Any,
) -> Platform:
    """A machine with two equal cards (reads 4, writes 2 bytes/ns, 300 ns) and a slow one (1 byte/ns, 700 ns).

    Every card has a link of its own with 8 bytes/ns and 40 ns.
    """
    path = write_machine(folder, (), {"slow": SLOW, **(profiles or {})})
    head = path.read_text().partition("\n[links.")[0]
    links = LINKS.replace('[links.cxl]\nends = ["dram", "cxl"]', '[links.one]\nends = ["dram", "one"]')
    links += link("two", ("dram", "two"), 8e9) + link("slow", ("dram", "slow"), 8e9)
    devices = [DEVICES[name] for name in order]
    devices = [*devices, *pools] if last else [*pools, *devices]
    path.write_text((head + "\n" + "".join(devices) + links).replace(*change))
    return open_platform(path, check_hazards=True, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Platform]:
    with open_pool(tmp_path, pool(HDM)) as platform:
        yield platform


def alloc(platform: Platform, name: str, nbytes: int, phantom: bool = True) -> Region:
    return platform.devices[f"emu:{name}"].alloc(nbytes, phantom=phantom)


def members_of(platform: Platform, name: str = "pool") -> InterleavedDevice:
    device = platform.devices[f"emu:{name}"]
    assert isinstance(device, InterleavedDevice)
    return device


def used(platform: Platform, name: str) -> int:
    """Bytes that are allocated on a member."""
    nbytes: int = platform.devices[f"emu:{name}"]._store.used  # type: ignore[attr-defined]  # the account itself
    return nbytes


def load(platform: Platform, nbytes: int, name: str = "pool") -> int:
    """How long the cores take to copy so many bytes from a memory to their own, latency and overhead left out."""
    near, far = alloc(platform, "dram", nbytes), alloc(platform, name, nbytes)
    took = duration(platform, platform.devices["emu:dram"], Copy(far.all(), near.all()))
    platform.free(near)
    platform.free(far)
    return took - 440 - 1_000


# -- time ---------------------------------------------------------------------------------------------------------


def test_two_equal_cards_stream_at_twice_the_rate_of_one(machine: Platform) -> None:
    assert load(machine, MB, "one") == 250_000
    assert load(machine, 2 * 256 * 2_000) == 256 * 2_000 // 4
    assert members_of(machine).bytes_on == {"emu:one": 512_000, "emu:two": 512_000}


def test_writes_are_as_fast_as_both_members_together(machine: Platform) -> None:
    near, far = alloc(machine, "dram", 512_000), alloc(machine, "pool", 512_000)
    took = duration(machine, machine.devices["emu:dram"], Copy(near.all(), far.all()))
    assert took == 512_000 // 4 + 440 + 1_000


def test_a_link_that_all_members_share_limits_them_together(tmp_path: Path) -> None:
    with open_pool(
        tmp_path,
        pool(HDM),
        change=('reaches.two = ["two"]', 'reaches.two = ["one", "between"]'),
        profiles={},
        overrides={
            "links.between": {"ends": ["one", "two"], "bytes_per_s": 8e9, "latency_ns": 0, "source": "defined: t"}
        },
    ) as machine:
        assert load(machine, 512_000) == 512_000 // 8  # 4 + 4 bytes/ns still fit the first card's link
    with open_pool(
        tmp_path,
        pool(HDM),
        change=('reaches.two = ["two"]', 'reaches.two = ["one", "between"]'),
        overrides={
            "links.between": {"ends": ["one", "two"], "bytes_per_s": 8e9, "latency_ns": 0, "source": "defined: t"},
            "links.one.bytes_per_s": 5e9,
        },
    ) as machine:
        assert load(machine, 512_000) == 512_000 // 5
        assert machine.site.links["one"].bytes_back == 512_000


def test_a_gpu_gets_what_its_own_link_lets_through(machine: Platform) -> None:
    far, target = alloc(machine, "pool", 512_000), alloc(machine, "gpu", 512_000)
    took = duration(machine, machine.devices["emu:gpu"], Copy(far.all(), target.all()), 2)
    assert took == 512_000 // 5 + 300 + 40 + 500 + 200


def test_a_row_touches_one_way(machine: Platform) -> None:
    near, far = alloc(machine, "dram", 256), alloc(machine, "pool", 1 << 20)
    for row in range(4):
        before = dict(members_of(machine).bytes_on)
        took = duration(machine, machine.devices["emu:dram"], Copy(far.at(row * 256, 256), near.all()))
        moved = [members_of(machine).bytes_on[name] - before[name] for name in ("emu:one", "emu:two")]
        assert moved == [[256, 0], [0, 256]][row % 2]
        assert took == 256 // 4 + 440 + 1_000


@pytest.mark.parametrize("weight", range(1, 9))
def test_the_best_weights_are_in_the_ratio_of_the_rates(tmp_path: Path, weight: int) -> None:
    # four times as fast: `weight` of `weight + 1` pages on the fast card; both run at their own rate
    pages = 420 * (weight + 1)
    options = f'policy = "weighted-interleave"\nweights = [{weight}, 1]\n'
    with open_pool(tmp_path, pool(options, ("one", "slow"))) as machine:
        near, far = alloc(machine, "dram", pages * PAGE), alloc(machine, "pool", pages * PAGE)
        took = duration(machine, machine.devices["emu:dram"], Copy(far.all(), near.all())) - 1_000
        fast, slow = 420 * weight * PAGE // 4 + 340, 420 * PAGE + 740
        assert took == max(fast, slow) + 100
        rate = pages * PAGE / max(420 * weight * PAGE / 4, 420 * PAGE)
        assert rate <= 5
        assert (rate == 5) == (weight == 4)


def test_tuned_weights_beat_one_to_one(tmp_path: Path) -> None:
    took = {}
    for options in ('policy = "interleave"\n', 'policy = "weighted-interleave"\nweights = [4, 1]\n'):
        with open_pool(tmp_path, pool(options, ("one", "slow"))) as machine:
            near, far = alloc(machine, "dram", 500 * PAGE), alloc(machine, "pool", 500 * PAGE)
            took[options] = duration(machine, machine.devices["emu:dram"], Copy(far.all(), near.all()))
    assert list(took.values()) == [250 * PAGE + 840 + 1_000, 100 * PAGE + 840 + 1_000]


def test_a_set_shares_its_members_with_others(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, far, single = alloc(machine, "dram", 2 * MB), alloc(machine, "pool", 512_000), alloc(machine, "one", 256_000)
    both = dram.submit(Copy(far.all(), near.at(0, 512_000)), 0)
    alone = dram.submit(Copy(single.all(), near.at(MB, 256_000)), 1)
    # 2 bytes/ns each on the first card, for 128,000 ns; the second card's half is over after 64,000
    assert finish(machine, both, alone) == [128_000 + 1_440, 128_000 + 1_440]


def test_a_load_on_one_member_slows_the_part_that_lies_there(tmp_path: Path) -> None:
    others = '[loads.x]\nmemory = "two"\nbytes_per_s = 2e9\nburst_nbytes = 4000\narrivals = "regular"\n'
    with open_pool(tmp_path, pool(HDM), others) as machine:
        assert load(machine, 512_000) == 256_000 // 2
        assert machine.site.loads["x"].bytes_read >= 256_000 - 4_000


def test_kernels_read_a_set_at_the_rate_of_all_members(machine: Platform) -> None:
    near, far = alloc(machine, "dram", 512_000), alloc(machine, "pool", 512_000)
    command = Launch(Gather(), ((far.all(),),), ((near.all(),),))
    assert duration(machine, machine.devices["emu:dram"], command) == 512_000 // 8 + 340 + 1_000
    assert members_of(machine).bytes_on == {"emu:one": 256_000, "emu:two": 256_000}


def test_between_two_sets_reads_and_writes_are_flows_of_their_own(tmp_path: Path) -> None:
    with open_pool(tmp_path, pool(HDM, ("one", "two")), pool(HDM, ("slow",), "other")) as machine:
        source, target = alloc(machine, "pool", 51_200), alloc(machine, "other", 51_200)
        took = duration(machine, machine.devices["emu:dram"], Copy(source.all(), target.all()))
        assert took == 51_200 + 740 + 1_000
        assert members_of(machine, "other").bytes_on == {"emu:slow": 51_200}
        assert members_of(machine).bytes_on == {"emu:one": 25_600, "emu:two": 25_600}


def test_a_drive_copies_into_a_set(machine: Platform) -> None:
    drive = machine.devices["emu:nvme"]
    source, near, far = (
        alloc(machine, "nvme", 1 << 20),
        alloc(machine, "dram", 1 << 20),
        alloc(machine, "pool", 1 << 20),
    )
    plain = duration(machine, drive, Copy(source.all(), near.all()))
    spread = duration(machine, drive, Copy(source.all(), far.all()))
    # no slower: the card is further away (240 ns), and the last block takes 2,048 ns instead of 820 to reach it
    assert spread == plain + 240 + 2_048 - 820
    assert members_of(machine).bytes_on == {"emu:one": 1 << 19, "emu:two": 1 << 19}


def test_what_waits_for_latency_has_its_lines_on_all_members(tmp_path: Path) -> None:
    cores = PROFILES["dram"] + number("mlp_lines", 11)
    with open_pool(tmp_path, pool(HDM), profiles={"dram": cores}) as machine:
        near, far = alloc(machine, "dram", 1 << 19), alloc(machine, "pool", 1 << 20)
        one = alloc(machine, "one", 1 << 20)
        rows = Spans.equal(np.arange(0, 1 << 20, 512, dtype=np.int64) + np.tile([0, 256], 1024), 256)
        target = near.all()
        dram = machine.devices["emu:dram"]
        spread = duration(machine, dram, Copy(Segment(far, rows), target))
        single = duration(machine, dram, Copy(Segment(one, rows), target))
        # 11 lines of 64 bytes under way in all, 340 ns away, wherever they lie; then the overhead of the command
        assert single == -(-(1 << 19) * 340 // (11 * 64)) + 1_000
        assert abs(spread - single) <= 1


def test_dependent_reads_take_the_latency_of_each_members_line(tmp_path: Path) -> None:
    with open_pool(tmp_path, pool('policy = "interleave"\n', ("one", "slow"))) as machine:
        far, last = alloc(machine, "pool", 8 * PAGE), alloc(machine, "dram", 8)
        lines = Spans.equal(np.array([0, PAGE, 2 * PAGE, 3 * PAGE, 5 * PAGE], dtype=np.int64), 64)
        command = Launch(Chase(), ((Segment(far, lines),),), ((last.all(),),))
        took = duration(machine, machine.devices["emu:dram"], command)
        # two lines on the first card, three on the slow one; the window is known to a thousandth of a byte
        exact = 2 * 340 + 3 * 740 + 1_000
        assert exact <= took <= exact + 1


MEMBERS = ("one", "two", "slow")
POLICIES = [
    HDM,
    'policy = "hdm"\ngranule_nbytes = 1024\narithmetic = "xor"\n',
    'policy = "interleave"\n',
    'policy = "weighted-interleave"\nweights = [4, 3, 1]\n',
    'policy = "preferred"\n',
]


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 100_000)), min_size=1, max_size=4),
    st.sampled_from(["copy", "gather"]),
)
def test_a_command_ends_with_its_last_member(
    tmp_path_factory: pytest.TempPathFactory, policy: str, pieces: list[tuple[int, int]], kind: str
) -> None:
    with open_pool(tmp_path_factory.mktemp("machine"), pool(policy, MEMBERS)) as machine:
        far, single = alloc(machine, "pool", 400_000), Spans(pieces)
        near = alloc(machine, "dram", single.nbytes)
        source = Segment(far, single)
        command = Copy(source, near.all()) if kind == "copy" else Launch(Gather(), ((source,),), ((near.all(),),))
        took = duration(machine, machine.devices["emu:dram"], command) - 1_000
        bytes_on = members_of(machine).bytes_on
        assert sum(bytes_on.values()) == single.nbytes
        paths = zip(bytes_on.values(), (4, 4, 1), (340, 340, 740), strict=True)
        # 4 + 4 + 1 bytes/ns fit the cores' own memory; a copy has its latency as well, a kernel a flow to write to it
        ends = [-(-n // rate) + latency + (100 if kind == "copy" else 0) for n, rate, latency in paths if n]
        written = [] if kind == "copy" else [-(-single.nbytes // 10) + 100]
        assert took == max(ends + written)


def test_a_kernel_that_waits_for_latency_has_its_lines_on_all_members(tmp_path: Path) -> None:
    cores = PROFILES["dram"] + number("mlp_lines", 10)
    with open_pool(tmp_path, pool(HDM, ("one", "slow")), profiles={"dram": cores}) as machine:
        near, far = alloc(machine, "dram", 1 << 18), alloc(machine, "pool", 1 << 19)
        rows = Spans.equal(np.arange(0, 1 << 19, 512, dtype=np.int64) + np.tile([0, 256], 512), 256)
        command = Launch(Gather(), ((Segment(far, rows),),), ((near.all(),),))
        took = duration(machine, machine.devices["emu:dram"], command) - 1_000
        # as many bytes on each, 340 and 740 ns away, 640 bytes under way in all; windows are dealt in thousandths
        exact = (1 << 17) * (340 + 740) // 640
        assert exact <= took <= exact + 2


def test_members_with_curves_give_what_their_curves_allow(tmp_path: Path) -> None:
    curved = (
        'kind = "cxl"\nsummary = "a card with curves"\n[memory]\n'
        + number("capacity", 1 << 24)
        + "[[memory.curves]]\nread_fraction = 1.0\npoints = [[1_000_000_000, 300], [4_000_000_000, 900]]\n"
        + f"{DEFINED}\n"
    )
    cores = PROFILES["dram"] + number("mlp_lines", 10)
    with open_pool(tmp_path, pool(HDM), profiles={"cxl": curved, "dram": cores}) as machine:
        assert load(machine, 512_000) == 512_000 // 8
        near, far = alloc(machine, "dram", 1 << 18), alloc(machine, "pool", 1 << 19)
        rows = Spans.equal(np.arange(0, 1 << 19, 512, dtype=np.int64) + np.tile([0, 256], 512), 256)
        took = duration(machine, machine.devices["emu:dram"], Copy(Segment(far, rows), near.all())) - 1_000
        # 320 bytes under way on each card at 340 ns are less than 1 byte/ns: still the idle latency
        assert took == -(-(1 << 17) * 340 // 320)


def test_a_flush_reaches_the_farthest_member(tmp_path: Path) -> None:
    with open_pool(tmp_path, pool('policy = "interleave"\n', ("one", "slow"))) as machine:
        far = alloc(machine, "pool", PAGE)
        assert duration(machine, machine.devices["emu:dram"], Flush(far.all())) == 740 + 1_000


def test_host_buffers_may_live_in_a_set(tmp_path: Path) -> None:
    mine = ["dram", "one", "two", "pool"]
    with open_pool(tmp_path, pool(HDM), change=('host = "dram"', 'host = "pool"'), only=mine) as machine:
        near = alloc(machine, "dram", 512_000)
        took = duration(machine, machine.devices["emu:dram"], Read(near.all(), np.empty(512_000, dtype=np.uint8)))
        assert took == 512_000 // 4 + 440 + 1_000


def test_a_limit_of_one_command_holds_for_all_its_flows_together(tmp_path: Path) -> None:
    cores = PROFILES["dram"] + number("command_bytes_per_s", 1_000_000_000)
    with open_pool(tmp_path, pool(HDM), profiles={"dram": cores}) as machine:
        assert load(machine, 512_000) == 512_000


def test_estimates_come_true(machine: Platform) -> None:
    dram = machine.devices["emu:dram"]
    near, far = alloc(machine, "dram", MB), alloc(machine, "pool", MB)
    command = Copy(far.at(100, 700_001), near.at(0, 700_001))
    foreseen = dram.estimate(command)
    assert members_of(machine).bytes_on == {"emu:one": 0, "emu:two": 0}
    assert duration(machine, dram, command) == foreseen.duration_ns


def test_the_path_to_a_set_says_what_a_stream_gets(tmp_path: Path) -> None:
    weighted = pool('policy = "weighted-interleave"\nweights = [3, 1]\n', ("one", "slow"), "weighted")
    preferred = pool('policy = "preferred"\n', ("slow", "one"), "preferred")
    with open_pool(tmp_path, pool(HDM), weighted, preferred) as machine:
        cores, _, copy, _ = (*machine.devices["emu:dram"].info.executors, *machine.devices["emu:gpu"].info.executors)
        paths = {path.memory: path for path in cores.paths}
        assert (paths["emu:pool"].read_bytes_per_s, paths["emu:pool"].latency_ns) == (8 * 10**9, 340)
        assert (paths["emu:weighted"].read_bytes_per_s, paths["emu:weighted"].latency_ns) == (4 * 10**9, 740)
        assert paths["emu:preferred"].read_bytes_per_s == 10**9
        mine = copy.path("emu:pool")
        assert mine is not None
        assert mine.read_bytes_per_s == 5 * 10**9
        assert copy.path("emu:weighted") is None  # the GPU does not reach the slow card


# -- where bytes are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "members", "regions", "expected"),
    [
        ('policy = "interleave"\n', ("one", "two", "slow"), [5, 1, 3], [3, 3, 3]),
        ('policy = "weighted-interleave"\nweights = [3, 1]\n', ("one", "slow"), [2, 3, 5], [8, 2]),
        ('policy = "weighted-interleave"\nweights = [1, 2, 4]\n', ("one", "two", "slow"), [7, 6], [2, 4, 7]),
        ('policy = "bind"\n', ("two",), [5, 4], [9]),
        ('policy = "preferred"\n', ("two", "one"), [5, 4], [9, 0]),
        (HDM, ("one", "two"), [4, 4], [4, 4]),
        ('policy = "hdm"\ngranule_nbytes = 4096\narithmetic = "xor"\n', ("one", "two"), [6, 4], [5, 5]),
    ],
)
def test_pages_lie_where_the_policy_says(
    tmp_path: Path, options: str, members: tuple[str, ...], regions: list[int], expected: list[int]
) -> None:
    with open_pool(tmp_path, pool(options, members)) as machine:
        near = alloc(machine, "dram", 1 << 20)
        made = [alloc(machine, "pool", pages * PAGE) for pages in regions]
        for region in made:
            duration(machine, machine.devices["emu:dram"], Copy(region.all(), near.at(0, region.nbytes)))
        pages = [members_of(machine).bytes_on[f"emu:{name}"] // PAGE for name in members]
        assert pages == expected
        assert [used(machine, name) // PAGE for name in members] == expected


def test_preferred_goes_on_to_the_next_member_when_the_first_is_full(tmp_path: Path) -> None:
    with open_pool(tmp_path, pool('policy = "preferred"\n'), overrides={"devices.one.capacity": 10 * PAGE}) as machine:
        taken = alloc(machine, "one", 3 * PAGE)
        first = alloc(machine, "pool", 12 * PAGE)
        assert (used(machine, "one"), used(machine, "two")) == (10 * PAGE, 5 * PAGE)
        near = alloc(machine, "dram", 12 * PAGE)
        duration(machine, machine.devices["emu:dram"], Copy(first.at(6 * PAGE, 2 * PAGE), near.at(0, 2 * PAGE)))
        assert members_of(machine).bytes_on == {"emu:one": PAGE, "emu:two": PAGE}
        machine.free(taken)
        second = alloc(machine, "pool", 4 * PAGE)
        assert (used(machine, "one"), used(machine, "two")) == (10 * PAGE, 6 * PAGE)
        machine.free(first)
        machine.free(second)
        assert (used(machine, "one"), used(machine, "two")) == (0, 0)


def test_a_member_that_is_full_refuses_and_nothing_is_kept(tmp_path: Path) -> None:
    with open_pool(tmp_path, pool('policy = "interleave"\n'), overrides={"devices.two.capacity": 10 * PAGE}) as machine:
        taken = alloc(machine, "two", 8 * PAGE)
        with pytest.raises(OutOfMemory, match=r"emu:pool: alloc: 24576 bytes: emu:two: alloc"):
            alloc(machine, "pool", 6 * PAGE)
        assert (used(machine, "one"), used(machine, "two")) == (0, 8 * PAGE)
        fits = alloc(machine, "pool", 4 * PAGE)
        machine.free(taken)
        machine.free(fits)
        assert machine.devices["emu:pool"].info.memories[0].capacity == 20 * PAGE
        machine.free(alloc(machine, "pool", 20 * PAGE))
        with pytest.raises(OutOfMemory, match="81921 bytes"):
            alloc(machine, "pool", 20 * PAGE + 1)


def test_what_the_set_holds_the_members_do_not_have(machine: Platform) -> None:
    region = alloc(machine, "pool", 1 << 24)
    with pytest.raises(OutOfMemory):
        alloc(machine, "one", (1 << 23) + 1)
    single = alloc(machine, "one", 1 << 23)
    machine.free(single)
    machine.free(region)
    machine.free(alloc(machine, "one", 1 << 24))


def test_bytes_come_back_as_they_were_written(machine: Platform) -> None:
    region = alloc(machine, "pool", 100_000, phantom=False)
    dram = machine.devices["emu:dram"]
    data = bytes_of(3, 90_001)
    write_bytes(machine.clock, dram, region.at(777, 90_001), data)
    assert np.array_equal(read_bytes(machine.clock, dram, region.at(777, 90_001)), data)
    assert not read_bytes(machine.clock, dram, region.at(0, 777)).any()


@given(st.permutations([*DEVICES, "pool"]))
def test_the_order_of_devices_does_not_matter(tmp_path_factory: pytest.TempPathFactory, order: list[str]) -> None:
    folder = tmp_path_factory.mktemp("machine")
    at = order.index("pool")
    path = write_machine(folder, (), {"slow": SLOW})
    with open_pool(folder, pool(HDM)) as machine:
        expected = (load(machine, 700_000), machine.devices["emu:pool"].info)
    text = path.read_text()
    start, end = text.index("[devices."), text.index("\n[links.")
    tables = {**DEVICES, "pool": pool(HDM)}
    path.write_text(text[:start] + "".join(tables[name] for name in order) + text[end:])
    with open_platform(path) as machine:
        assert list(machine.devices).index("emu:pool") == at
        assert (load(machine, 700_000), machine.devices["emu:pool"].info) == expected


spans = st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 200_000)), max_size=5)


def slowly(pages: Sequence[int], members: int, array: np.ndarray) -> list[int]:
    """Bytes per member, where `pages` says on which member each page lies."""
    counts = [0] * members
    for offset, nbytes in array.tolist():
        for page in range(len(pages)):
            low, high = max(offset, page * PAGE), min(offset + nbytes, (page + 1) * PAGE)
            counts[pages[page]] += max(high - low, 0)
    return counts


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 30), spans)
def test_dealt_pages_hold_what_is_counted_page_by_page(
    weights: list[int], first: int, pieces: list[tuple[int, int]]
) -> None:
    table = [member for member, weight in enumerate(weights) for _ in range(weight)]
    first %= len(table)
    nbytes = 600_000
    dealt = Dealt(np.array(table, dtype=np.int64), len(weights), first, nbytes)
    pages = [table[(first + page) % len(table)] for page in range(-(-nbytes // PAGE))]
    array = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    assert dealt.bytes_on(array) == slowly(pages, len(weights), array)
    assert list(dealt.shares) == [pages.count(member) * PAGE for member in range(len(weights))]
    assert dealt.next == (first + len(pages)) % len(table)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), spans)
def test_filled_pages_hold_what_is_counted_page_by_page(counts: list[int], pieces: list[tuple[int, int]]) -> None:
    pages = [member for member, count in enumerate(counts) for _ in range(count)]
    room = len(pages) * PAGE
    inside = [(min(offset, room), min(nbytes, room - min(offset, room))) for offset, nbytes in pieces]
    array = np.array(inside, dtype=np.int64).reshape(-1, 2)
    assert Filled(counts).bytes_on(array) == slowly(pages, len(counts), array)


@given(st.sampled_from([2, 3, 12]), st.integers(0, 50), spans)
def test_a_striped_region_holds_what_its_decoder_says_of_its_addresses(
    ways: int, stripe: int, pieces: list[tuple[int, int]]
) -> None:
    decoder = Interleave(ways, 512, "xor")
    address = stripe * decoder.stripe_nbytes
    array = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    moved = array + np.array([address, 0])
    assert Striped(decoder, address, 600_000).bytes_on(array) == decoder.bytes_per_way(moved).tolist()


class TestSet(Suite):
    """The suite of every device, on a set beside its members."""

    device: ClassVar[str] = "emu:pool"
    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors", "stateful")
    examples: ClassVar[int] = 5

    def open(self, site: Site) -> Platform:
        with TemporaryDirectory() as folder:
            return open_pool(Path(folder), pool('policy = "weighted-interleave"\nweights = [2, 1]\n'))


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pool(HDM, ("one", "pnm")), "pnm is a PNM's memory, and its regions are never in an interleave set"),
        (pool(HDM, ("one", "nvme")), "nvme is a block device"),
        (pool(HDM, ("one", "tow")), "no emulated memory 'tow' on this platform; did you mean 'two'"),
        (pool(HDM, ("one", "pool")), "pool is an interleave set itself"),
        (pool(HDM, ("one", "one")), "names something twice"),
        (pool(HDM, ()), "members: 0 given; allowed: 1 to 16"),
        (pool(HDM, [f"m{i}" for i in range(5)]), "5 given; an HDM decoder has 1, 2, 3, 4, 6, 8, 12, 16 ways"),
        (pool(HDM, [f"m{i}" for i in range(17)]), "17 given; allowed: 1 to 16"),
        (pool('policy = "hdm"\ngranule_nbytes = 300\n'), "granule_nbytes: 300 given; allowed: 256, 512"),
        (pool('policy = "hdm"\narithmetic = "sum"\n'), "arithmetic: unknown value 'sum'"),
        (pool('policy = "bind"\n'), "bind holds all pages on one member"),
        (pool('policy = "round-robin"\n'), "policy: unknown value 'round-robin'"),
        (pool('policy = "interleave"\nweights = [1, 1]\n'), "weights: unknown key"),
        (pool('policy = "weighted-interleave"\n'), "weights: missing"),
        (
            pool('policy = "weighted-interleave"\nweights = [1]\n'),
            "weights: [1] given; allowed: a whole number for each",
        ),
        (pool('policy = "weighted-interleave"\nweights = [1, 0]\n'), "weights: 0 given; allowed: 1 to 255"),
        (pool('policy = "hdm"\ncapacity = 5\n'), "capacity: unknown key"),
    ],
)
def test_a_set_that_cannot_be_is_refused(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_pool(tmp_path, table)
    assert message in str(caught.value)
    assert "devices.pool" in str(caught.value)


def test_a_mistake_is_blamed_on_the_file_once(tmp_path: Path) -> None:
    path = write_machine(tmp_path)
    path.write_text(path.read_text() + '[devices.pool]\ndriver = "interleaved"\nmembers = ["cxl"]\npolicy = "none"\n')
    with pytest.raises(ConfigurationError) as refusal:
        open_platform(path)
    assert str(refusal.value).count("machine.toml: devices.pool: ") == 1


def test_members_that_are_too_small_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="too small to hold 8192 bytes together"):
        open_pool(
            tmp_path,
            pool('policy = "hdm"\ngranule_nbytes = 4096\n'),
            overrides={"devices.one.capacity": 4095},
        )


def test_commands_are_for_executors_and_regions_for_their_owner(machine: Platform) -> None:
    device = machine.devices["emu:pool"]
    near, far = alloc(machine, "dram", PAGE), alloc(machine, "pool", PAGE)
    with pytest.raises(OutOfRange, match="queue 0 does not exist"):
        device.submit(Copy(far.all(), near.all()))
    with pytest.raises(OutOfRange, match="queue 0 does not exist"):
        device.estimate(Copy(far.all(), near.all()))
    with pytest.raises(OutOfRange, match="not a region of this device"):
        device.free(near)
    with pytest.raises(OutOfRange, match="no memory 'emu:one' here"):
        device.alloc(5, "emu:one")
    copy = machine.devices["emu:dram"].submit(Copy(far.all(), near.all()))
    with pytest.raises(Busy, match="named by a command that has not ended"):
        device.free(far)
    finish(machine, copy)
    device.free(far)
    with pytest.raises(OutOfRange, match="is freed"):
        device.free(far)
    device.close()
    device.close()
    with pytest.raises(Gone):
        device.alloc(5)


def test_closing_the_set_gives_everything_back(machine: Platform) -> None:
    region = alloc(machine, "pool", MB)
    assert used(machine, "one") > 0
    machine.devices["emu:pool"].close()
    assert (used(machine, "one"), used(machine, "two")) == (0, 0)
    assert region.freed
