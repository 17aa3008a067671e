"""Options of a device: what a platform file says under the device's name, checked key by key."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tierloop.devices.errors import ConfigurationError, nearest

A_PATH = "a path is a string that is not empty, without a zero byte"
"""What is allowed where `is_path` says no."""


def integer(name: str, options: dict[str, Any], key: str, default: int, least: int = 0, most: int | None = None) -> int:
    """An integer option of at least `least`, and at most `most`. Raises ConfigurationError."""
    given = options.get(key, default)
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigurationError(f"{name}: {key} = {given!r}; allowed: an integer of at least {least}")
    if most is not None and given > most:
        raise ConfigurationError(f"{name}: {key} = {given}; allowed: an integer from {least} to {most}")
    return given


def names(name: str, options: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or the keys of a table of them (as the registry gives routes). Raises ConfigurationError."""
    given = options.get(key, ())
    if (
        isinstance(given, str)
        or not isinstance(given, Iterable)
        or not all(isinstance(one, str) and one for one in given)
    ):
        raise ConfigurationError(f"{name}: {key} = {given!r}; allowed: a list of names")
    return tuple(given)


def is_path(value: Any) -> bool:
    """Whether it is a string that the operating system can take for a path."""
    try:
        return isinstance(value, str) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def refuse_unknown(name: str, options: dict[str, Any], known: list[str]) -> None:
    """Raises ConfigurationError for an option that the driver does not have."""
    for key in options:
        if key not in known:
            raise ConfigurationError(
                f"{name}: option {key!r} is unknown: {nearest(key, known)}; options: {', '.join(known) or 'none'}"
            )
