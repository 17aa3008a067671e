"""Recorded: a device that writes down every command, as JSON lines that can be replayed against a model.

The first line is the header, then one line per `alloc`, `free` and ended command, in the order in which they happened;
`seq` is the order in which they were asked for. recording.py says what stands in a line and reads it back.

A line is handed to the operating system whole, with one call, when its event happens: what was written survives the
end of the process, however it ends. If a line cannot be written (a full disk), the file is cut back to the last whole
line, recording stops, and the next `alloc`, `free` or `submit`, or else `close`, raises a MediaError that says so:
once, before it does anything. The device inside is not touched by that and works on, unrecorded.

A file that is there already is replaced only with `replace`; an unfinished one of the same name is not added to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tierloop.devices.commands import Command, segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError, MediaError
from tierloop.devices.info import DeviceInfo
from tierloop.devices.regions import Region
from tierloop.devices.site import Site
from tierloop.devices.wrappers.around import Around, Held, named
from tierloop.devices.wrappers.recording import alloc_line, command_line, free_line, header_line

_Named = tuple[list[int], list[tuple[str, int]]]
"""What a command comes after: numbers of this recording, and (device, queue) of commands that are not in it."""


class Recorded(Around):
    """Writes to `path`, which is created at once. Raises ConfigurationError where that cannot be done."""

    def __init__(self, device: Device, site: Site, path: Path, replace: bool = False) -> None:
        super().__init__(device, site)
        self._path = Path(path)
        self._seq = 0
        self._known: set[Region] = set()
        self._own: frozenset[str] = frozenset()
        self._written = 0
        self._mine = not replace
        self._tried = False
        self._lost: MediaError | None = None
        self.what = f"recorded in {self._path.name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if replace else os.O_EXCL)
        try:
            self._file = os.open(self._path, flags, 0o644)
        except ValueError as error:  # a path with a zero in it
            raise ConfigurationError(f"recorded: {str(self._path)!r}: {error}") from error
        except FileExistsError as error:
            raise ConfigurationError(f"recorded: {self._path} is there already; replace = true replaces it") from error
        except OSError as error:
            raise ConfigurationError(f"recorded: {self._path}: {error.strerror or error}") from error
        self._open = True
        status = os.fstat(self._file)
        self._place = (status.st_dev, status.st_ino)
        places: set[tuple[int, int]] = site.shared.setdefault("recorded", set())
        if self._place in places:
            os.close(self._file)
            raise ConfigurationError(f"recorded: {self._path}: another device of the platform is recorded in it")
        places.add(self._place)
        os.ftruncate(self._file, 0)
        self._places = places

    @property
    def info(self) -> DeviceInfo:
        """As of the device inside; the header is written when it is first known."""
        fresh = self._info is None
        info = super().info
        if fresh:
            self._own = frozenset(memory.name for memory in info.memories)
            self._write(header_line(self.inner.info, self._clock.virtual))
        return info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate on the device inside and write it down. Raises what that raises, or MediaError."""
        self._ready()
        region = self.inner.alloc(nbytes, memory, phantom)
        self._seen(region)
        return region

    def free(self, region: Region) -> None:
        """Free on the device inside and write it down. Raises what that raises, or MediaError."""
        self._ready()
        self.inner.free(region)
        self._known.discard(region)
        self._write(free_line(self._next(), self._clock.now(), region))

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises what the device inside raises, Gone, or MediaError if recording has failed."""
        self._ready()
        return super().submit(command, queue, after)

    def close(self) -> None:
        """Close the device inside, then the file; raises the first error."""
        try:
            super().close()
        finally:
            if self._open:
                self._open = False
                self._places.discard(self._place)
                os.close(self._file)
                if self._mine and (self._tried or not self._written):  # the device was only tried, or did not open
                    self._path.unlink(missing_ok=True)
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def forget(self) -> None:
        """What was recorded so far was a trial, and is cut off; if nothing follows, a file that was made goes, too."""
        self._ready()
        if not self._open:
            return
        self._tried = True
        self._seq = self._written = 0
        self._known.clear()
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._write(header_line(self.inner.info, self._clock.virtual))

    def _accept(self, command: Command, queue: int, after: Sequence[Completion]) -> Held:
        held = super()._accept(command, queue, after)
        numbers: list[int] = []
        foreign: list[tuple[str, int]] = []
        for completion in named(after):
            its = completion.held
            if its is not None and its.owner is self:
                numbers.append(its.number)
            else:
                foreign.append((completion.device, completion.queue))
        for region, _ in segments(command):
            if region not in self._known and region.memory in self._own:
                self._seen(region)
        held.number = self._next()
        held.note = numbers, foreign
        return held

    def _ended(self, held: Held, completion: Completion) -> None:
        numbers, foreign = held.note
        held.note = None
        self._write(command_line(held.number, completion, numbers, foreign))

    def _seen(self, region: Region) -> None:
        self._known.add(region)
        self._write(alloc_line(self._next(), self._clock.now(), region))

    def _next(self) -> int:
        self._tried = False
        self._seq += 1
        return self._seq - 1

    def _ready(self) -> None:
        """The header is written; a line that was lost is told of, once."""
        name = (self._info or self.info).name
        lost, self._lost = self._lost, None
        if lost is not None:
            raise MediaError(name, "record", lost.detail, lost.errno) from lost

    def _write(self, line: bytes) -> None:
        if not self._open:
            return
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._open = False
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._written)
            os.close(self._file)
            detail = (
                f"{self._path}: {error.strerror or error}: {self._written} bytes are kept, the rest is not recorded"
            )
            self._lost = MediaError(self._name, "record", detail, error.errno)
            return
        self._written += len(line)
