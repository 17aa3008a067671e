"""JSON files from outside: of a limited size, with a format and version, each read whole and checked before use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tierloop.devices.errors import ConfigurationError

T = TypeVar("T")
LARGEST_FILE = 1 << 24


def load_json(path: Path, what: str, of_format: str, version: int, build: Callable[[dict[str, Any]], T]) -> T:
    """What `build` makes of the table in a file; it raises ValueError for what is wrong with that.

    `what` names the content in errors. Raises ConfigurationError of one line that names the file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: no {what}: {error.strerror or error}") from error
    try:
        if len(data) > LARGEST_FILE:
            raise ValueError(f"it is larger than {LARGEST_FILE:,} bytes")
        table = json.loads(data)
        if not isinstance(table, dict) or table.get("format") != of_format or table.get("version") != version:
            raise ValueError(f"it does not say {of_format}, version {version}")
        return build(table)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no {what}: {' '.join(str(error).split())}") from error
