"""Whether a medium may be overwritten: if it is blank, or its owner says that the contents may be lost (--scratch)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Annotated

import typer

from tierloop.devices.errors import ConfigurationError

Scratch = Annotated[
    bool,
    typer.Option("--scratch", help="The contents of the file, the drive or the CXL memory may be overwritten."),
]
_READ_NBYTES = 1 << 20
_MOST_NBYTES = 1 << 30
"""Bytes of a file that are looked at; one with more that are not holes counts as not blank."""


def check_scratch(path: Path, scratch: bool, advice: str = "") -> None:
    """Raise ConfigurationError where somebody's bytes would be overwritten.

    A file with nothing but zeros has none. Of a device it is not found out.
    """
    if not scratch and path.exists() and not (path.is_file() and _is_blank(path)):
        raise ConfigurationError(
            f"{path}: its contents would be overwritten; --scratch says that they may be lost{advice}"
        )


def _is_blank(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            seen, size = 0, os.fstat(file.fileno()).st_size
            while file.tell() < size and seen < _MOST_NBYTES:
                file.seek(file.tell(), os.SEEK_DATA)
                piece = file.read(_READ_NBYTES)
                if piece.strip(b"\0"):
                    return False
                seen += len(piece)
            return file.tell() >= size
    except OSError as error:
        return error.errno == errno.ENXIO  # a hole reaches to the end
