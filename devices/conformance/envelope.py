"""Envelope: what a device says of its speed, against what a consumer of it sees.

Only what must hold on any machine is judged: nothing is faster than its declared path, no access is shorter than the
path's latency, and under the virtual clock an idle device takes what it estimated. How near a real device comes to its
declared rates depends on who else uses the machine: that is reported (`comparisons`) and belongs into benches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tierloop.devices.commands import Command, Copy, Launch, Read, Write, segments, verb
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.launches import Bench, attend_operands
from tierloop.devices.conformance.problems import Problem, Shape, problem
from tierloop.devices.conformance.report import Comparison
from tierloop.devices.conformance.subject import Lane, Skip, Subject, expect
from tierloop.devices.info import MemoryInfo, Path
from tierloop.devices.kernels.contract import ITEMSIZE
from tierloop.devices.regions import Region

STREAM_NBYTES = 4 << 20
"""What is moved at once to see a rate: long against every latency that is known, short enough for a slow drive."""
TRIES = 3
"""Of a real device the best of so many counts: other programs can only make it slower."""
TOLERANCE = 1.02
"""A clock that is read a little late, and rates that are rounded to whole bytes per second."""


@dataclass(frozen=True)
class _Way:
    """One queue of each executor that moves bytes of a memory of the device, by their path."""

    lane: Lane
    path: Path
    memory: MemoryInfo


def check_nothing_is_faster_than_its_path(subject: Subject) -> None:
    """Bytes per second of reads, writes, copies and attention stay below what the path declares."""
    _judge(subject, _rates_seen, lambda seen: seen.measured <= seen.declared * TOLERANCE, "the device declares no rate")


def check_nothing_is_shorter_than_the_latency(subject: Subject) -> None:
    """The smallest read and write take at least as long as the path declares."""
    _judge(
        subject,
        _latencies_seen,
        lambda seen: seen.measured * TOLERANCE >= seen.declared,
        "the device declares no latency",
    )


def check_an_idle_device_takes_what_it_estimates(subject: Subject) -> None:
    """Under the virtual clock: within the margin that comes with the estimate, for every verb and for attention."""
    if not subject.clock.virtual:
        raise Skip("the time of a real device is no promise; `declared_vs_measured` shows it")
    for way in _ways(subject):
        region = subject.alloc(_size(way), way.memory)
        half = region.nbytes // 2 // way.memory.alignment * way.memory.alignment
        _holds(subject, way.lane, Write(region.all(), subject.bytes(region.nbytes)))
        _holds(subject, way.lane, Read(region.all(), _buffer(region)))
        if "copy" in way.lane.executor.verbs and half:
            _holds(subject, way.lane, Copy(region.at(0, half), region.at(half, half)))
        subject.platform.free(region)
    for way, bench, given, _ in _attending(subject):
        roots = given.top_roots()
        reads, target = attend_operands(bench, given, roots)
        _holds(subject, way.lane, Launch(given.attend(roots), reads, (target,)))


def _holds(subject: Subject, lane: Lane, command: Command) -> None:
    """Fail where a command takes another time than the device said that it would."""
    told = lane.device.estimate(command, lane.queue)
    took = _took(subject, lane, command)
    expect(
        abs(took - told.duration_ns) <= told.margin_ns + 1,
        f"{verb(command)} of {sum(spans.nbytes for _, spans in segments(command))} bytes on {lane} took {took} ns; "
        f"estimated were {told.duration_ns} ± {told.margin_ns} ({told.source})",
    )


def comparisons(subject: Subject) -> list[Comparison]:
    """What is declared and what is seen, for each executor that reaches a memory of the device."""
    return [*_rates_seen(subject), *_latencies_seen(subject)]


def _judge(
    subject: Subject,
    seen_on: Callable[[Subject], Iterable[Comparison]],
    kept: Callable[[Comparison], bool],
    otherwise: str,
) -> None:
    """Fail for the first declared number that was not kept; skip where none is declared, and on a model."""
    if subject.info.model:
        raise Skip(f"{subject.info.model} beneath a real driver takes no time of its own")
    declared = [seen for seen in seen_on(subject) if seen.declared]
    for seen in declared:
        expect(
            kept(seen),
            f"{seen.executor} → {seen.memory}: {seen.quantity} {seen.measured} was seen and {seen.declared} is "
            "declared",
        )
    if not declared:
        raise Skip(otherwise)


def _rates_seen(subject: Subject) -> Iterator[Comparison]:
    for way in _ways(subject):
        region = subject.alloc(_size(way), way.memory)
        data, into = subject.bytes(region.nbytes), _buffer(region)
        yield from _rates(subject, way, region, {"write": Write(region.all(), data), "read": Read(region.all(), into)})
        subject.platform.free(region)
    yield from _attention(subject)


def _latencies_seen(subject: Subject) -> Iterator[Comparison]:
    for way in _ways(subject):
        least = max(way.memory.alignment, 1)
        region = subject.alloc(least, way.memory)
        commands: dict[str, Command] = {
            "write": Write(region.all(), subject.bytes(least)),
            "read": Read(region.all(), _buffer(region)),
        }
        for name, command in commands.items():
            yield _seen(way, f"{name}_latency_ns", way.path.latency_ns, _best(subject, way.lane, command))
        subject.platform.free(region)


def _rates(subject: Subject, way: _Way, region: Region, commands: dict[str, Command]) -> Iterator[Comparison]:
    for name, command in commands.items():
        declared = way.path.read_bytes_per_s if name == "read" else way.path.write_bytes_per_s
        yield _seen(way, f"{name}_bytes_per_s", declared, _rate(region.nbytes, _best(subject, way.lane, command)))
    if "copy" in way.lane.executor.verbs:
        half = region.nbytes // 2 // way.memory.alignment * way.memory.alignment
        if half:
            took = _best(subject, way.lane, Copy(region.at(0, half), region.at(half, half)))
            slower = min(way.path.read_bytes_per_s, way.path.write_bytes_per_s)
            yield _seen(way, "copy_bytes_per_s", slower, _rate(half, took))


def _attention(subject: Subject) -> Iterator[Comparison]:
    """K and V rows that attention reads in a second, on each executor of the device that attends."""
    for way, bench, given, nbytes in _attending(subject):
        reads, target = attend_operands(bench, given, given.top_roots())
        launch = bench.completed
        took = min(_length(launch(given.attend(given.top_roots()), reads, target)) for _ in range(_tries(subject)))
        yield _seen(way, "attend_bytes_per_s", way.path.read_bytes_per_s, _rate(nbytes, took))


def _attending(subject: Subject) -> Iterator[tuple[_Way, Bench, Problem, int]]:
    """A problem of attention for each executor of the device and memory that it reaches, and its bytes of K and V."""
    for executor in subject.info.executors:
        if "attend" not in executor.kernels or "float32" not in executor.dtypes:
            continue
        lane = Lane(subject.device, executor, executor.queues[0])
        for memory in subject.operand_memories(lane):
            path = executor.path(memory.name)
            shape = Shape("float32", group=1, num_sequences=1, tokens=_tokens(memory), split_tokens=64, layout="dense")
            if path is None or not shape.tokens:
                continue
            bench = Bench(subject, lane, memory)
            given = problem(shape, subject.rng)
            nbytes = sum(int(given.lengths.sum()) * dim * ITEMSIZE["float32"] for dim in (64, 64))
            yield _Way(lane, path, memory), bench, given, nbytes
            bench.free()


def _ways(subject: Subject) -> list[_Way]:
    """Each executor once per memory that it reads and writes; skips the check where there is none."""
    found: dict[tuple[str, str, str], _Way] = {}
    for memory in subject.memories():
        for lane in subject.lanes(memory.name, "read", "write"):
            path = lane.executor.path(memory.name)
            assert path is not None, "lanes asks for a path"
            found.setdefault((lane.device.info.name, lane.executor.name, memory.name), _Way(lane, path, memory))
    return list(found.values())


def _size(way: _Way) -> int:
    nbytes = min(STREAM_NBYTES, way.memory.capacity // 4, way.lane.executor.largest_transfer or STREAM_NBYTES)
    return max(nbytes // way.memory.alignment, 1) * way.memory.alignment


def _tokens(memory: MemoryInfo) -> int:
    """Rows of 64 float32 numbers of K and of V, for each of two heads, in half of the memory at most."""
    return min(STREAM_NBYTES, memory.capacity // 2) // (2 * 2 * 64 * 4) // 64 * 64


def _best(subject: Subject, lane: Lane, command: Command) -> int:
    return min(_took(subject, lane, command) for _ in range(_tries(subject)))


def _tries(subject: Subject) -> int:
    return 1 if subject.clock.virtual else TRIES


def _took(subject: Subject, lane: Lane, command: Command) -> int:
    return _length(subject.run(lane, command))


def _length(completion: Completion) -> int:
    return max(completion.ended_ns - completion.started_ns, 1)


def _rate(nbytes: int, took_ns: int) -> int:
    return nbytes * 1_000_000_000 // took_ns


def _seen(way: _Way, quantity: str, declared: int, measured: int) -> Comparison:
    return Comparison(
        f"{way.lane.device.info.name}/{way.lane.executor.name}", way.memory.name, quantity, declared, measured
    )


def _buffer(region: Region) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(region.nbytes, dtype=np.uint8)
