"""Traces: what ran where and when, as Chrome Trace Event JSON that opens in ui.perfetto.dev.

Made by whoever wants a trace and handed to `compare`, which calls `begin` and `end` around each run. One file holds
several runs, each a process of its own. Within it there is one track per queue of each executor, one per link and
direction, and whatever else was named in `span`. What must hold:

- On every track the slices are disjoint or nested. Commands of one queue never overlap. A link carries several
  commands at a time, so stretches that overlap move to a further track of the same link (`… #2`).
- A slice `wait` fills the time in which a command stood at the head of its queue and waited for its `after`. A flow
  leads to it from the dependency that ended last, which is the one that released it, if that was in another queue.
- Times are µs with three decimals: exact nanoseconds, scaled back by the dilation of the platform, rounded down.
- The bytes of the file depend on nothing but the events: under the virtual clock the same run gives the same file.
- Events beyond `limit` are dropped, counted, and named in the file: `otherData.dropped`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from typing import NamedTuple

from tierloop.devices.commands import Launch, verb
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform
from tierloop.devices.site import Occupancy

LIMIT = 300_000
"""Events that a recorder keeps: about 150 MB of JSON."""


class _Ran(NamedTuple):
    """A command that ended, without what it points to: operands and buffers must not live as long as the trace."""

    lane: tuple[str, int]
    name: str
    submitted_ns: int
    started_ns: int
    ended_ns: int
    read: dict[str, int]
    written: dict[str, int]
    flops: int
    error: str
    after: tuple[str, int, int, int] | None


class _Span(NamedTuple):
    track: str
    name: str
    start_ns: int
    end_ns: int


class _Run:
    """One run: a process in the trace."""

    def __init__(self, recorder: TraceRecorder, platform: Platform, process: str) -> None:
        self.process = process
        self.dilation = platform.dilation
        self.clock = f"{'virtual' if platform.clock.virtual else 'wall'} clock, σ = {platform.dilation}"
        self.lanes = {
            (device.info.name, queue): f"{device.info.name} {executor.name} queue {queue}"
            for device, executor in platform.executors()
            for queue in executor.queues
        }
        self.links = list(platform.site.links)
        self.ran: list[_Ran] = []
        self.occupied: list[Occupancy] = []
        self.spans: list[_Span] = []
        self._recorder = recorder
        self._site = platform.site
        self._site.observers.append(self.completed)
        self._site.link_observers.append(self.carried)

    def completed(self, completion: Completion) -> None:
        if not self._recorder.room():
            return
        command, last = completion.command, None
        lane = (completion.device, completion.queue)
        for earlier in completion.after:
            if (earlier.device, earlier.queue) != lane and (last is None or earlier.ended_ns > last.ended_ns):
                last = earlier
        dense = isinstance(command, Launch) and isinstance(command.args, Dense)
        self.ran.append(
            _Ran(
                lane,
                command.args.label if dense else verb(command),  # type: ignore[union-attr]
                completion.submitted_ns,
                completion.started_ns,
                completion.ended_ns,
                completion.traffic.read,
                completion.traffic.written,
                completion.flops,
                "" if completion.error is None else str(completion.error),
                None if last is None else (last.device, last.queue, last.started_ns, last.ended_ns),
            )
        )

    def carried(self, occupancy: Occupancy) -> None:
        if self._recorder.room():
            self.occupied.append(occupancy)

    def detach(self) -> None:
        """Stop watching the platform."""
        if self.completed in self._site.observers:
            self._site.observers.remove(self.completed)
            self._site.link_observers.remove(self.carried)


class TraceRecorder:
    """Records any number of runs, up to `limit` events in all."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._runs: list[_Run] = []
        self.recorded = 0
        self.dropped = 0

    def begin(self, platform: Platform, title: str) -> None:
        """Begin a process named after the platform and `title`; record what the platform does from now on."""
        self.end()
        self._runs.append(_Run(self, platform, f"{platform.name}: {title}"))

    def end(self) -> None:
        """Record no more of the present run; a command that has not ended is not in the trace."""
        if self._runs:
            self._runs[-1].detach()

    def span(self, track: str, name: str, start_ns: int, end_ns: int) -> None:
        """A slice of the caller's own on the present process (a step, a phase), in ns of the platform's clock."""
        if self._runs and self.room():
            self._runs[-1].spans.append(_Span(track, name, start_ns, end_ns))

    def room(self) -> bool:
        """Whether one more event fits; counts it either way."""
        if self.recorded < self._limit:
            self.recorded += 1
            return True
        self.dropped += 1
        return False

    def to_json(self) -> str:
        """The whole trace; one event per line, tracks in the order of the platform."""
        events = ",\n".join(line for pid, run in enumerate(self._runs, start=1) for line in _events(pid, run))
        other = {"dropped": self.dropped, "runs": [f"{run.process}: {run.clock}" for run in self._runs]}
        head = f'"displayTimeUnit": "ns", "otherData": {json.dumps(other, ensure_ascii=False)}'
        return f'{{{head}, "traceEvents": [\n{events}\n]}}\n'


def _events(pid: int, run: _Run) -> Iterator[str]:
    """The lines of one process: names first, then the tracks one after the other."""
    yield _named("process_name", pid, 0, run.process)
    yield f'{{"ph": "M", "name": "process_sort_index", "pid": {pid}, "tid": 0, "args": {{"sort_index": {pid}}}}}'
    labels = json.dumps({"labels": run.clock}, ensure_ascii=False)
    yield f'{{"ph": "M", "name": "process_labels", "pid": {pid}, "tid": 0, "args": {labels}}}'
    tids: dict[object, int] = {}
    own: dict[str, list[_Span]] = {}
    for span in run.spans:
        own.setdefault(span.track, []).append(span)
    for track, spans in own.items():
        tid = tids[track] = len(tids) + 1
        yield from _track(pid, tid, track)
        for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
            yield _slice(pid, tid, "phase", span.name, span.start_ns, span.end_ns, run.dilation, "{}")
    for lane, label in run.lanes.items():
        tids[lane] = len(tids) + 1
        yield from _track(pid, tids[lane], label)
    yield from _commands(pid, run, tids)
    yield from _links(pid, run, len(tids))


def _commands(pid: int, run: _Run, tids: dict[object, int]) -> Iterator[str]:
    free: dict[tuple[str, int], int] = {}
    flow = 0
    for ran in run.ran:
        tid = tids.get(ran.lane)
        if tid is None:
            tid = tids[ran.lane] = len(tids) + 1
            yield from _track(pid, tid, f"{ran.lane[0]} queue {ran.lane[1]}")
        head = max(ran.submitted_ns, free.get(ran.lane, 0))
        free[ran.lane] = ran.ended_ns
        if ran.started_ns > head:
            yield _slice(pid, tid, "wait", "wait", head, ran.started_ns, run.dilation, "{}")
        args = {
            **{f"read from {memory}": nbytes for memory, nbytes in ran.read.items()},
            **{f"written to {memory}": nbytes for memory, nbytes in ran.written.items()},
            **({"flops": ran.flops} if ran.flops else {}),
            **({"error": ran.error} if ran.error else {}),
            "submitted_ns": ran.submitted_ns // run.dilation,
        }
        text = json.dumps(args, ensure_ascii=False)
        kind = "failed" if ran.error else "command"
        yield _slice(pid, tid, kind, ran.name, ran.started_ns, ran.ended_ns, run.dilation, text)
        if ran.after is not None and ran.after[:2] in tids and ran.after[2] >= 0:
            flow += 1
            ident = f'"cat": "after", "name": "after", "id": "{pid}.{flow}", "pid": {pid}'
            source = tids[ran.after[:2]]
            yield f'{{"ph": "s", {ident}, "tid": {source}, "ts": {_us(ran.after[2], run.dilation)}}}'
            yield f'{{"ph": "f", "bp": "e", {ident}, "tid": {tid}, "ts": {_us(ran.started_ns, run.dilation)}}}'


def _links(pid: int, run: _Run, last_tid: int) -> Iterator[str]:
    """Stretches of each link and direction, first fit: a stretch goes to the lowest track that is free at its start."""
    lines: dict[tuple[str, str], list[Occupancy]] = {
        (link, direction): [] for link in run.links for direction in ("forward", "back")
    }
    for occupancy in run.occupied:
        lines.setdefault((occupancy.link, occupancy.direction), []).append(occupancy)
    for (link, direction), stretches in lines.items():
        first, used = last_tid + 1, 1
        yield from _track(pid, first, f"link {link} {direction}")
        idle: list[int] = [0]
        busy: list[tuple[int, int]] = []
        for start, end, stretch in sorted(
            ((o.start_ns, o.end_ns, o) for o in stretches), key=lambda item: (item[0], item[1])
        ):
            while busy and busy[0][0] <= start:
                heapq.heappush(idle, heapq.heappop(busy)[1])
            if not idle:
                idle.append(used)
                yield from _track(pid, first + used, f"link {link} {direction} #{used + 1}")
                used += 1
            line = heapq.heappop(idle)
            heapq.heappush(busy, (end, line))
            args = json.dumps({"bytes": stretch.nbytes})
            yield _slice(pid, first + line, "link", stretch.label, start, end, run.dilation, args)
        last_tid += used


def _track(pid: int, tid: int, label: str) -> Iterator[str]:
    yield _named("thread_name", pid, tid, label)
    yield f'{{"ph": "M", "name": "thread_sort_index", "pid": {pid}, "tid": {tid}, "args": {{"sort_index": {tid}}}}}'


def _named(kind: str, pid: int, tid: int, label: str) -> str:
    name = json.dumps(label, ensure_ascii=False)
    return f'{{"ph": "M", "name": "{kind}", "pid": {pid}, "tid": {tid}, "args": {{"name": {name}}}}}'


def _slice(pid: int, tid: int, kind: str, name: str, start_ns: int, end_ns: int, sigma: int, args: str) -> str:
    start, end = start_ns // sigma, end_ns // sigma
    where = f'"pid": {pid}, "tid": {tid}, "ts": {_us(start, 1)}, "dur": {_us(end - start, 1)}'
    return f'{{"ph": "X", "cat": "{kind}", "name": {json.dumps(name, ensure_ascii=False)}, {where}, "args": {args}}}'


def _us(time_ns: int, sigma: int) -> str:
    """ns as µs with exactly three decimals: a float would lose nanoseconds after 104 days and print 1e-05."""
    whole, part = divmod(time_ns // sigma, 1000)
    return f"{whole}.{part:03d}"
