"""Reading folders of sysfs that may be incomplete, hold garbage, or vanish while they are read.

An attribute that is not there is None. One that cannot be read, or is not what it should be, is None too and leaves a
sentence in `complaints`, which all folders of one reading share.
"""

from __future__ import annotations

import errno
import os
import posixpath
from dataclasses import dataclass

from tierloop.devices.system import System, resolved

_SILENT = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)
"""Not there, or not there yet: a region without an address answers ENXIO."""
_LARGEST = 1 << 64


@dataclass(frozen=True)
class Folder:
    """One folder below /sys; `path` has its links followed."""

    system: System
    path: str
    complaints: list[str]

    @classmethod
    def at(cls, system: System, path: str, complaints: list[str]) -> Folder:
        """The folder that a path leads to."""
        try:
            return cls(system, resolved(system, path), complaints)
        except OSError as error:
            complaints.append(f"{path}: {error.strerror}")
            return cls(system, path, complaints)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    def names(self, prefix: str = "") -> list[str]:
        """What is in it and begins so, numbers in their order."""
        try:
            found = [name for name in self.system.listdir(self.path) if name.startswith(prefix)]
        except OSError as error:
            self._complain("", error)
            return []
        return sorted(found, key=_natural)

    def text(self, name: str) -> str | None:
        """An attribute as a text without spaces around it."""
        try:
            return self.system.read_text(f"{self.path}/{name}").strip()
        except OSError as error:
            self._complain(name, error)
        except UnicodeDecodeError:
            self.complaints.append(f"{self.path}/{name}: no text")
        return None

    def number(self, name: str, base: int = 0) -> int | None:
        """An attribute as a number that is not negative: decimal, or hexadecimal with 0x (without, with base 16)."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text, base)
        except ValueError:
            value = -1
        if not 0 <= value < _LARGEST:
            self.complaints.append(f"{self.path}/{name}: {text[:40]!r} is no size or number")
            return None
        return value

    def node(self, name: str) -> int | None:
        """A number of a NUMA node; None for -1, which says that there is none."""
        return None if self.text(name) == "-1" else self.number(name)

    def link(self, name: str) -> str | None:
        """The last part of what a link leads to: the name of a driver or a device."""
        try:
            target = self.system.readlink(f"{self.path}/{name}")
            return posixpath.basename(posixpath.normpath(posixpath.join(self.path, target)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._complain(name, error)
            return None

    def below(self, name: str) -> Folder:
        """A folder in it."""
        return Folder(self.system, f"{self.path}/{name}", self.complaints)

    def _complain(self, name: str, error: OSError) -> None:
        if error.errno not in _SILENT:
            why = os.strerror(error.errno) if error.errno else str(error)
            self.complaints.append(f"{posixpath.join(self.path, name)}: {why}")


def _natural(name: str) -> tuple[str, list[int]]:
    """A name, and the numbers that it ends with: decoder2.10 comes after decoder2.9."""
    stem = name.rstrip("0123456789.")
    return stem, [int(digits) for digits in name[len(stem) :].split(".") if digits.isdigit()]
