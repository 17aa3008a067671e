"""A cpio archive of the kind that Linux unpacks as its first file system ("newc"): written here, read by the kernel."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass

_MAGIC = "070701"


@dataclass(frozen=True)
class Entry:
    """A file (`data`) or a folder (`data` is None)."""

    data: bytes | None = None
    executable: bool = False


def archive(entries: Mapping[str, Entry]) -> bytes:
    """The archive of these entries by relative path; a folder stands before what is in it."""
    parts: list[bytes] = []
    for inode, (path, entry) in enumerate(entries.items(), 1):
        parts.append(_member(inode, path, entry))
    parts.append(_member(0, "TRAILER!!!", Entry(b"")))
    return b"".join(parts)


def _member(inode: int, path: str, entry: Entry) -> bytes:
    data = entry.data or b""
    kind = stat.S_IFDIR | 0o755 if entry.data is None else stat.S_IFREG | (0o755 if entry.executable else 0o644)
    name = path.encode() + b"\0"
    links = 2 if entry.data is None else 1
    fields = (inode, kind, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name), 0)
    head = _MAGIC.encode() + b"".join(b"%08x" % field for field in fields)
    return _padded(head + name) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
