"""Numbers that wrappers are made with: whole, and within limits."""

from __future__ import annotations

from tierloop.devices.errors import ConfigurationError


def check_whole(what: str, number: object, low: int, high: int, unit: str = "") -> None:
    """Raise ConfigurationError unless `number` is a whole number from `low` to `high`."""
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ConfigurationError(f"{what} {number!r}{unit}; allowed: a whole number from {low} to {high}")
