"""A model of the operating system's kernel: what real drivers run on where the hardware beneath them is a model.

It is a `System` (devices/system.py) whose paths lead to *nodes*: objects that answer for one file below /dev, such as
the character device of an NVMe namespace with a controller of firmware_models/ behind it. Below /sys and /proc stands a
*tree* of recorded or made-up texts and links. So the drivers of devices/drivers run here byte for byte as they do on
silicon, and a test may take hardware away, break it, or show a machine that nobody here has.

What must hold:

- It is as strict as Linux: a descriptor that is not open is EBADF, a request that a node does not know is ENOTTY, a
  path that is not there ENOENT; nothing returns -1.
- A node is locked, opened and closed as a file is; what it answers, it answers under one lock, so that a firmware model
  needs no threads of its own.
- System calls by number are answered by what was put there with `answer`; all others are ENOSYS.
- Anonymous memory is real memory.

Trees are text (tests/sysfs has some): a line `/sys/path = text`, `/sys/path = hex:0a0b`, `/sys/link -> target` or
`/sys/folder/` each; `\\n` and `\\\\` in a text stand for a newline and a backslash; # begins a comment line.
"""

from __future__ import annotations

import errno
import mmap as mmap_module
import os
import posixpath
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from tierloop.devices.system import FileKind, FileStatus, followed

_DEVTMPFS = os.makedev(0, 6)
_FIRST_FD = 1 << 20
_CALLS = 1 << 16
"""Descriptors of a model do not look like those of the process: one that gets to the real system is EBADF there."""


class Node(Protocol):
    """What stands behind one path; every method raises OSError. `Absent` has an answer for those that it lacks."""

    kind: FileKind

    def opened(self, flags: int) -> None:
        """Somebody opens it with these O_ flags; raise to refuse."""

    def closed(self) -> None:
        """A descriptor of it is closed."""

    def size(self) -> int:
        """Bytes of it, 0 for a character device."""

    def pread(self, into: memoryview, offset: int) -> int:
        """Read up to len(into) bytes; returns how many."""

    def pwrite(self, data: memoryview, offset: int) -> int:
        """Write up to len(data) bytes; returns how many."""

    def sync(self) -> None:
        """Make what was written durable."""

    def fallocate(self, mode: int, offset: int, nbytes: int) -> None:
        """Punch, zero or reserve."""

    def ioctl(self, request: int, argument: bytearray) -> int:
        """A request; its structure is read and written in place."""

    def mmap(self, nbytes: int, offset: int) -> mmap_module.mmap:
        """Memory that is shared with it."""


class Absent:
    """A node that can do nothing; real ones derive from it and say what they can."""

    kind: FileKind = "character device"
    number = 0
    """Its device number; 0: the kernel gives it one."""

    def opened(self, flags: int) -> None:
        """Anybody may."""

    def closed(self) -> None:
        """Nothing to do."""

    def size(self) -> int:
        """A character device has none."""
        return 0

    def pread(self, into: memoryview, offset: int) -> int:
        """EINVAL."""
        raise failure(errno.EINVAL)

    def pwrite(self, data: memoryview, offset: int) -> int:
        """EINVAL."""
        raise failure(errno.EINVAL)

    def sync(self) -> None:
        """EINVAL."""
        raise failure(errno.EINVAL)

    def fallocate(self, mode: int, offset: int, nbytes: int) -> None:
        """ENODEV, as for what is no file and no block device."""
        raise failure(errno.ENODEV)

    def ioctl(self, request: int, argument: bytearray) -> int:
        """ENOTTY."""
        raise failure(errno.ENOTTY)

    def mmap(self, nbytes: int, offset: int) -> mmap_module.mmap:
        """ENODEV."""
        raise failure(errno.ENODEV)


class Tree:
    """Files, links and folders below /sys and /proc, as a recorded machine had them."""

    def __init__(self, texts: Mapping[str, str | bytes] | None = None, links: Mapping[str, str] | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.folders: dict[str, set[str]] = {"/": set()}
        for path, text in (texts or {}).items():
            self.put(path, text)
        for path, target in (links or {}).items():
            self.link(path, target)

    @classmethod
    def of(cls, text: str) -> Tree:
        """The tree that a text describes. Raises ValueError with the line that is wrong."""
        tree = cls()
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            path, link, target = line.partition(" -> ")
            name, equals, value = line.partition(" = ")
            if not line.startswith("/"):
                raise ValueError(f"line {number} of a tree does not begin with a path: {line!r}")
            if link and (not equals or len(path) < len(name)):
                tree.link(path, target)
            elif line.endswith(" ="):
                tree.put(line.removesuffix(" ="), "")
            elif equals:
                tree.put(name, bytes.fromhex(value[4:]) if value.startswith("hex:") else _plain(value))
            elif line.endswith("/"):
                tree._grow(line.rstrip("/") + "/.")
            else:
                raise ValueError(f"line {number} of a tree is neither file, link nor folder: {line!r}")
        return tree

    @classmethod
    def read(cls, path: str | Path) -> Tree:
        """The tree in a file. Raises OSError, ValueError."""
        return cls.of(Path(path).read_text())

    def text(self) -> str:
        """The tree as a text that `of` reads; files that are no plain text as hexadecimal digits."""
        lines = [f"{path} = {_shown(data)}".rstrip() for path, data in self.files.items()]
        lines += [f"{path} -> {target}" for path, target in self.links.items()]
        lines += [f"{path}/" for path, names in self.folders.items() if not names and path != "/"]
        return "\n".join(sorted(lines)) + "\n"

    def put(self, path: str, data: str | bytes) -> None:
        """A file with these bytes; a text gets the newline that files below /sys end with."""
        self._grow(path)
        self.files[path] = data if isinstance(data, bytes) else f"{data}\n".encode()

    def link(self, path: str, target: str) -> None:
        """A link."""
        self._grow(path)
        self.links[path] = target

    def remove(self, path: str) -> None:
        """Take a file, a link or a folder with all that is in it away."""
        for kind in (self.files, self.links, self.folders):
            for name in [name for name in kind if name == path or name.startswith(f"{path}/")]:
                del kind[name]
        self.folders.get(posixpath.dirname(path), set()).discard(posixpath.basename(path))

    def real(self, path: str) -> str:
        """Where a path leads, links followed. Raises OSError: ELOOP."""
        return followed(path, self.links.get, 64)

    def _grow(self, path: str) -> None:
        while path != "/":
            path, name = posixpath.split(path)
            names = self.folders.setdefault(path, set())
            if name != ".":
                names.add(name)


class ModelKernel:
    """A machine of nodes and a tree; see the top of the file.

    The back door: `tree`, `nodes`, `remove` (hot unplug: open descriptors are ENODEV from then on), `fail_next`, and
    `calls`, the names of the latest 65,536 calls or more, in order.
    """

    def __init__(
        self, tree: Tree | None = None, nodes: Mapping[str, Node] | None = None, model: str = "a model of a machine"
    ) -> None:
        self.model = model
        self.tree = tree or Tree()
        self.nodes: dict[str, Node] = {}
        self.calls: list[str] = []
        self._inodes: dict[str, int] = {}
        self._open: dict[int, tuple[str, Node]] = {}
        self._owner: dict[str, int] = {}
        self._answers: dict[int, Callable[..., int]] = {}
        self._faults: list[tuple[str, int]] = []
        self._guard = threading.RLock()
        self._next = _FIRST_FD
        for path, node in (nodes or {}).items():
            self.add(path, node)

    # the back door

    def add(self, path: str, node: Node) -> None:
        """Plug something in."""
        with self._guard:
            self.nodes[path] = node
            self._inodes[path] = len(self._inodes) + 1

    def remove(self, path: str) -> None:
        """Pull it out: the path is gone, and descriptors of it answer ENODEV."""
        with self._guard:
            del self.nodes[path]

    def fail_next(self, call: str, number: int) -> None:
        """Let the next call of that name (open, ioctl, mmap, pread, …) fail with an errno."""
        with self._guard:
            self._faults.append((call, number))

    def answer(self, number: int, call: Callable[..., int]) -> None:
        """Answer a system call: six integers in, a result that is not negative out, OSError for the rest."""
        self._answers[number] = call

    def install(self, path: str, node: Node) -> int:
        """Give a node a descriptor without opening its path: what io_uring_setup does."""
        with self._guard:
            self._next += 1
            self._open[self._next] = (path, node)
            return self._next

    def node_of(self, fd: int) -> Node:
        """The node behind a descriptor. Raises OSError: EBADF, or ENODEV if it was removed."""
        with self._guard:
            if fd not in self._open:
                raise failure(errno.EBADF)
            path, node = self._open[fd]
            if path in self._inodes and self.nodes.get(path) is not node:
                raise failure(errno.ENODEV)
            return node

    @property
    def open_fds(self) -> int:
        """Descriptors that were opened and not closed."""
        return len(self._open)

    @property
    def guard(self) -> threading.RLock:
        """The lock under which nodes answer; hold it to look at a model while drivers run."""
        return self._guard

    # the bus face

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        with self._called("open"):
            node = self._at(path)
            node.opened(flags)
            return self.install(path, node)

    def close(self, fd: int) -> None:
        with self._called("close"):
            if fd not in self._open:
                raise failure(errno.EBADF)
            path, node = self._open.pop(fd)
            if self._owner.get(path) == fd:
                del self._owner[path]
            node.closed()

    def stat(self, path: str) -> FileStatus:
        with self._called("stat"):
            return self._status(path, self._at(path))

    def fstat(self, fd: int) -> FileStatus:
        with self._called("fstat"):
            node = self.node_of(fd)
            return self._status(self._open[fd][0], node)

    def size(self, fd: int) -> int:
        with self._called("size"):
            return self.node_of(fd).size()

    def resize(self, fd: int, nbytes: int) -> None:
        with self._called("resize"):
            self.node_of(fd)
            raise failure(errno.EINVAL)

    def unlink(self, path: str) -> None:
        with self._called("unlink"):
            self._at(path)
            raise failure(errno.EPERM)

    def lock(self, fd: int) -> None:
        with self._called("lock"):
            self.node_of(fd)
            path = self._open[fd][0]
            if self._owner.setdefault(path, fd) != fd:
                raise failure(errno.EWOULDBLOCK)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        with self._called("pread"):
            return self.node_of(fd).pread(into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._called("pwrite"):
            return self.node_of(fd).pwrite(data, offset)

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int) -> None:
        with self._called("fallocate"):
            self.node_of(fd).fallocate(mode, offset, nbytes)

    def fsync(self, fd: int) -> None:
        with self._called("fsync"):
            self.node_of(fd).sync()

    def fdatasync(self, fd: int) -> None:
        with self._called("fdatasync"):
            self.node_of(fd).sync()

    def mmap(self, fd: int, nbytes: int, offset: int = 0) -> mmap_module.mmap:
        with self._called("mmap"):
            return mmap_module.mmap(-1, nbytes) if fd == -1 else self.node_of(fd).mmap(nbytes, offset)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        with self._called("ioctl"):
            return self.node_of(fd).ioctl(request, argument)

    def syscall(self, number: int, *args: int) -> int:
        with self._called("syscall"):
            if number not in self._answers:
                raise failure(errno.ENOSYS)
            return self._answers[number](*args)

    def read_text(self, path: str) -> str:
        return self.read_bytes(path).decode().rstrip("\n")

    def read_bytes(self, path: str) -> bytes:
        with self._called("read"):
            where = self.tree.real(path)
            if where in self.tree.folders:
                raise failure(errno.EISDIR, path)
            if where not in self.tree.files:
                raise failure(errno.ENOENT, path)
            return self.tree.files[where]

    def listdir(self, path: str) -> list[str]:
        with self._called("listdir"):
            where = self.tree.real(path)
            names = set(self.tree.folders.get(where, ()))
            names |= {posixpath.basename(node) for node in self.nodes if posixpath.dirname(node) == where}
            if not names and where not in self.tree.folders:
                raise failure(errno.ENOTDIR if where in self.tree.files else errno.ENOENT, path)
            return sorted(names)

    def readlink(self, path: str) -> str:
        with self._called("readlink"):
            folder, name = posixpath.split(path)
            where = posixpath.join(self.tree.real(folder), name)
            if where in self.tree.links:
                return self.tree.links[where]
            known = where in self.tree.files or where in self.tree.folders or where in self.nodes
            raise failure(errno.EINVAL if known else errno.ENOENT, path)

    # inside

    def _called(self, call: str) -> threading.RLock:
        """Note the call, let it fail if that was asked for, and answer it alone."""
        with self._guard:
            self.calls.append(call)
            if len(self.calls) > 2 * _CALLS:
                del self.calls[:-_CALLS]
            for fault in self._faults:
                if fault[0] == call:
                    self._faults.remove(fault)
                    raise failure(fault[1])
        return self._guard

    def _at(self, path: str) -> Node:
        node = self.nodes.get(path)
        if node is None:
            raise failure(errno.ENOENT, path)
        return node

    def _status(self, path: str, node: Node) -> FileStatus:
        inode = self._inodes.get(path, 0)
        number = getattr(node, "number", 0) or os.makedev(240, inode)
        return FileStatus(node.kind, _DEVTMPFS, inode, number if "device" in node.kind else 0)


def failure(number: int, path: str | None = None) -> OSError:
    """The error of that errno, as the operating system raises it (a FileNotFoundError for ENOENT, and so on)."""
    return OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), path)


def _plain(value: str) -> str:
    return value.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")


def _shown(data: bytes) -> str:
    text = data.decode("ascii", "replace")
    if not text.endswith("\n") or not text[:-1].replace("\n", "").replace("\t", "").isprintable() or "\ufffd" in text:
        return f"hex:{data.hex()}"
    text = text[:-1].replace("\\", "\\\\").replace("\n", "\\n")
    return f"hex:{data.hex()}" if text.startswith("hex:") or text != text.strip() else text
