"""What a guest says, and what went wrong with it: its console, what the command prints, and a reason in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 15
_MOST_NBYTES = 1 << 16


class Tail:
    """A file that grows in the guest, copied to a stream of the host as it does."""

    def __init__(self, path: Path, to: BinaryIO | None) -> None:
        self._path = path
        self._to = to
        self._offset = 0

    def copy(self) -> int:
        """Copy what is new; returns how many bytes that were."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return 0
        self._offset += len(new)
        if new and self._to is not None:
            self._to.write(new)
            self._to.flush()
        return len(new)


def last_lines(path: Path, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a file, without what moves the cursor of a terminal."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_NBYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    plain = re.sub(r"\x1b[\[\]c][0-9;?]*[A-Za-z]?", "", text)
    return [line.rstrip() for line in plain.splitlines() if line.strip()][-count:]


def panic(lines: list[str]) -> str | None:
    """What the kernel panicked of, if it did."""
    for line in lines:
        found = re.search(r"Kernel panic - not syncing: (.*)", line)
        if found:
            return found[1].strip()
    return None
