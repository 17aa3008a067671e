"""Whether a medium may be overwritten: if it is blank, or its owner says that the contents may be lost (--scratch)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform_file import PlatformFile

Scratch = Annotated[
    bool,
    typer.Option("--scratch", help="The contents of the file, the drive or the CXL memory may be overwritten."),
]
_REFUSAL = "its contents would be overwritten; --scratch says that they may be lost"
_MEDIA = {"nvme": "path", "cxl": "path", "emulated": "keep"}
"""Drivers whose memory outlives the process, and the option that names the file or node it is on."""
_READ_NBYTES = 1 << 20
_MOST_NBYTES = 1 << 30
"""Bytes of a file that are looked at; one with more that are not holes counts as not blank."""


def check_media(driver: str, options: Mapping[str, Any], scratch: bool) -> None:
    """As `check_scratch`, of the medium that the options of a driver name."""
    path, folder = options.get(_MEDIA.get(driver, "")), options.get("folder", ".")
    if isinstance(path, str) and isinstance(folder, str):
        check_scratch(Path(folder, path), scratch)
    if driver == "cxl" and "serial" in options and not scratch:
        raise ConfigurationError(f"serial = {options['serial']}: {_REFUSAL}")


def check_platform_media(file: PlatformFile, devices: Iterable[str], scratch: bool) -> None:
    """As `check_scratch`, of the media of some devices of a platform, by the names that its file has for them."""
    for name in devices:
        device = file.devices[name]
        check_media(device.driver, {**device.options, "folder": str(file.folder)}, scratch)


def check_scratch(path: Path, scratch: bool, advice: str = "") -> None:
    """Raise ConfigurationError where somebody's bytes would be overwritten.

    A file with nothing but zeros has none. Of a device it is not found out.
    """
    if not scratch and path.exists() and not (path.is_file() and _is_blank(path)):
        raise ConfigurationError(f"{path}: {_REFUSAL}{advice}")


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
