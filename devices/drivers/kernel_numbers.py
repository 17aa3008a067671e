"""Numbers as a kernel writes them below /sys and /proc: plain digits. Whatever else stands there is no number.

Python reads more than that: signs, underscores, digits of other scripts; and it fails on thousands of digits.
"""

from __future__ import annotations

_MOST_DIGITS = 18
"""What fits 63 bits whatever the digits are."""


def number_of(text: str) -> int | None:
    """The number that a text is, spaces around it left out; None for everything else."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None
