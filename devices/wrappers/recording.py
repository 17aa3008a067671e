"""Recordings: what stands in a file of `Recorded`. One JSON object per line, and nothing else.

The header: `tierloop_recording` (this format's version, 1), `device`, `kind`, `provenance`, `info` (SHA-256 of what the
device says of itself), `clock`, `dilation`, `memories` {name: capacity}, `queues` {executor: [numbers]}.

Every other line has `seq`, its number in the order in which it was asked for, from 0, and `event`:

- `alloc`: `at_ns`, `memory`, `region` (a number, once per memory), `nbytes`, `phantom`; a region that was there before
  the recording began has such a line where it is first named;
- `free`: `at_ns`, `memory`, `region`;
- `command`: `verb` (of a launch, the kernel), `queue`, `submitted_ns`, `started_ns`, `ended_ns`, `reads` and `writes`
  (lists of operands, these lists of segments), `after` (numbers of commands of this recording), `foreign` ([device,
  queue] of other commands that it came after), `args` (a launch's, otherwise null), `status` ("ok", or the kind of the
  error), `error` (its message), `errno`, `read` and `written` {memory: bytes}, `media_nbytes`, `flops`. Read and Copy
  have their source as the one operand of `reads`, so does Flush its target; Write and Copy have their
  target in `writes`.

A segment has `memory`, `region` and its spans: `spans` [[offset, nbytes], …], or `every` [offset, nbytes, step, count]
where they are equal and evenly spaced, or beyond 4,096 of them `many` {count, nbytes, end, sha256}. The SHA-256 of
spans is that of their int64 array, little-endian. Arrays in `args` are {dtype, shape, sha256}, functions
{function: name}.

Times are ns of the platform's clock, dilated as it is. Numbers and names of fields never change their meaning within a
version; a reader refuses versions and fields that it does not know.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Flush, Launch, Operand, read_segments, verb, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
from tierloop.devices.info import DeviceInfo
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

VERSION = 1
MANY = 4096
"""More spans than this are a digest: 100 kB of text for one segment."""
MANY_EVEN = 1 << 22
"""As many evenly spaced spans may stand for themselves, so that a short line cannot ask a reader for much memory."""


def header_line(info: DeviceInfo, virtual: bool) -> bytes:
    """The first line of a recording of that device."""
    return _line(
        {
            "tierloop_recording": VERSION,
            "device": info.name,
            "kind": info.kind,
            "provenance": info.provenance,
            "info": info_digest(info),
            "clock": "virtual" if virtual else "wall",
            "dilation": info.dilation,
            "memories": {memory.name: memory.capacity for memory in info.memories},
            "queues": {executor.name: list(executor.queues) for executor in info.executors},
        }
    )


def alloc_line(seq: int, now: int, region: Region) -> bytes:
    """A region was allocated."""
    place = {"memory": region.memory, "region": region.id, "nbytes": region.nbytes, "phantom": region.phantom}
    return _line({"seq": seq, "event": "alloc", "at_ns": now, **place})


def free_line(seq: int, now: int, region: Region) -> bytes:
    """A region was freed."""
    return _line({"seq": seq, "event": "free", "at_ns": now, "memory": region.memory, "region": region.id})


def command_line(seq: int, completion: Completion, after: list[int], foreign: list[tuple[str, int]]) -> bytes:
    """A command has ended."""
    command, error = completion.command, completion.error
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    if isinstance(command, Launch):
        reads, writes = command.reads, command.writes
    elif isinstance(command, Flush):
        reads, writes = ((command.target,),), ()
    else:
        read, written = read_segments(command), write_segments(command)
        reads, writes = ((read,) if read else ()), ((written,) if written else ())
    return _line(
        {
            "seq": seq,
            "event": "command",
            "verb": verb(command),
            "queue": completion.queue,
            "submitted_ns": completion.submitted_ns,
            "started_ns": completion.started_ns,
            "ended_ns": completion.ended_ns,
            "reads": [[_segment(s) for s in operand] for operand in reads],
            "writes": [[_segment(s) for s in operand] for operand in writes],
            "after": after,
            "foreign": [list(name) for name in foreign],
            "args": _args(command.args) if isinstance(command, Launch) else None,
            "status": "ok" if error is None else error.kind,
            "error": "" if error is None else str(error),
            "errno": error.errno if isinstance(error, DeviceError) else None,
            "read": completion.traffic.read,
            "written": completion.traffic.written,
            "media_nbytes": completion.media_nbytes,
            "flops": completion.flops,
        }
    )


def info_digest(info: DeviceInfo) -> str:
    """SHA-256 over what a device says of itself but for its notes, in a form that does not depend on order of sets."""
    said = dataclasses.asdict(dataclasses.replace(info, notes={}))
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=sorted).encode()).hexdigest()


def digest(array: NDArray[Any]) -> str:
    """SHA-256 of an array's bytes, C order, little-endian."""
    ordered = np.ascontiguousarray(array)
    return hashlib.sha256(ordered.astype(ordered.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


def _segment(segment: Segment) -> dict[str, Any]:
    region, spans = segment
    return {"memory": region.memory, "region": region.id, **_spans(spans)}


def _spans(spans: Spans) -> dict[str, Any]:
    array, count = spans.array, len(spans)
    if 2 < count <= MANY_EVEN:
        steps = array[1:] - array[:-1]
        if not steps[:, 1].any() and (steps[:, 0] == steps[0, 0]).all():
            return {"every": [*array[0].tolist(), int(steps[0, 0]), count]}
    if count <= MANY:
        return {"spans": array.tolist()}
    return {"many": {"count": count, "nbytes": spans.nbytes, "end": spans.end, "sha256": digest(array)}}


def _args(args: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, np.ndarray):
            made[field.name] = {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": digest(value)}
        elif value is None or isinstance(value, (bool, int, float, str, np.generic)):
            made[field.name] = value
        else:
            made[field.name] = {"function": getattr(value, "__qualname__", type(value).__qualname__)}
    return made


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A NumPy number as one of Python's."""
    assert isinstance(value, np.generic), f"{type(value).__name__} in a recording"
    return value.item()
