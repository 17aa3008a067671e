"""Layers: packages unpacked into what a guest is made of.

    qemu/                 QEMU, its libraries and its firmware, run from there
    guest/                what the guest has beyond the host's files: tools, kernel modules, pyverbs on its own
    vmlinuz, first.gz     the kernel, and the first file system that puts host and guest layer together

Host and guest are joined by an overlay that the guest makes: the guest layer above, the host's `/` below, a memory file
system on top for what is written. Modules that every guest loads are unpacked here, because xz is slow in the guest.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tierloop.tools.guest.cpio import Entry, archive
from tierloop.tools.guest.packages import RigError

INSIDE = Path(__file__).resolve().parent / "inside"
PYVERBS = "opt/tierloop"
"""A folder of the guest with pyverbs alone in it: the rest of dist-packages is for Debian's own Python."""
_FIRST = ("fs/netfs/netfs", "net/9p/9pnet", "net/9p/9pnet_virtio", "fs/9p/9p", "fs/overlayfs/overlay")
_LOADED = (
    "crypto", "drivers/cxl", "drivers/dax", "drivers/infiniband/core", "drivers/infiniband/sw", "drivers/nvdimm",
    "drivers/net/virtio_net*", "drivers/net/net_failover*", "drivers/nvme", "fs/9p", "fs/configfs", "fs/netfs",
    "fs/overlayfs", "lib", "net/9p", "net/core", "net/ipv4", "net/ipv6",
)  # fmt: skip


def unpack(archives: Iterable[Path], folder: Path) -> None:
    """Unpack packages over one another. Raises RigError."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive_ in archives:
        done = subprocess.run(["dpkg-deb", "-x", archive_, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RigError(f"{archive_.name} cannot be unpacked: {done.stderr.strip()}")


def merge_usr(folder: Path) -> None:
    """Move bin, sbin and lib below usr, as the host has them, and leave links."""
    for name in ("bin", "sbin", "lib", "lib64"):
        old, new = folder / name, folder / "usr" / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, new, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)
        if new.is_dir() and not old.is_symlink():
            old.symlink_to(f"usr/{name}")


def add_kernel(unpacked: Path, layers: Path) -> str:
    """Put an unpacked kernel among the layers; returns its version. Raises RigError."""
    merge_usr(unpacked)
    versions = sorted(path.name for path in (unpacked / "usr/lib/modules").glob("*"))
    if len(versions) != 1:
        raise RigError(f"the kernel's package has modules of {len(versions)} versions")
    version = versions[0]
    shutil.copy(unpacked / "boot" / f"vmlinuz-{version}", layers / "vmlinuz")
    modules = layers / "guest/usr/lib/modules" / version
    modules.parent.mkdir(parents=True, exist_ok=True)
    os.replace(unpacked / "usr/lib/modules" / version, modules)
    _unpack_modules(modules / "kernel")
    kmod = ["depmod", "-b", str(layers / "guest"), version]
    done = subprocess.run(kmod, executable=tool(layers, "kmod"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RigError(f"depmod failed: {done.stderr.strip()}")
    return version


def tool(layers: Path, name: str) -> str:
    """A program of the guest layer, else of the host. Raises RigError."""
    found = [layers / "guest/usr" / folder / name for folder in ("bin", "sbin")]
    path = next((str(one) for one in found if one.is_file()), None) or shutil.which(name)
    if path is None:
        raise RigError(f"no {name} in the packages nor on this machine")
    return path


def finish_guest(layers: Path) -> None:
    """What the guest layer has and no package brings."""
    guest = layers / "guest"
    merge_usr(guest)
    shutil.rmtree(guest / "usr/lib/systemd", ignore_errors=True)
    for name in ("doc", "man", "locale"):
        shutil.rmtree(guest / "usr/share" / name, ignore_errors=True)
    private = guest / PYVERBS
    private.mkdir(parents=True, exist_ok=True)
    (private / "pyverbs").symlink_to("/usr/lib/python3/dist-packages/pyverbs")


def write_first(layers: Path, version: str) -> None:
    """The first file system: a busybox, five modules, and the script that joins the layers."""
    entries = {name: Entry() for name in ("bin", "mod", "proc", "sys", "dev", "host", "guest", "top", "root")}
    entries["bin/busybox"] = Entry(Path(tool(layers, "busybox")).read_bytes(), executable=True)
    for module in _FIRST:
        path = layers / "guest/usr/lib/modules" / version / "kernel" / f"{module}.ko"
        entries[f"mod/{path.name}"] = Entry(path.read_bytes())
    entries["init"] = Entry((INSIDE / "init").read_bytes(), executable=True)
    (layers / "first.gz").write_bytes(gzip.compress(archive(entries), 1))


def _unpack_modules(kernel: Path) -> None:
    try:
        import lzma  # a Python that was built without it is not rare
    except ImportError as error:
        raise RigError(f"this Python cannot read xz, which kernel modules are packed with: {error}") from error
    for pattern in _LOADED:
        for top in kernel.glob(pattern):
            for path in [top] if top.is_file() else sorted(top.rglob("*.ko.xz")):
                if path.suffix == ".xz":
                    path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
                    path.unlink()
