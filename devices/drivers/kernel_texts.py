"""What a kernel shows below /sys and /proc: texts, names and numbers, and nothing where it shows none.

Nothing here raises: whoever looks around takes what is there. Numbers are plain digits; Python reads more than that as
a number (signs, underscores, digits of other scripts), and it fails on thousands of digits.
"""

from __future__ import annotations

from tierloop.devices.system import System

_MOST_DIGITS = 18
"""What fits 63 bits whatever the digits are."""


def text_in(system: System, path: str) -> str:
    """The text of a small file; empty if it is not there or no text."""
    try:
        return system.read_text(path)
    except (OSError, UnicodeDecodeError):
        return ""


def names_in(system: System, folder: str) -> list[str]:
    """The names in a folder; none if it is not there."""
    try:
        return system.listdir(folder)
    except OSError:
        return []


def number_in(system: System, path: str) -> int | None:
    """The number in a small file; None if it is not there or no number."""
    return number_of(text_in(system, path))


def number_of(text: str) -> int | None:
    """The number that a text is, spaces around it left out; None for everything else."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None
