"""Checked reading of tables that came from outside (TOML files, options): types, ranges, unknown keys.

Whoever reads a table asks for each key by a method that says what is allowed, and ends with `finish`, which refuses
the keys that nobody asked for. Every refusal is a ConfigurationError that names the place (of a file, with the line),
the key, what was given and what is allowed. Whole numbers may be written as 64e9; NaN, infinities and booleans are no
numbers.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierloop.devices.errors import ConfigurationError, nearest

_MISSING: Any = object()
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LARGEST_FILE = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigurationError naming the file (and the line, where it is not TOML)."""
    try:
        if path.is_dir():
            raise ConfigurationError(f"{path}: it is a directory, not a TOML file")
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    if len(raw) > _LARGEST_FILE:
        raise ConfigurationError(f"{path}: larger than {_LARGEST_FILE} bytes, so it is no platform or profile")
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from error


def line_of(text: str, key: str) -> int:
    """The line, from 1, on which a dotted key stands in a TOML text, or that of its nearest table; 0 if none does.

    `key` may have indices for arrays of tables (`curves[1].points`). Good enough to point at a mistake: a key that is
    written in an unusual way is found by its table.
    """
    wanted = key.split(".")
    best, depth = 0, 0
    counts: dict[str, int] = {}
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        head = _HEADER.match(line)
        given = _ASSIGNMENT.match(line)
        if head is not None:
            name = head["name"].replace('"', "").replace(" ", "")
            if head["array"]:
                counts[name] = counts.get(name, -1) + 1
                name = f"{name}[{counts[name]}]"
            header = path = name.split(".")
        elif given is not None:
            path = header + given["key"].replace('"', "").replace(" ", "").split(".")
        else:
            continue
        if len(path) > depth and wanted[: len(path)] == path:
            best, depth = number, len(path)
    return best


def _line_in(place: str, key: str) -> int:
    """The line of a key in the TOML file that `place` is the path of; 0 if it is none, or has no such line."""
    if not key or not place.endswith(".toml"):
        return 0
    try:
        with open(place, "rb") as file:
            return line_of(file.read(_LARGEST_FILE).decode(errors="replace"), key)
    except OSError:
        return 0


_HEADER = re.compile(r"\s*\[(?P<array>\[?)\s*(?P<name>[^\[\]]+?)\s*\]")
_ASSIGNMENT = re.compile(r"\s*(?P<key>[A-Za-z0-9_.\"\- ]+?)\s*=")


class Table:
    """One table, and where it stands: `place` is a file or a driver, `prefix` the key of the table in it.

    Where tables of several files were put together, `origins` maps dotted keys to the file to blame instead.
    """

    def __init__(
        self, values: Mapping[str, Any], place: str, prefix: str = "", origins: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.place = place
        self.prefix = prefix
        self._origins = origins or {}
        self._asked: dict[str, None] = {}

    def error(self, key: str, problem: str) -> ConfigurationError:
        """The error for a key of this table; raise it."""
        full = known = ".".join(part for part in (self.prefix, key) if part)
        while known and known not in self._origins:
            known = known.rpartition(".")[0]
        place = self._origins.get(known, self.place)
        line = _line_in(place, full)
        place = f"{place}, line {line}" if line else place
        return ConfigurationError(f"{place}: {full}: {problem}" if full else f"{place}: {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is there; asking makes it a known key."""
        self._asked[key] = None
        return key in self.values

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The raw value. Raises if it is missing and has no default."""
        if self.has(key):
            return self.values[key]
        if default is _MISSING:
            raise self.error(key, f"missing; this table has {', '.join(sorted(self.values)) or 'no keys'}")
        return default

    def integer(self, key: str, low: int, high: int, default: int = _MISSING) -> int:
        """A whole number in [low, high]."""
        value = self.get(key, default)
        return self.check_integer(key, value, low, high)

    def check_integer(self, key: str, value: Any, low: int, high: int) -> int:
        """`value` as a whole number in [low, high]; `key` is what to blame."""
        whole = isinstance(value, float) and math.isfinite(value) and value.is_integer()
        if not (whole or isinstance(value, int)) or isinstance(value, bool):
            raise self.error(key, f"{value!r} given; allowed: a whole number from {low} to {high}")
        if not low <= value <= high:
            raise self.error(key, f"{value!r} given; allowed: {low} to {high}")
        return int(value)

    def text(self, key: str, choices: tuple[str, ...] = (), default: str = _MISSING) -> str:
        """A string, one of `choices` if there are any."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"{value!r} given; allowed: {' or '.join(map(repr, choices)) or 'a string'}")
        if choices and value not in choices:
            raise self.error(key, f"unknown value {value!r}; {nearest(value, list(choices))}")
        return value

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} given; allowed: true or false")
        return value

    def names(self, key: str, default: tuple[str, ...] = _MISSING) -> tuple[str, ...]:
        """A list of strings."""
        value = self.get(key, default)
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.error(key, f"{value!r} given; allowed: a list of strings")
        if len(set(value)) != len(value):
            raise self.error(key, f"{list(value)} names something twice")
        return tuple(value)

    def table(self, key: str) -> Table:
        """A sub-table; empty if it is not there."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"{value!r} given; allowed: a table")
        return Table(value, self.place, ".".join(part for part in (self.prefix, key) if part), self._origins)

    def tables(self, key: str) -> dict[str, Table]:
        """A table of named tables, such as [devices.NAME]; names are letters, digits, '_', '.' and '-'."""
        outer = self.table(key)
        for name in outer.values:
            if not _NAME.fullmatch(name):
                raise outer.error(name, "not a name; allowed: letters, digits, '_', '.' and '-', none of these first")
        return {name: outer.table(name) for name in outer.values}

    def rows(self, key: str) -> list[Table]:
        """A list of tables; empty if it is not there."""
        value = self.get(key, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(row, Mapping) for row in value):
            raise self.error(key, f"{value!r} given; allowed: a list of tables")
        full = ".".join(part for part in (self.prefix, key) if part)
        return [Table(row, self.place, f"{full}[{i}]", self._origins) for i, row in enumerate(value)]

    def finish(self) -> None:
        """Refuse the keys that nobody asked for."""
        for key in self.values:
            if key not in self._asked:
                raise self.error(key, f"unknown key; {nearest(str(key), list(self._asked))}")
