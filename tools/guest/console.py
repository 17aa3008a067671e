"""What a guest says, and what went wrong with it: its console, what the command prints, and a reason in one line."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tierloop.devices.system import HOST, PUNCH_HOLE

TAIL_LINES = 15
_MOST_NBYTES = 1 << 16
_PIECE_NBYTES = 1 << 20


class Tail:
    """A file that grows in the guest, copied to a stream of the host as it does.

    Of what was copied the disk keeps the end only, where its file system can give room back: whoever prints for ever
    fills nothing.
    """

    def __init__(self, path: Path, to: BinaryIO | None) -> None:
        self._path = path
        self._to = to
        self._offset = 0
        self._given_back = 0

    def copy(self) -> int:
        """Copy what is new; returns how many bytes that were."""
        began = self._offset
        try:
            with self._path.open("rb", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)  # it may grow faster than it is copied
                file.seek(self._offset)
                while self._offset < size and (new := file.read(min(_PIECE_NBYTES, size - self._offset))):
                    self._offset += len(new)
                    if self._to is not None:
                        self._to.write(new)
                        self._to.flush()
        except FileNotFoundError:
            return 0
        self._give_back()
        return self._offset - began

    def _give_back(self) -> None:
        end = (self._offset - _MOST_NBYTES) // _PIECE_NBYTES * _PIECE_NBYTES
        if end > self._given_back:
            with suppress(OSError), self._path.open("r+b") as file:
                HOST.fallocate(file.fileno(), PUNCH_HOLE, self._given_back, end - self._given_back)
            self._given_back = end


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
