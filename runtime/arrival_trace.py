"""Recorded traces of requests: files that say when each came and how long it was.

`read` knows three formats by their first line:

- JSON lines as Mooncake publishes them, an object per request: `timestamp` in ms, `input_length`, `output_length`;
  other fields, `hash_ids` among them, are ignored.
- CSV with a header, such as BurstGPT's (`Timestamp` in s, `Request tokens`, `Response tokens`) and Azure's (`TIMESTAMP`
  as date and time, `ContextTokens`, `GeneratedTokens`).
- Our own, which `write` makes: a line with format and version, then an object per request with its turns.

A recorded trace begins with its first request: times are counted from it. Our own format keeps its times as they are.
Nothing in a file is trusted: every line is checked, an error says which, and nothing is cut or guessed. Blank lines are
skipped.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, Context, Decimal
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.arrivals import MOST_REQUESTS, MOST_TOKENS, Arrival, Turn, check, check_one

FORMAT, VERSION = "tierloop-arrivals", 1
LONGEST_LINE = 1 << 24
"""Bytes of one line."""
LARGEST_SCALE = 10**6

_DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN)
_LATEST_NS = 1 << 63
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_KNOWN = {
    "time": ("timestamp", "arrived_at", "arrival_time"),
    "prompt": (
        "request tokens", "contexttokens", "input_length", "prompt_tokens", "input_tokens", "num_prefill_tokens",
    ),
    "output": (
        "response tokens", "generatedtokens", "output_length", "output_tokens", "completion_tokens",
        "num_decode_tokens",
    ),
}  # fmt: skip
"""Names of columns that are recognised, in lower case."""


@dataclass(frozen=True)
class Columns:
    """Names of columns or fields of a recorded trace, in any case; one that is empty is recognised by itself.

    `unit` is that of times which are numbers: s in CSV and ms in JSON lines unless given.
    """

    time: str = ""
    prompt: str = ""
    output: str = ""
    unit: Literal["s", "ms", "us", "ns"] | None = None


RECOGNISED = Columns()


def read(
    path: Path,
    *,
    limit: int | None = None,
    scale: float = 1.0,
    sort: bool = False,
    skip_empty: bool = False,
    columns: Columns = RECOGNISED,
    name: str = "trace",
) -> tuple[Arrival, ...]:
    """The first `limit` requests of a file, or all; those of a recorded trace are called `name`-0, `name`-1, ….

    Times, and pauses between turns, are multiplied by `scale`: at 0.5 requests come twice as fast. `sort` takes a file
    whose times fall. `skip_empty` leaves out recorded requests that failed, as a prompt or an output of 0 tokens shows.
    Raises ConfigurationError with the file and the line.
    """
    if not 0 < scale <= LARGEST_SCALE:
        raise ConfigurationError(f"the scale of times is {scale}; it must be above 0 and at most {LARGEST_SCALE:,}")
    if limit is not None and not 1 <= limit <= MOST_REQUESTS:
        raise ConfigurationError(f"the limit is {limit} requests; it must be from 1 to {MOST_REQUESTS:,}")
    if columns.unit is not None and columns.unit not in _NS:
        raise ConfigurationError(f"the unit of times is {columns.unit!r}; it must be one of {', '.join(_NS)}")
    try:
        with path.open("rb") as file:
            lines = _Lines(file)
            try:
                own, taken = _taken(lines, columns, skip_empty, name, limit, sort)
            except _Wrong as error:
                where = f"line {lines.number}" if lines.number else "no trace of requests"
                raise ConfigurationError(f"{path}: {where}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: no trace of requests: {error.strerror or error}") from error
    taken.sort(key=lambda arrival: arrival.at_ns)
    start_ns = 0 if own else taken[0].at_ns
    arrivals = tuple(_timed(arrival, start_ns, scale) for arrival in taken)
    try:
        check(arrivals)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return arrivals


def write(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write requests in our own format; `read` gives them back as they are. Raises ConfigurationError."""
    text = text_of(arrivals)
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"{path}: the trace cannot be written: {error.strerror or error}") from error


def text_of(arrivals: Sequence[Arrival]) -> str:
    """What `write` writes. Raises ConfigurationError."""
    check(arrivals)
    lines = [json.dumps({"format": FORMAT, "version": VERSION}), *(json.dumps(_as_dict(a)) for a in arrivals)]
    longest = max(map(len, lines))
    if longest >= LONGEST_LINE:
        raise ConfigurationError(
            f"a request takes {longest:,} bytes in a trace; less than {LONGEST_LINE:,} are allowed"
        )
    return "\n".join(lines) + "\n"


class _Wrong(ValueError):
    """What is wrong with a line, without its number."""


class _Lines:
    """The lines of a file as text; `number` is that of the last one, from 1."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_LINE + 1):
            self.number += 1
            if len(line) > LONGEST_LINE:
                raise _Wrong(f"it is longer than {LONGEST_LINE:,} bytes")
            try:
                text = line.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _Wrong(f"it is not UTF-8 (byte {error.start})") from error
            if text.strip():
                yield text


def _taken(
    lines: _Lines, columns: Columns, skip_empty: bool, name: str, limit: int | None, sort: bool
) -> tuple[bool, list[Arrival]]:
    """Whether the file is in our own format, and its requests with the times of the file. Raises _Wrong."""
    taken: list[Arrival] = []
    own, requests = _requests(lines, columns, skip_empty)
    for arrival in requests:
        if len(taken) == MOST_REQUESTS:
            raise _Wrong(f"there are more than {MOST_REQUESTS:,} requests; limit=N takes the first N")
        if taken and arrival.at_ns < taken[-1].at_ns and not sort:
            early = (taken[-1].at_ns - arrival.at_ns) / 1e9
            raise _Wrong(f"it comes {early:g} s before the request above it; sort=True takes requests by their times")
        taken.append(arrival if own else replace(arrival, name=f"{name}-{len(taken)}"))
        if len(taken) == limit:
            break
    if not taken:
        raise _Wrong("there is no request up to here, the end of the file")
    return own, taken


def _requests(lines: _Lines, columns: Columns, skip_empty: bool) -> tuple[bool, Iterator[Arrival]]:
    remaining = iter(lines)
    first = next(remaining, None)
    if first is None:
        raise _Wrong("there is nothing in it")
    if not first.lstrip().startswith("{"):
        return False, _of_csv(chain([first], remaining), columns, skip_empty)
    table = _object(first)
    if "format" not in table:
        return False, _of_objects(chain([first], remaining), columns, skip_empty)
    if table != {"format": FORMAT, "version": VERSION}:
        raise _Wrong(f"it does not say {FORMAT}, version {VERSION}, and nothing else")
    return True, _of_own(remaining)


def _of_csv(lines: Iterator[str], columns: Columns, skip_empty: bool) -> Iterator[Arrival]:
    rows = csv.reader(lines, strict=True)
    try:
        header = [cell.strip().lower() for cell in next(rows)]
        time, prompt, output = (header.index(_column(header, columns, role)) for role in _KNOWN)
        for row in rows:
            if len(row) != len(header):
                raise _Wrong(f"it has {len(row)} cells; the header has {len(header)}")
            yield from _recorded(row[time], row[prompt], row[output], columns.unit or "s", skip_empty)
    except csv.Error as error:
        raise _Wrong(f"it is not CSV: {error}") from error


def _of_objects(lines: Iterator[str], columns: Columns, skip_empty: bool) -> Iterator[Arrival]:
    for line in lines:
        table = {key.strip().lower(): value for key, value in _object(line).items()}
        time, prompt, output = (table[_column(list(table), columns, role)] for role in _KNOWN)
        yield from _recorded(time, prompt, output, columns.unit or "ms", skip_empty)


def _column(names: Sequence[str], columns: Columns, role: str) -> str:
    """The one of the names that plays a role."""
    wanted: str = getattr(columns, role).strip().lower()
    found = [name for name in names if name in ((wanted,) if wanted else _KNOWN[role])]
    if len(found) != 1:
        known = repr(wanted) if wanted else " or ".join(map(repr, _KNOWN[role]))
        among = ", ".join(_shown(name) for name in names[:16])
        raise _Wrong(f"there must be one field for the {role} ({known}), and there are {len(found)} among {among}")
    return found[0]


def _recorded(time: object, prompt: object, output: object, unit: str, skip_empty: bool) -> Iterator[Arrival]:
    at_ns = _time_ns(time, unit)
    turn = Turn(_tokens("prompt", prompt), _tokens("output", output))
    if turn.prompt_tokens and turn.output_tokens:
        arrival = Arrival("recorded", at_ns, (turn,))
        if arrival.total_tokens > MOST_TOKENS:
            raise _Wrong(f"the request has {arrival.total_tokens:,} tokens; at most {MOST_TOKENS:,} are allowed")
        yield arrival
    elif not skip_empty:
        raise _Wrong(
            f"prompt and output are {turn.prompt_tokens:,} and {turn.output_tokens:,} tokens; each must be at least 1, "
            "and skip_empty=True leaves out requests that are not"
        )


def _time_ns(value: object, unit: str) -> int:
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError as error:
            raise _Wrong(f"the time {_shown(value)} is neither a number nor a date and time") from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        at_ns = Decimal((moment - _EPOCH) // timedelta(microseconds=1) * 1000)
    else:
        at_ns = _DECIMAL.multiply(_number("time", value), Decimal(_NS[unit]))
    if not 0 <= at_ns <= _LATEST_NS:
        raise _Wrong(f"the time is {_shown(value)}; it must be from 0 to {_LATEST_NS // _NS[unit]:,} {unit}")
    return int(_DECIMAL.to_integral_value(at_ns))


def _tokens(what: str, value: object) -> int:
    number = _number(what, value)
    if not 0 <= number <= MOST_TOKENS or number != _DECIMAL.to_integral_value(number):
        raise _Wrong(f"the {what} is {_shown(value)} tokens; it must be a whole number, at most {MOST_TOKENS:,}")
    return int(number)


def _number(what: str, value: object) -> Decimal:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        try:
            return _DECIMAL.create_decimal(value.strip())
        except ArithmeticError as error:
            raise _Wrong(f"the {what} {_shown(value)} is too large") from error
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    raise _Wrong(f"the {what} is {_shown(value)}; it must be a number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _object(line: str) -> dict[str, Any]:
    """One line as a JSON object; a number with a point is a string, for it to be taken as exactly as it stands."""
    try:
        table = json.loads(line, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"it is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise _Wrong("it is not a JSON object")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _of_own(lines: Iterator[str]) -> Iterator[Arrival]:
    names: set[str] = set()
    for line in lines:
        arrival = _own(_object(line))
        try:
            check_one(arrival)
        except ConfigurationError as error:
            raise _Wrong(str(error)) from error
        if arrival.name in names:
            raise _Wrong(f"there is another request named {arrival.name!r}")
        names.add(arrival.name)
        yield arrival


def _own(table: dict[str, Any]) -> Arrival:
    """A request of our own format: of the right fields and types, its numbers not yet checked."""
    _check_fields("a request", table, {"name": str, "at_ns": int, "turns": list}, {"kind": str, "tokens": list})
    turns = []
    for turn in table["turns"]:
        if not isinstance(turn, dict):
            raise _Wrong(f"a turn is {_shown(turn)}; it must be an object")
        _check_fields("a turn", turn, {"prompt_tokens": int, "output_tokens": int}, {"after_ns": int})
        turns.append(Turn(**turn))
    tokens = table.get("tokens")
    if tokens is not None and not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise _Wrong(f"tokens are not all whole numbers from 0 to {(1 << 31) - 1:,}")
    given = None if tokens is None else tuple(tokens)
    return Arrival(table["name"], table["at_ns"], tuple(turns), given, table.get("kind", ""))


def _check_fields(what: str, table: dict[str, Any], needed: dict[str, type], more: dict[str, type]) -> None:
    kinds = {**needed, **more}
    for key in table:
        if key not in kinds:
            raise _Wrong(f"{what} has the field {_shown(key)}; its fields are {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key not in table and key in needed:
            raise _Wrong(f"{what} has no field {key!r}")
        if key in table and type(table[key]) is not kind:
            raise _Wrong(f"{key} of {what} is {_shown(table[key])}; it must be of type {kind.__name__}")


def _as_dict(arrival: Arrival) -> dict[str, Any]:
    turns = [
        {"prompt_tokens": turn.prompt_tokens, "output_tokens": turn.output_tokens}
        | ({"after_ns": turn.after_ns} if turn.after_ns else {})
        for turn in arrival.turns
    ]
    table: dict[str, Any] = {"name": arrival.name, "at_ns": arrival.at_ns, "turns": turns}
    if arrival.kind:
        table["kind"] = arrival.kind
    if arrival.tokens is not None:
        table["tokens"] = arrival.tokens
    return table


def _timed(arrival: Arrival, start_ns: int, scale: float) -> Arrival:
    """The request with times from the start of the run."""
    turns = tuple(replace(turn, after_ns=_scaled(turn.after_ns, scale)) for turn in arrival.turns)
    return replace(arrival, at_ns=_scaled(arrival.at_ns - start_ns, scale), turns=turns)


def _scaled(time_ns: int, scale: float) -> int:
    return int(_DECIMAL.to_integral_value(_DECIMAL.multiply(Decimal(time_ns), Decimal(scale))))
