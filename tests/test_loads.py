"""Loads of other hosts: what they leave to others, what they move, determinism, an end, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import DEVICES, PROFILES, duration, finish, open_machine, write_machine
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Copy
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.platform_file import LoadSpec, Topology
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.emulators.device import open_emulated
from tierloop.emulators.loads import BACKLOG, gaps
from tierloop.runtime.ledger import Ledger

MB = 1_000_000


def load(name: str, rate: float, more: str = "", arrivals: str = "regular", memory: str = "cxl") -> str:
    """A table [loads.NAME] of bursts of 4,000 bytes."""
    table = f'[loads.{name}]\nmemory = "{memory}"\nbytes_per_s = {rate}\nburst_nbytes = 4000\n'
    return f'{table}arrivals = "{arrivals}"\n{more}'


def open_loaded(folder: Path, *loads: str, order: Sequence[str] = tuple(DEVICES), **options: Any) -> Platform:
    """The test machine with loads; its card reads 4 bytes/ns and writes 2."""
    path = write_machine(folder, order)
    path.write_text(path.read_text() + "".join(loads))
    return open_platform(path, check_hazards=True, **options)


def stream(platform: Platform, nbytes: int = MB) -> int:
    """How long the cores take to copy so many bytes from the card to their memory, latency and overhead left out."""
    dram, card = platform.devices["emu:dram"], platform.devices["emu:cxl"]
    near, far = dram.alloc(nbytes, phantom=True), card.alloc(nbytes, phantom=True)
    took = duration(platform, dram, Copy(far.all(), near.all()))
    dram.free(near)
    card.free(far)
    return took - 440 - 1_000


def spec(arrivals: Any, rate: int = 4 * 10**9, seed: int = 0, name: str = "others") -> LoadSpec:
    return LoadSpec(name, "emu:cxl", (), rate, 1000, 4_000, arrivals, seed)


# -- what is left to others ---------------------------------------------------------------------------------------


def test_beside_a_load_of_half_the_rate_a_stream_takes_twice_as_long(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 2e9)) as machine:
        assert stream(machine) == 500_000


def test_what_a_smaller_load_does_not_take_is_the_streams(tmp_path: Path) -> None:
    # a quarter of the rate: 4,000 bytes every 4,000 ns, which take 2,000 at a fair share; 4 + 2 bytes/ns are left
    with open_loaded(tmp_path, load("others", 1e9)) as machine:
        assert stream(machine, 12 * 10**5) == 400_000


def test_a_load_of_more_than_its_share_gets_its_share_and_no_more(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 8e9)) as machine:
        assert stream(machine) == 500_000
        meter = machine.site.loads["others"]
        assert meter.bytes_read <= 2 * 500_000 + 4 * 1_440  # it had the card to itself when the stream was over
        assert meter.offered_nbytes > 3 * meter.bytes_read


def test_writes_of_others_cost_what_writes_cost(tmp_path: Path) -> None:
    # the card writes 2 bytes/ns: a load of 1 byte/ns takes half of it
    with open_loaded(tmp_path, load("others", 1e9, "read_fraction = 0\n")) as machine:
        # fair rates: w bytes/ns each, w / 4 + w / 2 = 1, until the burst is over after 3,000 ns; then 4 bytes/ns
        assert stream(machine, 8_000 * 40) == 160_000


def test_two_loads_share_with_a_stream_in_three(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("one", 2e9), load("other", 2e9)) as machine:
        assert stream(machine, 400_000) == 300_000


def test_a_load_crosses_the_links_that_it_names(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 1e9, 'over = ["cxl"]\n'), load("own", 1e9)) as machine:
        machine.clock.wait_until(100_000)
        assert machine.site.loads["own"].bytes_read == 25 * 4_000
        link = machine.site.links["cxl"]
        assert (link.bytes_forward, link.bytes_back) == (0, machine.site.loads["others"].bytes_read)
        assert link.bytes_back == 25 * 4_000
        assert link.busy_ns <= 25 * 2_000


@pytest.mark.parametrize("arrivals", ["regular", "poisson", "on-off"])
@given(seed=st.integers(0, 1000), rate=st.integers(10**8, 10**10))
def test_a_stream_and_a_load_move_together_what_the_medium_moves(
    tmp_path_factory: pytest.TempPathFactory, arrivals: str, seed: int, rate: int
) -> None:
    folder = tmp_path_factory.mktemp("machine")
    with open_loaded(folder, load("others", rate, f"seed = {seed}\n", arrivals)) as machine:
        meter = machine.site.loads["others"]
        took = stream(machine, 400_000)
        end = machine.clock.now()
        # the medium was never idle while the stream was on it; bursts are counted when they have ended, and one that
        # ended after the stream (its latency passed meanwhile) is counted too much
        assert 4 * took <= 400_000 + meter.bytes_read + 4_000 + 4
        assert 400_000 + meter.bytes_read <= 4 * end
        assert meter.bytes_read <= meter.offered_nbytes
        assert meter.busy_ns <= end


# -- when bursts come ---------------------------------------------------------------------------------------------


def test_regular_bursts_come_at_the_rate_from_the_start_on() -> None:
    assert list(islice(gaps(spec("regular", 3 * 10**9)), 7)) == [0, 1333, 1333, 1334, 1333, 1333, 1334]
    assert list(islice(gaps(spec("regular", 3 * 10**9), dilation=3), 4)) == [0, 4000, 4000, 4000]


@pytest.mark.parametrize("seed", range(4))
def test_poisson_gaps_are_exponential(seed: int) -> None:
    count, mean = 20_000, 1_000
    drawn = np.array(list(islice(gaps(spec("poisson", seed=seed)), count)))
    sigmas = 5  # one in two million would be further off; and the seeds are fixed
    assert abs(drawn.sum() / count - mean) <= sigmas * mean / math.sqrt(count)
    for multiple in (0.1, 0.5, 1, 2, 4):
        share = math.exp(-multiple)
        seen = float((drawn >= multiple * mean).mean())
        assert abs(seen - share) <= sigmas * math.sqrt(share * (1 - share) / count) + 1 / mean
    # gaps are independent: neighbours do not know of each other
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) <= sigmas / math.sqrt(count)


@pytest.mark.parametrize("seed", range(4))
def test_on_off_traffic_comes_at_twice_the_rate_half_of_the_time(seed: int) -> None:
    drawn = np.array(list(islice(gaps(spec("on-off", seed=seed)), 40_000)))
    pauses = drawn > 500
    assert set(drawn[~pauses]) <= {0, 500}
    assert drawn[pauses].min() >= 1_000
    assert drawn[pauses].max() <= 16_000
    cycles = int(pauses.sum())
    # a cycle has N bursts and N + M halves, N and M evenly 1 … 31: (N + M) / 2 - N has mean 0 and variance 80 / 2
    assert abs(drawn.sum() / 1_000 - len(drawn)) <= 5 * math.sqrt(40 * cycles)
    assert abs(len(drawn) / cycles - 16) <= 5 * math.sqrt(80 / cycles)


def test_reads_and_writes_take_turns_as_the_fraction_says(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 4e8, "read_fraction = 0.75\n")) as machine:
        machine.clock.wait_until(400 * 10_000)
        meter = machine.site.loads["others"]
        assert (meter.bytes_read, meter.bytes_written) == (300 * 4_000, 100 * 4_000)


# -- determinism --------------------------------------------------------------------------------------------------


def trace(folder: Path, *loads: str, order: Sequence[str] = tuple(DEVICES)) -> list[object]:
    """Ends of some commands, and what loads did on the link, as they come."""
    with open_loaded(folder, *loads, order=order) as machine:
        log: list[object] = []
        machine.site.link_observers.append(lambda o: log.append(o) if "load" in o.label else None)
        for _ in range(5):
            log.append(stream(machine, 50_000))
        log.append(sorted((name, m.bytes_read, m.bytes_written) for name, m in machine.site.loads.items()))
        return log


OTHERS = load("others", 1.5e9, 'over = ["cxl"]\nseed = 7\nread_fraction = 0.6\n', "poisson")
BURSTS = load("bursts", 1e9, 'over = ["cxl"]\nseed = 7\n', "on-off")


def test_the_same_seed_gives_the_same_trace_in_any_order_of_devices_and_loads(tmp_path: Path) -> None:
    first = trace(tmp_path, OTHERS, BURSTS)
    assert trace(tmp_path, OTHERS, BURSTS) == first
    assert trace(tmp_path, BURSTS, OTHERS, order=["pnm", "cxl", "nvme", "gpu", "dram"]) == first


def test_another_seed_gives_another_trace(tmp_path: Path) -> None:
    assert trace(tmp_path, OTHERS) != trace(tmp_path, OTHERS.replace("seed = 7", "seed = 8"))


def test_loads_with_one_seed_and_two_names_are_two_streams() -> None:
    one, other = (list(islice(gaps(spec("poisson", name=name)), 10)) for name in ("one", "other"))
    assert one != other


def test_a_load_on_another_memory_changes_nothing(tmp_path: Path) -> None:
    elsewhere = load("elsewhere", 1e9, arrivals="poisson", memory="gpu")
    assert trace(tmp_path, OTHERS)[:-1] == trace(tmp_path, OTHERS, elsewhere)[:-1]


def test_the_bursts_of_a_seed_are_these() -> None:
    """What outlives a release: the same seed gives the same run on every machine."""
    assert list(islice(gaps(spec("poisson", seed=1)), 8)) == POISSON
    assert list(islice(gaps(spec("on-off", seed=1)), 8)) == ON_OFF


POISSON = [1196, 448, 1471, 71, 430, 742, 448, 3387]
ON_OFF = [0, 500, 500, 500, 500, 500, 500, 500]


def test_no_load_and_a_load_of_nothing_are_the_same(tmp_path: Path) -> None:
    nothing = trace(tmp_path, load("others", 0))
    assert nothing == trace(tmp_path)
    with open_loaded(tmp_path, load("others", 0)) as machine:
        assert not machine.site.loads
        machine.clock.wait_until(10**12)
        assert isinstance(machine.clock, VirtualClock)
        assert machine.clock.events == 0


# -- cost, end, accounts ------------------------------------------------------------------------------------------


def test_an_idle_platform_costs_two_events_a_burst_and_a_closed_one_none(tmp_path: Path) -> None:
    machine = open_loaded(tmp_path, load("others", 1e9))
    clock = machine.clock
    assert isinstance(clock, VirtualClock)
    clock.wait_until(1_000_000 - 1)
    assert clock.events == 2 * 250
    clock.wait_until(1_000_500)  # in the middle of a burst
    machine.close()
    before = clock.events
    clock.wait_until(10**15)
    assert clock.events <= before + 2  # what was registered before: the next burst, and the end of this one
    assert machine.site.loads["others"].bytes_read == 250 * 4_000


def test_closing_the_memory_gives_the_links_back(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 2e9, 'over = ["cxl"]\n')) as machine:
        machine.clock.wait_until(500)
        machine.devices["emu:cxl"].close()
        machine.clock.wait_until(10_000)
        assert machine.site.links["cxl"].busy_ns == 500


def test_no_devices_account_has_the_load(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 1e9)) as machine:
        ledger = Ledger(machine)
        machine.site.observers.append(ledger)
        stream(machine)
        devices, _ = ledger.snapshot()
        assert devices["emu:cxl"].bytes_read == MB
        assert machine.site.loads["others"].memory == "emu:cxl"
        assert machine.site.loads["others"].bytes_read > 0


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 40e9)) as machine:
        machine.clock.wait_until(1_000_000)
        meter = machine.site.loads["others"]
        assert meter.bytes_read == 4 * 1_000_000 - 4 * 1_000_000 % 4_000
        clock = machine.clock
        machine.devices["emu:cxl"]._loads[0]._gaps = iter([10**12])  # type: ignore[attr-defined]  # no more come
        clock.wait_until(1_000_000 + 1_000 * (BACKLOG + 5))
        assert meter.bytes_read <= 4 * 1_000_000 + 4_000 * (BACKLOG + 2)


def test_an_estimate_counts_the_burst_that_is_under_way(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 4e8)) as machine:  # 4,000 bytes every 10,000 ns
        dram, card = machine.devices["emu:dram"], machine.devices["emu:cxl"]
        near, far = dram.alloc(8_000), card.alloc(8_000)
        command = Copy(far.all(), near.all())
        machine.clock.wait_until(0)
        assert dram.estimate(command).duration_ns == 2_000 + 1_000 + 1_440
        assert finish(machine, dram.submit(command)) == [2_000 + 1_000 + 1_440]


def test_on_the_wall_clock_a_load_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "cxl.toml").write_text(PROFILES["cxl"])
    site = Site(clock=WallClock(), shared={"topology": Topology(loads=(spec("poisson", 10**7),))})
    card = open_emulated("emu:cxl", site, {"profile": "cxl.toml", "folder": str(tmp_path)})
    site.clock.wait_until(site.clock.now() + 20_000_000)
    card.close()
    meter = site.loads["others"]
    assert meter.offered_nbytes > 0
    assert meter.bytes_read <= 4 * site.clock.now()


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (load("x", 1e9, memory="clx"), "loads.x.memory: no device 'clx'; did you mean 'cxl'"),
        (load("x", -1), "loads.x.bytes_per_s: -1 given; allowed: 0 to 1000000000000000"),
        (load("x", float("nan")), "loads.x.bytes_per_s: nan given; allowed: a whole number"),
        (load("x", 1e11), "loads.x.burst_nbytes: 4000 given; allowed at 100000000000 bytes/s: 10000 or more"),
        (load("x", 1e9, "read_fraction = 1.5\n"), "loads.x.read_fraction: 1.5 given; allowed: 0 to 1"),
        (load("x", 1e9, "read_fraction = nan\n"), "loads.x.read_fraction: nan given; allowed: 0 to 1"),
        (load("x", 1e9, "read_fraction = true\n"), "loads.x.read_fraction: True given; allowed: 0 to 1"),
        (load("x", 1e9, "seed = -1\n"), "loads.x.seed: -1 given"),
        (load("x", 1e9, arrivals="gamma"), "loads.x.arrivals: unknown value 'gamma'"),
        (load("x", 1e9, "rate = 5\n"), "loads.x.rate: unknown key"),
        (load("x", 1e9, 'over = ["cx"]\n'), "loads.x.over: no link 'cx'; did you mean 'cxl'"),
        (load("x", 1e9, 'over = ["pcie"]\n'), "loads.x.over: link pcie joins dram and gpu, and does not lead to cxl"),
        (load("x", 1e9, 'over = ["cxl", "half"]\n'), "link half joins dram and nvme, and does not lead to cxl"),
        (load("x", 1e9, memory="nvme"), "firmware runs the medium of emu:nvme"),
        (load("x", 1e9, memory="pnm"), "firmware runs the medium of emu:pnm"),
        ("loads = 5\n", "loads: 5 given; allowed: a table"),
    ],
)
def test_a_load_that_cannot_be_is_refused(tmp_path: Path, table: str, message: str) -> None:
    path = write_machine(tmp_path)
    text = path.read_text()
    path.write_text(table + text if table.startswith("loads =") else text + table)
    with pytest.raises(ConfigurationError) as caught:
        open_platform(path)
    assert message in str(caught.value)


def test_a_real_memory_has_no_load(tmp_path: Path) -> None:
    path = write_machine(tmp_path, ["dram", "cxl"])
    text = path.read_text().partition("\n[links.pcie]")[0].replace('clock = "virtual"', 'clock = "wall"')
    text = text.replace('driver = "emulated"\nprofile = "cxl.toml"', 'driver = "cpu"').replace(
        'reaches.cxl = ["cxl"]', ""
    )
    path.write_text(text + load("x", 1e6))
    with pytest.raises(ConfigurationError, match=r"loads\.x: memory: cxl is real"):
        open_platform(path)


@pytest.mark.parametrize(
    "driver", ['driver = "interleaved"\nmembers = ["cxl"]\npolicy = "bind"\n', 'driver = "null"\n']
)
def test_a_load_on_what_has_no_medium_is_refused(tmp_path: Path, driver: str) -> None:
    with pytest.raises(ConfigurationError, match=r"loads\.x: memory: odd has no memory of its own that a load can be"):
        open_loaded(tmp_path, f"[devices.odd]\n{driver}", load("x", 1e6, memory="odd"))


def test_only_the_loads_of_opened_memories_are_there(tmp_path: Path) -> None:
    with open_loaded(tmp_path, load("others", 1e9), load("far", 1e9, memory="gpu"), only=["dram", "cxl"]) as machine:
        assert list(machine.site.loads) == ["others"]
        assert [note for note in machine.notes if "load" in note] == ["load others: 1000000000 bytes/s on cxl"]


def test_the_machine_itself_is_as_before(tmp_path: Path) -> None:
    with open_machine(tmp_path) as machine:
        assert stream(machine) == 250_000
