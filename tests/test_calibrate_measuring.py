"""The benchmark on the virtual clock: closed forms, the plan, passes, confidence intervals, the journal."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machines import number, open_machine, write_machine
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.tools.measuring import Point, Reading, Rig, Subject, last_cache_nbytes, size_text
from tierloop.tools.measuring_passes import TRIES, Journal, Measured, confidence_interval, measure
from tierloop.tools.measuring_plan import Plan, plan
from tierloop.tools.measuring_subjects import of_platform, open_subject
from tierloop.tools.output import OutputError

MIB = 1 << 20
READ = Point("sequential", "transfer", MIB, MIB, 1)
CHASE = Point("idle", "chase", 64, MIB, 1)
MEMORY = """kind = "cpu"
summary = "a memory with cores, for tests"
[memory]
capacity = {{ value = 268435456, source = "defined: for tests" }}
{memory}
[executors.cores]
kind = "cores"
queues = 4
verbs = ["read", "write", "copy", "flush"]
kernels = ["chase", "gather", "score"]
dtypes = ["float32"]
flops_per_s = {{ value = "unknown", source = "defined: for tests" }}
{cores}
"""
PLAIN = (
    number("read_bytes_per_s", 20_000_000_000) + number("write_bytes_per_s", 10_000_000_000) + number("latency_ns", 100)
)


def write_platform(folder: Path, memory: str = PLAIN, cores: str = number("overhead_ns", 5_000)) -> Path:
    """A platform of one device, `mem`, that is its own host."""
    (folder / "mem.toml").write_text(MEMORY.format(memory=memory, cores=cores))
    path = folder / "bench.toml"
    path.write_text('clock = "virtual"\nhost = "mem"\n[devices.mem]\ndriver = "emulated"\nprofile = "mem.toml"\n')
    return path


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    with open_platform(write_platform(tmp_path)) as platform:
        yield of_platform(platform, "mem")


def value(subject: Subject, point: Point, host_ns: int = 0) -> float:
    rig = Rig(subject, 64 * MIB)
    reading = rig.measure(point, 0, 3, host_ns)
    rig.close()
    return reading.value


# -- values -------------------------------------------------------------------------------------------------------


def test_a_transfer_in_one_memory_is_read_and_written_there(subject: Subject) -> None:
    # 1 MiB: read at 20 and written at 10 bytes/ns, so 0.15 ns for each; 100 ns at either end, 5,000 for the command
    expected = MIB * 1e9 / (-(-MIB * 3 // 20) + 200 + 5_000)
    assert value(subject, READ) == pytest.approx(expected, rel=1e-12)
    assert value(subject, replace(READ, read_fraction=0.0)) == pytest.approx(expected, rel=1e-12)


def test_what_the_benchmark_takes_for_itself_is_waited_for_on_the_virtual_clock(subject: Subject) -> None:
    alone = MIB * 1e9 / value(subject, READ)
    assert MIB * 1e9 / value(subject, READ, host_ns=7_000) == pytest.approx(alone + 7_000, rel=1e-9)


def test_a_latency_is_that_of_a_command_without_what_comes_between_two(subject: Subject) -> None:
    point = Point("idle", "transfer", 64, 64, 1)
    assert value(subject, point) == value(subject, point, host_ns=7_000) == 10 + 200 + 5_000


def test_the_difference_of_two_walks_is_the_latency_alone(subject: Subject) -> None:
    assert value(subject, CHASE) == pytest.approx(100, rel=1e-3)


def test_commands_in_flight_share_what_is_there(subject: Subject) -> None:
    # four copies at once: the medium is busy all the time but for the 5,200 ns after the last of them
    round_ns = 4 * MIB * 3 / 20 + 5_200
    assert value(subject, replace(READ, depth=4)) == pytest.approx(4 * MIB * 1e9 / round_ns, rel=1e-3)


def test_a_loaded_chase_says_what_the_streams_moved(subject: Subject) -> None:
    rig = Rig(subject, 64 * MIB)
    reading = rig.measure(Point("loaded", "chase", 64, MIB, 1, load="transfer"), 0)
    rig.close()
    assert reading.value == pytest.approx(100, rel=1e-3)
    assert reading.load_bytes_per_s == pytest.approx(20 / 3 * 1e9, rel=0.06)


@pytest.mark.parametrize(("fraction", "period"), [(0.75, 4), (0.5, 2), (0.25, 4)])
def test_a_mix_holds_its_share_of_reads(tmp_path: Path, fraction: float, period: int) -> None:
    with open_machine(tmp_path) as machine:
        subject = of_platform(machine, "nvme")
        rig = Rig(subject, 2 * MIB)
        commands = rig._commands(Point("sequential", "transfer", 4096, 4096, 1, fraction))
        kinds = [type(command).__name__ for command in commands[:period]]
        rig.close()
    assert kinds.count("Read") == fraction * period


def test_values_are_scaled_back_by_the_dilation(tmp_path: Path) -> None:
    path = write_platform(tmp_path, PLAIN, number("overhead_ns", 1_000_000))
    with open_platform(path, clock="wall", dilation=20) as platform:
        subject = of_platform(platform, "mem")
        assert subject.promises
        rig = Rig(subject, 2 * MIB)
        point = Point("idle", "transfer", 4096, 4096, 1)
        reading = rig.measure(point, 0)
        rig.close()
    assert reading.value >= 1_000_000


def test_a_whole_share_of_places_comes_before_any_comes_again(subject: Subject) -> None:
    rig = Rig(subject, 2 * MIB)
    point = Point("random", "transfer", 4096, MIB, 1)
    taken = np.concatenate([rig._spans(point).spans.array[:, 0] for _ in range(2)])
    rig.close()
    assert len(np.unique(taken)) == len(taken) == 512


# -- subjects and plans -------------------------------------------------------------------------------------------


def test_the_last_cache_is_read_from_the_system_or_taken_as_32_mib(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "512K", "16384K\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    (tmp_path / "index3").mkdir()
    (tmp_path / "index3" / "size").write_text("much")
    assert last_cache_nbytes(tmp_path) == 16 * MIB
    assert last_cache_nbytes(tmp_path / "nowhere") == 32 * MIB


def test_sizes_are_shown_with_binary_units() -> None:
    assert [size_text(n) for n in (64, 4096, 3 * MIB, MIB + 1)] == ["64 B", "4 KiB", "3 MiB", "1048577 B"]


def test_a_memory_of_bytes_is_walked_and_gathered_from_and_a_drive_is_not(tmp_path: Path) -> None:
    with open_platform("demo", clock="virtual") as platform:
        memory = plan(of_platform(platform, "dram"))
        drive = plan(of_platform(platform, "nvme"))
    assert {"chase", "score", "gather", "transfer"} == {point.verb for point in memory.points}
    assert {point.read_fraction for point in memory.points} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {point.verb for point in drive.points} == {"transfer"}
    assert all(point.span_nbytes % 4096 == 0 for point in drive.points)


def test_a_memory_without_executors_is_measured_through_the_host(tmp_path: Path) -> None:
    with open_machine(tmp_path) as machine:
        subject = of_platform(machine, "cxl")
        assert subject.engine.info.name == "emu:dram"
        assert subject.memory.name == "emu:cxl"
        assert subject.apart
        assert not of_platform(machine, "dram").apart


def test_a_memory_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with open_platform("demo", clock="virtual", overrides={"devices.dram.capacity": MIB}) as platform:
        subject = of_platform(platform, "dram")
        with pytest.raises(ConfigurationError, match="too few to measure in"):
            plan(subject)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cqu", "PLATFORM:DEVICE"),
        ("nvme:", "nvme:FOLDER/"),
        ("nvme:/no/such/file", "no such file"),
        ("demo:gqu", "'gpu'"),
        ("dmeo:gpu", "'demo'"),
        ("demo:", "PLATFORM:DEVICE"),
    ],
)
def test_a_device_that_is_none_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said), open_subject(text):
        pass


def test_a_file_with_contents_is_left_alone_without_consent(tmp_path: Path) -> None:
    file = tmp_path / "disk.img"
    file.write_bytes(b"precious" * 1024)
    with pytest.raises(ConfigurationError, match="--scratch"), open_subject(f"nvme:{file}"):
        pass
    assert file.read_bytes() == b"precious" * 1024


def test_what_a_drive_of_a_platform_keeps_is_left_alone_without_consent(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(kept := b"precious" * 1024)
    platform = write_machine(tmp_path)
    platform.write_text(platform.read_text().replace("[devices.nvme]", '[devices.nvme]\nkeep = "kept"'))
    with pytest.raises(ConfigurationError, match="--scratch"), open_subject(f"{platform}:nvme"):
        pass
    assert (tmp_path / "kept").read_bytes()[: len(kept)] == kept
    with open_subject(f"{platform}:nvme", scratch=True) as subject:
        assert subject.owner.info.name == "emu:nvme"


def test_a_folder_gets_a_temporary_file_without_a_name(tmp_path: Path) -> None:
    with open_subject(f"nvme:{tmp_path}/") as subject:
        assert subject.memory.capacity == 1 << 30
        assert subject.apart
        assert list(tmp_path.iterdir()) == []  # nothing is left even of a process that is killed
        region = subject.owner.alloc(MIB, subject.memory.name)
        subject.owner.free(region)
    assert list(tmp_path.iterdir()) == []


# -- passes -------------------------------------------------------------------------------------------------------


def test_the_interval_holds_the_true_median_19_times_out_of_20() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for sample in range(300):
        low, high = confidence_interval(random.normal(10.0, 1.0, 15).tolist(), seed=sample)
        assert low <= high
        hits += low <= 10.0 <= high
    assert 0.90 <= hits / 300 <= 0.99


def test_values_that_agree_have_no_width() -> None:
    assert confidence_interval([3.0, 3.0, 3.0]) == (3.0, 3.0)
    assert confidence_interval([4.0]) == (4.0, 4.0)
    assert Measured(READ, [4.0, 4.0]).spread == 0.0


class Fake:
    """A rig whose readings are counted, and that fails at a given one."""

    def __init__(self, subject: Subject, fails_at: int = 1 << 30, late: float = 0.0) -> None:
        self.subject = subject
        self.calls: list[Point] = []
        self.fails_at = fails_at
        self.late = late

    def measure(self, point: Point, window_ns: int, rounds: int, host_ns: int) -> Reading:
        if len(self.calls) == self.fails_at:
            raise KeyboardInterrupt
        self.calls.append(point)
        return Reading(float(len(self.calls)), 0.0, self.late, 5)


POINTS = tuple(Point("sequential", "transfer", size, size, 1) for size in (4096, 8192, 16384, 32768, 65536))
PLAN = Plan(POINTS, MIB, 3, 1000)
HEADER: dict[str, Any] = {"device": "cpu", "plan": PLAN.to_json()}


def kept(rig: Any, file: Path, resume: bool = False) -> list[Measured]:
    with Journal(file, HEADER, resume) as journal:
        return measure(rig, PLAN, journal=journal)


def test_every_pass_visits_every_point_in_an_order_of_its_own(subject: Subject) -> None:
    rig: Any = Fake(subject)
    measured = measure(rig, PLAN)
    orders = [tuple(rig.calls[5 * i : 5 * i + 5]) for i in range(3)]
    assert all(sorted(order, key=str) == sorted(POINTS, key=str) for order in orders)
    assert len(set(orders)) > 1
    assert [len(one.tries) for one in measured] == [3] * 5
    assert measured[0].host_ns == 5


def test_a_pass_takes_the_best_of_its_windows(subject: Subject) -> None:
    rig: Any = Fake(subject)
    measured = measure(rig, replace(PLAN, passes=1, windows=4))
    assert sorted(one.value for one in measured) == [4, 8, 12, 16, 20]


def test_what_came_late_has_no_value_but_a_reason(subject: Subject) -> None:
    rig: Any = Fake(subject, late=0.02)
    measured = measure(rig, PLAN)
    assert not any(one.valid for one in measured)
    assert "late for 2.0%" in measured[0].reason
    assert len(measured[0].rejected) == 3 * TRIES
    assert all(one.valid for one in measure(rig, PLAN, late_limit=0.03))


@pytest.mark.parametrize("fails_at", [0, 1, 4, 7, 14])
def test_a_measurement_that_was_killed_goes_on_where_it_was(subject: Subject, tmp_path: Path, fails_at: int) -> None:
    file = tmp_path / "journal"
    broken: Any = Fake(subject, fails_at)
    with pytest.raises(KeyboardInterrupt):
        kept(broken, file)
    rest: Any = Fake(subject)
    measured = kept(rest, file, resume=True)
    assert len(rest.calls) == 15 - fails_at
    assert [len(one.tries) for one in measured] == [3] * 5
    assert all(one.hosts == [5, 5, 5] for one in measured)


def test_a_line_that_was_cut_off_is_measured_again(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    kept(Fake(subject), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    rest: Any = Fake(subject)
    kept(rest, file, resume=True)
    assert len(rest.calls) == 1
    assert len(file.read_bytes().splitlines()) == 16


@pytest.mark.parametrize("text", ["something else\n", ""])
def test_without_resume_a_journal_that_is_there_is_refused_and_kept(
    subject: Subject, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "journal"
    file.write_text(text)
    with pytest.raises(OutputError, match=r"--resume.*remove it"):
        Journal(file, HEADER, resume=False)
    assert file.read_text() == text


@pytest.mark.parametrize("raw", [b"\x00\xff\x93" * 40, b"precious", b'{"tierloop_journal": 2'])
def test_a_file_without_a_header_is_refused_and_not_discarded(subject: Subject, tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "journal"
    file.write_bytes(raw)
    with pytest.raises(ConfigurationError, match="line 1: no journal"):
        Journal(file, HEADER, resume=True)
    assert file.read_bytes() == raw


@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_header_that_was_cut_off_is_written_again(subject: Subject, tmp_path: Path, count: int) -> None:
    file = tmp_path / "journal"
    kept(Fake(subject), file)
    file.write_bytes(file.read_bytes()[:count])
    rest: Any = Fake(subject)
    kept(rest, file, resume=True)
    assert len(rest.calls) == 15
    assert len(file.read_bytes().splitlines()) == 16


class Disk:
    """A file on a disk that has room for so many bytes more, and takes what fits of a line."""

    def __init__(self, file: Any, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken: int = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 10, 200, 201, 500])
def test_a_full_disk_is_said_in_one_line_and_resumed_from(subject: Subject, tmp_path: Path, room: int) -> None:
    file = tmp_path / "journal"
    rig: Any = Fake(subject)

    def fill() -> None:
        with Journal(file, HEADER, resume=False) as journal:
            journal._out = Disk(journal._out, room)  # type: ignore[assignment]  # a file, but for its room
            measure(rig, PLAN, journal=journal)

    with pytest.raises(OutputError, match="journal: cannot be written: No space left"):
        fill()
    rest: Any = Fake(subject)
    measured = kept(rest, file, resume=True)
    assert len(rest.calls) == 15 - (len(rig.calls) - 1)
    assert [len(one.tries) for one in measured] == [3] * 5


def test_what_no_header_could_be_written_of_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        Journal(tmp_path / "journal", HEADER, resume=False)
    assert list(tmp_path.iterdir()) == []


LINE = {"pass": 0, "point": 1, "value": 1.0, "load": 0.0, "host_ns": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pass": 3}, "pass: 3 given"),
        ({"pass": -1}, "pass: -1 given"),
        ({"pass": True}, "pass: true given"),
        ({"point": 5}, "point: 5 given"),
        ({"point": 1.0}, "point: 1.0 given"),
        ({"value": "1"}, 'value: "1" given'),
        ({"value": True}, "value: true given"),
        ({"value": 0}, "value: 0 given"),
        ({"value": 1e300}, "value: 1e\\+300 given"),
        ({"value": 10**400}, "value: 10+… given"),
        ({"value": float("inf")}, "value: Infinity given"),
        ({"load": -1}, "load: -1 given"),
        ({"load": None}, "load: null given"),
        ({"host_ns": -1}, "host_ns: -1 given"),
        ({"host_ns": 0.5}, "host_ns: 0.5 given"),
        ({"host_ns": 10**12}, "host_ns: 1000000000000 given"),
        ({"colour": 3}, "unknown key"),
        ({"point": 0}, "stands in an earlier line already"),
    ],
    ids=str,
)
def test_a_line_of_a_journal_is_not_trusted(
    subject: Subject, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    file = tmp_path / "journal"
    kept(Fake(subject), file)
    header = file.read_text().splitlines()[0]
    file.write_text("\n".join([header, json.dumps({**LINE, "point": 0}), json.dumps({**LINE, **change}), ""]))
    with pytest.raises(ConfigurationError, match=f"line 3: .*{said}") as caught:
        Journal(file, HEADER, resume=True)
    assert "Error(" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [json.dumps({**json.loads(lines[0]), "device": "nvme:/x"}), *lines[1:]], "line 1: device"),
        (lambda lines: [json.dumps({**json.loads(lines[0]), "tierloop_journal": 0}), *lines[1:]], "tierloop_journal"),
        (lambda lines: ["nonsense", *lines[1:]], "line 1: no JSON"),
        (lambda lines: [lines[0], "[]", *lines[2:]], "line 2: no JSON object"),
        (lambda lines: [*lines[:3], '{"pass": 0}', *lines[4:]], "line 4"),
        (
            lambda lines: [*lines[:3], '{"pass": 0, "point": 9, "value": 1, "load": 0, "host_ns": 0}'],
            "line 4: point: 9 given",
        ),
        (lambda lines: [*lines[:3], '{"pass": 0, "point": 1, "value": NaN, "load": 0, "host_ns": 0}'], "line 4"),
    ],
    ids=["another device", "another version", "no JSON", "a list", "a key is missing", "no such point", "no number"],
)
def test_a_journal_of_something_else_is_refused_by_line(
    subject: Subject, tmp_path: Path, change: Any, said: str
) -> None:
    file = tmp_path / "journal"
    kept(Fake(subject), file)
    file.write_text("\n".join([*change(file.read_text().splitlines()), ""]))
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match=said):
        Journal(file, HEADER, resume=True)
    assert file.read_bytes() == before


def test_a_platform_gives_its_device_by_either_name() -> None:
    platform: Platform
    with open_platform("demo", clock="virtual") as platform:
        assert of_platform(platform, "emu:dram").memory == of_platform(platform, "dram").memory
