"""Files that a command leaves: whole or not at all.

A file is written beside its place under a temporary name, synced, and renamed. Several files are all written before the
first is renamed. Whatever interrupts that, a full disk or a signal, leaves what was there before and no temporary file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OutputError(ValueError):
    """A file or folder cannot be written; the message names it and says why."""


def prepare_folder(folder: Path) -> Path:
    """Make the folder and see that files can be written there, before minutes of work. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OutputError(f"{folder}: is a file; name a folder for the output") from None
    except OSError as error:
        raise _refused(folder, error) from error
    probe = _beside(folder / "probe")
    try:
        probe.write_bytes(b"\0")
    except OSError as error:
        raise _refused(folder, error) from error
    finally:
        probe.unlink(missing_ok=True)
    return folder


def prepare_file(file: Path) -> Path:
    """See that a file can be written or replaced, before minutes of work; returns where it truly lies.

    Links are followed; a folder, a device, a pipe or anything else that is no file is refused. Raises OutputError.
    """
    place = Path(os.path.realpath(file))
    if place.is_dir():
        raise OutputError(f"{file}: is a folder; name a file")
    if place.exists() and not place.is_file():
        raise OutputError(f"{file}: is a device or a pipe; name a file")
    prepare_folder(place.parent)
    return place


def write_files(texts: Mapping[Path, str]) -> None:
    """Write all of these files as UTF-8, or none. Raises OutputError."""
    written: dict[Path, Path] = {}
    place = Path()
    targets = [(prepare_file(file), text) for file, text in texts.items()]
    try:
        for place, text in targets:
            temporary = written[place] = _beside(place)
            with temporary.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for place, temporary in written.items():
            os.replace(temporary, place)
    except OSError as error:
        raise _refused(place, error) from error
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def place_named_twice(files: list[Path]) -> Path | None:
    """The first of the files that lies where an earlier one does, links followed; None if all are different."""
    seen: set[str] = set()
    for file in files:
        place = os.path.realpath(file)
        if place in seen:
            return file
        seen.add(place)
    return None


def to_json(value: Any) -> str:
    """Strict JSON in ASCII, which any terminal and pipe takes, with a closing newline.

    A float that JSON cannot hold becomes null; another type that it cannot hold is a bug and raises TypeError.
    """
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.tmp")


def _refused(place: Path, error: OSError) -> OutputError:
    return OutputError(f"{place}: cannot be written: {error.strerror or error}")
