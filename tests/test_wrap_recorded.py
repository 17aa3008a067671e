"""Recorded: every event is a line, lines survive, and the reader takes nothing on trust."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wrapping import ended, every_command, failed, filled, reference, site
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Flush, Launch, Read, Traffic, Write, verb
from tierloop.devices.conformance.gate import Gate
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import ConfigurationError, MediaError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.wrappers import Delayed, Latency, Recorded, read_recording, wrapped
from tierloop.devices.wrappers.entries import Alloc, Array, Ended, Free, Function, ManySpans
from tierloop.devices.wrappers.recording import MANY, info_digest


def recorded(on: Site, path: Path, replace: bool = False, more: list[Any] | None = None) -> Device:
    return reference(on, [lambda device, inside: Recorded(device, inside, path, replace), *(more or [])], 10)


def commands(path: Path) -> list[Ended]:
    return [entry for entry in read_recording(path).in_order() if isinstance(entry, Ended)]


def test_every_command_and_kernel_is_a_line(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    given = every_command(on.clock, device)
    before = len(commands(path))
    made = []
    for command in given.values():
        made.append(device.submit(command))
        ended(on.clock, made[-1])
    lines = commands(path)[before:]
    assert [line.verb for line in lines] == [verb(command) for command in given.values()]
    for line, completion in zip(lines, made, strict=True):
        assert (line.submitted_ns, line.started_ns, line.ended_ns) == (
            completion.submitted_ns,
            completion.started_ns,
            completion.ended_ns,
        )
        traffic = Traffic(completion.command)
        assert (dict(line.read), dict(line.written)) == (traffic.read, traffic.written)
        assert (line.status, line.error, line.errno, line.flops) == ("ok", "", None, completion.flops)


def test_the_header_says_what_was_recorded(tmp_path: Path) -> None:
    on = site()
    device = recorded(on, tmp_path / "a.jsonl")
    inner = device.inner.info  # type: ignore[attr-defined]  # of a wrapper
    assert device.info.name == "emu:reference"
    header = read_recording(tmp_path / "a.jsonl").header
    assert (header.version, header.device, header.kind, header.provenance) == (
        1,
        "emu:reference",
        "reference",
        "emulated",
    )
    assert (header.clock, header.dilation, header.info) == ("virtual", 1, info_digest(inner))
    assert header.memories == (("emu:reference", 1 << 22),)
    assert header.queues == (("reference", (0, 1, 2, 3)),)


def test_events_read_back_as_what_was_done(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    one, other = device.alloc(4096), device.alloc(100, phantom=True)
    spans = Spans([(5, 3), (100, 50), (0, 1)])
    write = device.submit(Write(Segment(one, spans), np.zeros(54, dtype=np.uint8)), 1)
    runs = Spans.equal(np.arange(10) * 100, 7)
    read = device.submit(Read(Segment(one, runs), np.zeros(70, dtype=np.uint8)), 2, [write])
    flush = device.submit(Flush(other.all()), 0, [write, read])
    ended(on.clock, write, read, flush)
    device.free(other)
    entries = read_recording(path).in_order()
    assert entries[:2] == [Alloc(0, 0, "emu:reference", 0, 4096, False), Alloc(1, 0, "emu:reference", 1, 100, True)]
    assert entries[-1] == Free(5, 30, "emu:reference", 1)
    first, second, third = commands(path)
    assert (first.seq, second.seq, third.seq) == (2, 3, 4)
    assert (first.queue, second.after, third.after) == (1, (2,), (2, 3))
    assert first.writes[0][0].spans == spans
    assert first.reads == ()
    assert second.reads[0][0].spans == runs
    assert third.reads[0][0].region == 1


def test_many_spans_are_a_digest_and_arguments_are_kept(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    region = device.alloc(1 << 16)
    spans = Spans(np.stack([np.random.default_rng(0).permutation(1 << 15)[: MANY + 1], np.ones(MANY + 1, int)], axis=1))
    ended(on.clock, device.submit(Read(Segment(region, spans), np.zeros(MANY + 1, dtype=np.uint8))))
    given = every_command(on.clock, device)
    ended(on.clock, device.submit(given["attend"]))
    ended(on.clock, device.submit(given["dense"]))
    (many,) = [line for line in commands(path) if line.reads and isinstance(line.reads[0][0].spans, ManySpans)]
    digest = many.reads[0][0].spans
    assert isinstance(digest, ManySpans)
    assert (digest.count, digest.nbytes, digest.end) == (MANY + 1, MANY + 1, spans.end)
    attend, dense = (dict(line.args) for line in commands(path)[-2:])
    launch = given["attend"]
    assert isinstance(launch, Launch)
    assert attend["head_dim"] == launch.args.head_dim  # type: ignore[union-attr]  # an Attend
    assert isinstance(attend["runs"], Array)
    assert attend["runs"].shape == launch.args.runs.shape  # type: ignore[union-attr]  # likewise
    assert isinstance(dense["function"], Function)


def test_a_dependency_is_kept_through_wrappers_further_out(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    outer = [lambda device, inside: Delayed(device, inside, Latency(5), Latency(5)) for _ in range(2)]
    device = recorded(on, path, more=outer)
    region, gate = device.alloc(64), Gate(on)
    first = device.submit(Write(region.all(), np.zeros(64, dtype=np.uint8)), 0, [gate.completion])
    second = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), 1, [first])
    gate.open()
    ended(on.clock, first, second)
    third = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), 2, [first, second])
    ended(on.clock, third)
    one, two, three = commands(path)
    assert (one.after, one.foreign) == ((), (("gate", 0),))
    assert (two.after, two.foreign) == ((one.seq,), ())
    assert three.after == (one.seq, two.seq)


def test_failures_and_what_they_cancel_are_recorded(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    region, gate = device.alloc(64), Gate(on)
    first = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), 0, [gate.completion])
    gate.open(MediaError("gate", "flush", "on purpose", 5))
    assert failed(on.clock, first) is not None
    held = device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8)), 0)
    device.close()
    assert held.done
    assert [line.status for line in commands(path)] == ["cancelled", "gone"]
    assert "on purpose" in commands(path)[0].error


def test_a_region_from_before_the_recording_is_noted_where_it_is_first_named(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    region = device.inner.alloc(64)  # type: ignore[attr-defined]  # of a wrapper
    ended(on.clock, device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8))))
    assert [type(entry) for entry in read_recording(path).entries] == [Alloc, Ended]


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="is there already"):
        recorded(site(), path)
    assert path.read_text() == "precious"
    device = recorded(site(), path, replace=True)
    device.alloc(8)
    device.close()
    assert len(read_recording(path).entries) == 1


def test_a_file_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        recorded(site(), tmp_path / "nowhere" / "a.jsonl")


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    on = site()
    with pytest.raises(ConfigurationError, match="embedded null byte"):
        reference(on, [lambda device, inside: Recorded(device, inside, tmp_path / "a\0b")])


def test_two_devices_are_not_recorded_in_one_file(tmp_path: Path) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    one = reference(on, [lambda device, inside: Recorded(device, inside, path, replace=True)])
    one.alloc(8)
    (tmp_path / "b.jsonl").symlink_to(path)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="another device of the platform is recorded in it"):
        reference(
            on, [lambda device, inside: Recorded(device, inside, tmp_path / "b.jsonl", replace=True)], 1, "emu:other"
        )
    assert path.read_bytes() == before
    one.close()


def test_a_killed_process_leaves_every_line_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; import numpy as np; from pathlib import Path\n"
        "from tests.test_wrap_recorded import recorded; from tests.wrapping import ended, site\n"
        "from tierloop.devices.commands import Read\n"
        f"on = site(); device = recorded(on, Path({str(tmp_path / 'a.jsonl')!r})); region = device.alloc(64)\n"
        "for _ in range(25): ended(on.clock, device.submit(Read(region.all(), np.zeros(64, dtype=np.uint8))))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    recording = read_recording(tmp_path / "a.jsonl")
    assert (len(recording.entries), recording.truncated) == (26, False)


@pytest.mark.parametrize("told", ["submit", "alloc", "close"])
def test_a_full_disk_is_told_once_and_the_device_works_on(tmp_path: Path, told: str) -> None:
    on, path = site(), tmp_path / "a.jsonl"
    device = recorded(on, path)
    region = filled(on.clock, device, 64)
    whole = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, before[1]))
    try:
        into = np.zeros(64, dtype=np.uint8)
        ended(on.clock, device.submit(Read(region.all(), into)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert into.all()
    assert path.stat().st_size == whole
    error = pytest.raises(MediaError, match="the rest is not recorded")
    if told == "submit":
        with error as caught:
            device.submit(Read(region.all(), into))
        assert caught.value.errno == 27
    elif told == "alloc":
        with error:
            device.alloc(8)
    else:
        with error:
            device.close()
        return
    into[:] = 0
    ended(on.clock, device.submit(Read(region.all(), into)))
    assert into.all()
    device.close()
    assert len(read_recording(path).entries) == 2


def test_a_real_device_is_recorded_on_the_wall_clock(tmp_path: Path) -> None:
    on, path = Site(clock=WallClock()), tmp_path / "a.jsonl"
    device = wrapped(
        on,
        lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}),
        [lambda device, inside: Recorded(device, inside, path)],
    )
    region, other = device.alloc(64), device.alloc(64)
    ended(on.clock, device.submit(Launch(Gather(), ((region.all(),),), ((other.all(),),))))
    device.close()
    recording = read_recording(path)
    assert (recording.header.clock, recording.header.provenance) == ("wall", "real")
    assert [entry.verb for entry in recording.entries if isinstance(entry, Ended)] == ["gather"]


# -- the reader ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A recording with one line of every kind: header, alloc, read, launch, many spans, free."""
    on, path = site(), tmp_path_factory.mktemp("recording") / "a.jsonl"
    device = recorded(on, path)
    region, other = device.alloc(1 << 15), device.alloc(64)
    made = [device.submit(Read(region.at(0, 8), np.zeros(8, dtype=np.uint8)))]
    made.append(device.submit(Launch(Gather(), ((region.at(8, 8),),), ((other.at(0, 8),),)), 0, made))
    odd = Spans([(i * i % 30_000, 1) for i in range(MANY + 1)])
    made.append(device.submit(Read(Segment(region, odd), np.zeros(MANY + 1, dtype=np.uint8))))
    made.append(device.submit(Read(Segment(region, Spans.equal(np.arange(9), 1)), np.zeros(9, dtype=np.uint8))))
    ended(on.clock, *made)
    device.free(other)
    device.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def put(line: int, *keys: Any) -> Callable[[list[dict[str, Any]], Any], None]:
    """A change of a field of a line."""

    def change(lines: list[dict[str, Any]], value: Any) -> None:
        inside: Any = lines[line]
        for key in keys[:-1]:
            inside = inside[key]
        if value is KeyError:
            del inside[keys[-1]]
        else:
            inside[keys[-1]] = value

    return change


WRONG = [
    (put(0, "tierloop_recording"), 2, "line 1: tierloop_recording: version 2; this reader knows 1"),
    (put(0, "tierloop_recording"), True, "a whole number"),
    (put(0, "clock"), "sun", "clock: 'sun'; allowed: virtual, wall"),
    (put(0, "dilation"), 0, "dilation: 0; allowed"),
    (put(0, "info"), "00", "64 hexadecimal"),
    (put(0, "queues"), {"x": 3}, "a list of queues"),
    (put(0, "memories"), {"emu:reference": -1}, "memories.emu:reference: -1"),
    (put(1, "seq"), -1, "seq: -1"),
    (put(1, "seq"), 1, "seq: 1 is there twice"),
    (put(1, "event"), "realloc", "event: 'realloc'; allowed: alloc, command, free"),
    (put(1, "nbytes"), 1.5, "nbytes: 1.5"),
    (put(1, "nbytes"), 4, "outside the 4 bytes of region 0"),
    (put(1, "phantom"), 0, "phantom: 0; allowed: true or false"),
    (put(1, "memory"), "other", "memory: 'other'; allowed: emu:reference"),
    (put(1, "extra"), 0, "extra: unknown field"),
    (put(1, "at_ns"), KeyError, "at_ns: missing"),
    (put(3, "verb"), "erase", "verb: 'erase'; allowed"),
    (put(3, "queue"), 4, r"queue: 4; allowed: \[0, 1, 2, 3\]"),
    (put(3, "submitted_ns"), 10**9, "started_ns: 0; allowed: a whole number from 1000000000"),
    (put(3, "reads", 0, 0, "spans"), [[0, -1]], "spans: -1"),
    (put(3, "reads", 0, 0, "spans"), [[0, 1 << 61], [0, 1 << 61]], "below 2"),
    (put(3, "reads", 0, 0, "spans"), [[0]], r"a list of \[offset, nbytes\]"),
    (put(3, "reads", 0, 0, "region"), 7, "region 7 of emu:reference was not allocated before"),
    (put(3, "reads", 0, 0, "more"), 7, "reads.more: unknown field"),
    (put(3, "reads"), [3], "a list of segments"),
    (put(3, "status"), "fine", "status: 'fine'; allowed"),
    (put(3, "errno"), "EIO", "errno: 'EIO'"),
    (put(3, "args"), {}, "only launches have any"),
    (put(3, "read"), [], "allowed: an object"),
    (put(4, "after"), [3], "after: 3"),
    (put(4, "after"), ["x"], "after: 'x'"),
    (put(4, "foreign"), [["gate"]], r"\[device, queue\]"),
    (put(4, "args"), None, "args: None; allowed: an object"),
    (put(4, "args"), {"runs": {"dtype": "int64", "shape": [-1], "sha256": "0" * 64}}, "shape: -1"),
    (put(5, "reads", 0, 0, "many", "count"), 5, "count: 5"),
    (put(5, "reads", 0, 0, "many", "sha256"), "z" * 64, "64 hexadecimal"),
    (put(6, "reads", 0, 0, "every"), [0, 1, 1, 1 << 40], "every: 1099511627776"),
    (put(6, "reads", 0, 0, "every"), [0, 1, -1, 9], "every: -8"),
    (put(6, "reads", 0, 0, "every"), [0, 1], "every: not enough values"),
    (put(7, "region"), 9, "region 9 of emu:reference was not allocated"),
]


@pytest.mark.parametrize(("change", "value", "message"), WRONG, ids=[m[:40] for *_, m in WRONG])
def test_what_is_wrong_is_refused_with_line_and_field(
    tmp_path: Path, lines: list[dict[str, Any]], change: Callable[..., None], value: Any, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    changed = json.loads(json.dumps(lines))
    assert len(read_recording(written(path, changed)).entries) == 7
    change(changed, value)
    with pytest.raises(ValueError, match=message):
        read_recording(written(path, changed))


def test_a_region_that_was_freed_is_not_named_again(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    path = written(tmp_path / "a.jsonl", [*lines, lines[-1] | {"seq": 99}])
    with pytest.raises(ValueError, match="line 9: region: region 1 of emu:reference was freed before"):
        read_recording(path)


@pytest.mark.parametrize(
    "text", ["", "[]\n", "{\n", '{"tierloop_recording": NaN}\n', '{"tierloop_recording": 1}', "[" * 10**5 + "\n"]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_recording(tmp_path / "a.jsonl")


@given(cut=st.integers(1, 10_000))
def test_a_last_line_without_its_end_is_reported(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    whole = written(path, lines).read_bytes()
    header = whole.index(b"\n") + 1
    left = header + cut % (len(whole) - header + 1)
    path.write_bytes(whole[:left])
    recording = read_recording(path)
    assert recording.truncated == (not whole[:left].endswith(b"\n"))
    assert len(recording.entries) == whole[:left].count(b"\n") - 1


GOLDEN = Path(__file__).parent / "recordings" / "version_1.jsonl"


def test_a_recording_of_version_1_reads_back_for_ever() -> None:
    recording = read_recording(GOLDEN)
    assert [type(entry).__name__ for entry in recording.entries] == ["Alloc"] * 3 + ["Ended"] * 5 + ["Free"]
    done = {entry.verb: entry for entry in recording.entries if isinstance(entry, Ended)}
    assert set(done) == {"write", "read", "copy", "flush", "topk"}
    assert done["write"].writes[0][0].spans == Spans([(5, 3), (100, 50)])
    assert done["read"].reads[0][0].spans == Spans.equal(np.arange(10) * 100, 7)
    assert done["topk"].after == (done["copy"].seq, done["flush"].seq)
    assert done["topk"].args == (
        ("k", 2),
        ("lengths", Array("int64", (2,), "60aade2bc7d803d24bceca5832090f3e23d06c1ca7f736e1a1578f3e04e8a3fa")),
    )
    assert recording.header.device == "emu:reference"
