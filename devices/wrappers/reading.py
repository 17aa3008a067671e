"""Reading recordings: every line is checked against recording.py before anything is made of it.

Types, ranges, unknown and missing fields, versions, numbers that repeat or name nothing, regions that are not there,
spans outside their region, times that run backwards: each is a ValueError that names the file, the line, the field and
what is allowed. A last line without its end is what a crash leaves: it is reported as `truncated`, not an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tierloop.devices.commands import VERBS
from tierloop.devices.errors import DeviceError
from tierloop.devices.kernels.contract import KERNELS
from tierloop.devices.spans import Spans
from tierloop.devices.wrappers.entries import (
    Alloc,
    Argument,
    Array,
    Ended,
    Entry,
    Free,
    Function,
    Header,
    ManySpans,
    Place,
    Recording,
)
from tierloop.devices.wrappers.recording import MANY, MANY_EVEN, VERSION

LONGEST_LINE = 1 << 26
_MOST = 1 << 62


def read_recording(path: Path) -> Recording:
    """Read and check a recording. Raises ValueError (see the top of the file) or OSError."""
    header: Header | None = None
    checked = _Checked()
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            fields = _Fields(path, number)
            if len(line) > LONGEST_LINE:
                fields.wrong("", f"longer than {LONGEST_LINE} bytes")
            if not line.endswith(b"\n"):
                if header is None:
                    fields.wrong("", "the header is not whole")
                return Recording(header, tuple(checked.entries), truncated=True)
            fields.load(line)
            if header is None:
                header = _header(fields)
                checked.begin(header)
            else:
                checked.add(fields)
            fields.finish()
    if header is None:
        raise ValueError(f"{path}: empty: a recording begins with its header")
    return Recording(header, tuple(checked.entries))


class _Fields:
    """One line; every field that is asked for is checked, and `finish` refuses the others."""

    def __init__(self, path: Path, number: int, prefix: str = "") -> None:
        self._place = f"{path}: line {number}"
        self._prefix = prefix
        self.values: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._path, self._number = path, number

    def load(self, line: bytes) -> None:
        try:
            values = json.loads(line, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._place}: no JSON: {error}") from error
        if not isinstance(values, dict):
            self.wrong("", "a line is one JSON object")
        self.values = values

    def _constant(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    def of(self, value: Any, prefix: str) -> _Fields:
        """The same for an object within the line."""
        if not isinstance(value, dict):
            self.wrong(prefix, f"{value!r}; allowed: an object")
        inner = _Fields(self._path, self._number, prefix)
        inner.values = value
        return inner

    def wrong(self, key: str, problem: str) -> NoReturn:
        full = ".".join(part for part in (self._prefix, key) if part)
        raise ValueError(f"{self._place}: {full}: {problem}" if full else f"{self._place}: {problem}")

    def get(self, key: str) -> Any:
        self._asked.add(key)
        if key not in self.values:
            self.wrong(key, f"missing; the line has {', '.join(sorted(self.values)) or 'nothing'}")
        return self.values[key]

    def has(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, low: int = 0, high: int = _MOST) -> int:
        return self.number(key, self.get(key), low, high)

    def number(self, key: str, value: Any, low: int = 0, high: int = _MOST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            self.wrong(key, f"{value!r}; allowed: a whole number from {low} to below {high}")
        return value

    def text(self, key: str, allowed: frozenset[str] | None = None) -> str:
        value = self.get(key)
        if not isinstance(value, str) or (allowed is not None and value not in allowed):
            self.wrong(key, f"{value!r}; allowed: {', '.join(sorted(allowed)) if allowed else 'text'}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.wrong(key, f"{value!r}; allowed: true or false")
        return value

    def sha256(self, key: str) -> str:
        value = self.text(key)
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            self.wrong(key, f"{value!r}; allowed: 64 hexadecimal digits")
        return value

    def list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            self.wrong(key, f"{value!r}; allowed: a list")
        return value

    def pairs(self, key: str, check: Callable[[str, Any], Any]) -> tuple[tuple[str, Any], ...]:
        """An object with values of one kind, as pairs."""
        inner = self.of(self.get(key), key)
        return tuple((name, check(f"{key}.{name}", value)) for name, value in inner.values.items())

    def finish(self) -> None:
        for key in self.values:
            if key not in self._asked:
                self.wrong(key, f"unknown field; known here: {', '.join(sorted(self._asked))}")


def _header(fields: _Fields) -> Header:
    version = fields.integer("tierloop_recording")
    if version != VERSION:
        fields.wrong("tierloop_recording", f"version {version}; this reader knows {VERSION}")
    provenance = fields.text("provenance", frozenset({"real", "emulated"}))
    clock = fields.text("clock", frozenset({"virtual", "wall"}))

    def numbers(key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            fields.wrong(key, f"{value!r}; allowed: a list of queues")
        return tuple(fields.number(key, one) for one in value)

    return Header(
        version,
        fields.text("device"),
        fields.text("kind"),
        "real" if provenance == "real" else "emulated",
        fields.sha256("info"),
        "virtual" if clock == "virtual" else "wall",
        fields.integer("dilation", 1),
        fields.pairs("memories", fields.number),
        fields.pairs("queues", numbers),
    )


def _kinds(base: type[DeviceError]) -> frozenset[str]:
    return frozenset({base.kind}).union(*(_kinds(kind) for kind in base.__subclasses__()))


class _Checked:
    """The entries so far, and what later ones may name."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._seqs: set[int] = set()
        self._sizes: dict[tuple[str, int], int] = {}
        self._freed: set[tuple[str, int]] = set()
        self._queues: frozenset[int] = frozenset()
        self._memories: frozenset[str] = frozenset()
        self._status: frozenset[str] = frozenset()

    def begin(self, header: Header) -> None:
        self._queues = frozenset(queue for _, queues in header.queues for queue in queues)
        self._memories = frozenset(name for name, _ in header.memories)
        self._status = _kinds(DeviceError) | {"ok"}

    def add(self, fields: _Fields) -> None:
        seq = fields.integer("seq")
        if seq in self._seqs:
            fields.wrong("seq", f"{seq} is there twice")
        self._seqs.add(seq)
        event = fields.text("event", frozenset({"alloc", "free", "command"}))
        entry: Entry
        if event == "alloc":
            entry = self._alloc(seq, fields)
        elif event == "free":
            entry = self._free(seq, fields)
        else:
            entry = self._ended(seq, fields)
        self.entries.append(entry)

    def _alloc(self, seq: int, fields: _Fields) -> Alloc:
        memory, region = fields.text("memory", self._memories), fields.integer("region")
        if (memory, region) in self._sizes:
            fields.wrong("region", f"region {region} of {memory} was allocated before")
        nbytes = self._sizes[memory, region] = fields.integer("nbytes")
        return Alloc(seq, fields.integer("at_ns"), memory, region, nbytes, fields.flag("phantom"))

    def _free(self, seq: int, fields: _Fields) -> Free:
        memory, region = fields.text("memory", self._memories), fields.integer("region")
        self._live(fields, "region", memory, region)
        self._freed.add((memory, region))
        return Free(seq, fields.integer("at_ns"), memory, region)

    def _ended(self, seq: int, fields: _Fields) -> Ended:
        verb = fields.text("verb", frozenset(VERBS.values()) | KERNELS)
        queue = fields.integer("queue")
        if queue not in self._queues:
            fields.wrong("queue", f"{queue}; allowed: {sorted(self._queues)}")
        submitted = fields.integer("submitted_ns")
        started = fields.integer("started_ns", submitted)
        ended = fields.integer("ended_ns", started)
        after = tuple(fields.number("after", one, 0, seq) for one in fields.list("after"))
        foreign = []
        for one in fields.list("foreign"):
            if not isinstance(one, list) or len(one) != 2 or not isinstance(one[0], str):
                fields.wrong("foreign", f"{one!r}; allowed: [device, queue]")
            foreign.append((one[0], fields.number("foreign", one[1])))
        errno = fields.get("errno")
        return Ended(
            seq,
            verb,
            queue,
            submitted,
            started,
            ended,
            self._operands(fields, "reads"),
            self._operands(fields, "writes"),
            after,
            tuple(foreign),
            _arguments(fields, verb in KERNELS),
            fields.text("status", self._status),
            fields.text("error"),
            None if errno is None else fields.number("errno", errno),
            fields.pairs("read", fields.number),
            fields.pairs("written", fields.number),
            fields.integer("media_nbytes"),
            fields.integer("flops"),
        )

    def _operands(self, fields: _Fields, key: str) -> tuple[tuple[Place, ...], ...]:
        operands = []
        for operand in fields.list(key):
            if not isinstance(operand, list):
                fields.wrong(key, f"{operand!r}; allowed: a list of segments")
            operands.append(tuple(self._place(fields.of(one, key)) for one in operand))
        return tuple(operands)

    def _place(self, fields: _Fields) -> Place:
        memory, region = fields.text("memory"), fields.integer("region")
        spans = _spans(fields)
        fields.finish()
        if memory in self._memories:
            self._live(fields, "region", memory, region)
            nbytes, end = self._sizes[memory, region], spans.end
            if end > nbytes:
                fields.wrong("spans", f"end at {end}, outside the {nbytes} bytes of region {region} of {memory}")
        return Place(memory, region, spans)

    def _live(self, fields: _Fields, key: str, memory: str, region: int) -> None:
        if (memory, region) not in self._sizes:
            fields.wrong(key, f"region {region} of {memory} was not allocated before")
        if (memory, region) in self._freed:
            fields.wrong(key, f"region {region} of {memory} was freed before")


def _spans(fields: _Fields) -> Spans | ManySpans:
    if fields.has("many"):
        many = fields.of(fields.get("many"), "many")
        made = ManySpans(
            many.integer("count", MANY + 1), many.integer("nbytes"), many.integer("end"), many.sha256("sha256")
        )
        many.finish()
        return made
    key = "every" if fields.has("every") else "spans"
    try:
        if key == "every":
            offset, nbytes, step, count = fields.list("every")
            for low, high, value in ((0, _MOST, offset), (0, _MOST, nbytes), (-_MOST, _MOST, step)):
                fields.number("every", value, low, high)
            fields.number("every", count, 3, MANY_EVEN + 1)
            fields.number("every", offset + (count - 1) * step)
            return Spans.equal(offset + step * np.arange(count, dtype=np.int64), nbytes)
        rows = fields.list("spans")
        if any(not isinstance(row, list) or len(row) != 2 for row in rows):
            fields.wrong("spans", "allowed: a list of [offset, nbytes]")
        return Spans([(fields.number("spans", o), fields.number("spans", n)) for o, n in rows])
    except (ValueError, OverflowError) as error:
        if "line " in str(error):
            raise
        fields.wrong(key, str(error))


def _arguments(fields: _Fields, launch: bool) -> tuple[tuple[str, Argument], ...]:
    if not launch:
        if fields.get("args") is not None:
            fields.wrong("args", "only launches have any")
        return ()

    def argument(key: str, value: Any) -> Argument:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        inner = fields.of(value, key)
        made: Array | Function
        if inner.has("function"):
            made = Function(inner.text("function"))
        else:
            shape = tuple(inner.number("shape", size) for size in inner.list("shape"))
            made = Array(inner.text("dtype"), shape, inner.sha256("sha256"))
        inner.finish()
        return made

    return fields.pairs("args", argument)
