"""Which points are measured on a memory, and for how long: chosen from what its device says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.tools.measuring import LINE_NBYTES, ROW_NBYTES, STREAM_NBYTES, Point, Subject, last_cache_nbytes

_KIB, _MIB = 1 << 10, 1 << 20
_WALK_NBYTES = 4 << 20
"""A long walk: 65,536 lines, about 8 ms of a DRAM, so that it meets several commands of a stream beside it."""
VIRTUAL_WINDOW_NS = 10_000
_GATHER_NBYTES = 8 << 20
"""A launch takes every core of a real processor, so kernels are measured one at a time. Rows stay below a page: from
there on the timing model sees streams."""
_SMALLEST_POOL = 1 << 20
_ROOM_NBYTES = 64 << 10
"""What several regions may lose because each begins at a page or a block."""
POOLS = 5
"""A memory holds so many pools: one for transfers, one for what is gathered, one and a quarter for walks, and room."""


@dataclass(frozen=True)
class Plan:
    """Points, and how they are measured, in pools of `pool_nbytes`: `passes` times.

    A pass takes the best of `windows` windows of `window_ns`, because other programs can only take something away.
    """

    points: tuple[Point, ...]
    pool_nbytes: int
    passes: int
    window_ns: int
    windows: int = 1
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data: what a journal has to agree with."""
        return {**asdict(self), "points": [point.to_json() for point in self.points]}


def plan(subject: Subject, quick: bool = False, streams: int = 1) -> Plan:
    """The points for a subject; at most `streams` streams run beside a chase.

    Raises ConfigurationError if the memory is too small to be measured.
    """
    memory = subject.memory
    pool = pool_nbytes(subject, quick)
    points = (
        _on_memory(subject, quick, streams, pool) if memory.byte_addressable else _on_blocks(memory.alignment, quick)
    )
    largest = subject.mover.largest_transfer or pool
    fitting = []
    for point in points:
        walked = point.verb == "chase" and point.nbytes <= pool
        room = point.nbytes * point.depth <= pool and (point.verb != "transfer" or point.nbytes <= largest)
        queues = subject.mover.queues if point.load == "transfer" else subject.kernels.queues if subject.kernels else ()
        beside = point.pattern != "loaded" or point.depth <= len(set(queues) - _first(subject))
        in_flight = point.pattern == "loaded" or point.depth <= len(subject.mover.queues)
        if (walked or (point.verb != "chase" and room)) and beside and in_flight:
            fitting.append(point)
    if not any(point.unit == "bytes_per_s" for point in fitting):
        raise ConfigurationError(f"{memory.name}: a pool of {pool} bytes is too small to measure anything in")
    if subject.clock.virtual:  # the model does not vary
        return Plan(tuple(fitting), pool, 1, VIRTUAL_WINDOW_NS)
    if not memory.byte_addressable:
        return Plan(tuple(fitting), pool, 9 if quick else 15, 30_000_000, 2 if quick else 4)
    if subject.promises:  # on this host's time its noise is left out, so one window is as good as the best of many
        return Plan(tuple(fitting), pool, 3, 4_000_000)
    return Plan(tuple(fitting), pool, 9 if quick else 33, 4_000_000 if quick else 6_000_000, 3 if quick else 5)


def pool_nbytes(subject: Subject, quick: bool) -> int:
    """Four times the last cache (two with `quick`; drives 256 and 64 MiB), less where the memory is small."""
    wanted = (64 if quick else 256) * _MIB
    if subject.memory.byte_addressable:
        wanted = (2 if quick else 4) * last_cache_nbytes()
    pool = min(wanted, subject.memory.capacity // POOLS)
    pool = whole(pool, subject.memory.alignment)
    if pool < _SMALLEST_POOL:
        raise ConfigurationError(
            f"{subject.memory.name}: {subject.memory.capacity} bytes are too few to measure in; at least "
            f"{(POOLS + 1) * _SMALLEST_POOL} are needed"
        )
    return pool


def check_points(subject: Subject, points: Sequence[Point], pool: int, whose: str) -> None:
    """Refuse points that cannot be measured on a subject in pools of `pool` bytes; `whose` they are is what to say.

    Raises ConfigurationError: points of kernels for a memory that has none, spans off its grid, too little room.
    """
    memory = subject.memory
    blocks = not memory.byte_addressable
    for point in points:
        if point.verb != "transfer" and not subject.offers(point.verb):
            kind = "a memory of blocks" if blocks else "a memory that no executor with such a kernel reaches"
            raise ConfigurationError(f"{whose}: {point}: cannot be measured on {memory.name}, {kind}")
        if point.span_nbytes % memory.alignment and point.verb == "transfer":
            raise ConfigurationError(
                f"{whose}: {point}: cannot be measured on {memory.name}, whose blocks have {memory.alignment} bytes"
            )
    verbs = {point.verb for point in points}
    needed = pool
    if "gather" in verbs:
        needed += pool
    if "chase" in verbs:
        needed += pool + pool // 4 + 2 * LINE_NBYTES
    if "score" in verbs or any(point.load == "score" for point in points):
        needed += ROW_NBYTES + pool // ROW_NBYTES * 4
    needed += _ROOM_NBYTES
    if needed > memory.capacity:
        raise ConfigurationError(
            f"{whose}: {memory.name} has {memory.capacity} bytes; to measure these points, {needed} are needed"
        )


def whole(nbytes: int, alignment: int = 1) -> int:
    """The largest size of a pool that is no larger."""
    return nbytes - nbytes % max(alignment, 64 * _KIB)


def room_for(points: Sequence[Point], alignment: int = 1) -> int:
    """The smallest size of a pool in which every point has room for all that it has in flight."""
    most = max((point.nbytes * (point.depth if point.verb != "chase" else 1) for point in points), default=1)
    return whole(most - 1, alignment) + whole(max(alignment, 64 * _KIB), alignment)


def _first(subject: Subject) -> set[int]:
    """The queue that chases."""
    return {subject.kernels.queues[0]} if subject.kernels is not None else set()


def _on_memory(subject: Subject, quick: bool, streams: int, pool: int) -> list[Point]:
    sizes = (4 * _KIB, 4 * _MIB, 16 * _MIB) if quick else (4 * _KIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
    depths = (1, 2, 4) if quick else (1, 2, 4, 8)
    points = [Point("sequential", "transfer", size, size, depth) for size in sizes for depth in depths]
    if not quick:
        points.append(Point("sequential", "transfer", _MIB, _MIB, 1))
    points += [
        Point("sequential", "transfer", 16 * _MIB, 16 * _MIB, depth, fraction)
        for fraction in ((0.5, 0.0) if quick else (0.75, 0.5, 0.25, 0.0))
        for depth in (1, 2)
    ]
    # Small pieces of memory move in commands of many spans; one span per command is what a command costs.
    points += [
        Point("random", "transfer", span, 16 * _MIB, depth, fraction)
        for span in ((4 * _KIB,) if quick else (4 * _KIB, 64 * _KIB))
        for depth in (1, 2)
        for fraction in (1.0, 0.0)
    ]
    if subject.offers("score"):
        size = min(64 * _MIB, pool)
        points.append(Point("sequential", "score", size, size, 1))
    if subject.offers("gather"):
        spans = (LINE_NBYTES, 256) if quick else (LINE_NBYTES, 256, _KIB, 2 * _KIB)
        points += [Point("random", "gather", span, _GATHER_NBYTES, 1) for span in spans]
    else:
        points += [Point("random", "transfer", span, _MIB, depth) for span in (64, 256) for depth in (1, 2)]
    if subject.offers("chase"):
        points.append(Point("idle", "chase", LINE_NBYTES, _WALK_NBYTES, 1))
        for load in STREAM_NBYTES:
            if load == "transfer" or subject.offers(load):
                points += [
                    Point("loaded", "chase", LINE_NBYTES, _WALK_NBYTES, count, load=load, duty=duty)
                    for count in range(1, streams + 1)
                    for duty in ((0.5, 1.0) if quick else (0.25, 0.5, 0.75, 1.0))
                ]
    else:
        points.append(Point("idle", "transfer", LINE_NBYTES, LINE_NBYTES, 1))
    return points


def _on_blocks(block: int, quick: bool) -> list[Point]:
    unit = max(block, 4 * _KIB)
    points = [Point("idle", "transfer", unit, unit, 1, fraction) for fraction in (1.0, 0.0)]
    sizes = (unit, 64 * _KIB, _MIB) if quick else (unit, 64 * _KIB, _MIB, 4 * _MIB)
    for fraction in (1.0, 0.0) if quick else (1.0, 0.5, 0.0):
        points += [Point("sequential", "transfer", size, size, depth, fraction) for size in sizes for depth in (1, 4)]
    points += [
        Point("random", "transfer", span, span * count, depth, fraction)
        for span, count in ((unit, 1), (16 * unit, 1))
        for depth in (1, 4)
        for fraction in (1.0, 0.0)
    ]
    # What the spans of one command cost; over several commands they share what the model has no limit for.
    points += [Point("random", "transfer", unit, 64 * unit, 1, fraction) for fraction in (1.0, 0.0)]
    return points
