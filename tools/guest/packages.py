"""Packages for the rig: found, fetched and verified by apt, in a configuration of its own that needs no root.

The mirror is the one that this machine's apt already uses for its release; only that release, its updates and its
backports are read. Updates (of security, too) where this machine's apt has them: a library that came from there could
not be told from one that is missing, and what needs it in just that version would fit nothing. apt verifies the
signature of the Release file and through it the index, which names the SHA-256 of every package; what is fetched is
compared with that once more before it is unpacked, so that a download that broke off, or a file that somebody changed
since, is fetched again or refused. Packages that the host has installed are not fetched: the guest sees the host's own
files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from tierloop.devices.errors import ConfigurationError, DeviceError
from tierloop.tools.guest.places import Places

QEMU = ("qemu-system-x86", "qemu-system-data", "seabios")
"""The program first. The others are named because its firmware is looked for beside it, whatever the host has."""
TOOLS = (
    "busybox-static",
    "daxctl",
    "ibverbs-providers",
    "iproute2",
    "kmod",
    "libnuma1",
    "librdmacm1",
    "ndctl",
    "numactl",
    "nvme-cli",
    "python3-pyverbs",
    "rdma-core",
)
NEWER = {"bookworm": "bookworm-backports", "trixie": "trixie"}
"""By release: the suite whose QEMU knows volatile CXL memory (9 or later) and whose kernel drives it (6.12)."""
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_APT_S = 900
_SILENT_S = 10
"""After so many seconds without a byte apt takes a mirror for dead, and tries again."""


class RigError(DeviceError):
    """The rig could not be made, or could not do what it was asked; the message says why."""

    def __init__(self, what: str) -> None:
        super().__init__("guest", "rig", what)

    def __reduce__(self) -> tuple[type[RigError], tuple[str]]:  # type: ignore[override]
        return type(self), (self.detail,)


@dataclass(frozen=True)
class Package:
    """One package in one version; `file` is what apt calls its archive."""

    name: str
    version: str
    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A mirror that carries a suite, and the keys that sign it."""

    uri: str
    signed_by: str


def release(os_release: Path = Path("/etc/os-release")) -> str:
    """The code name of this machine's Debian. Raises ConfigurationError for what the rig cannot be made from."""
    try:
        lines = dict(
            line.split("=", 1)
            for line in os_release.read_text(encoding="utf-8", errors="replace").splitlines()
            if "=" in line
        )
    except OSError:
        lines = {}
    told = {key: value.strip("\"'") for key, value in lines.items()}
    name, code = told.get("PRETTY_NAME", "an unknown system"), told.get("VERSION_CODENAME", "")
    if told.get("ID") != "debian" or code not in NEWER:
        raise ConfigurationError(
            f"the guest rig is made of Debian packages, and its guest runs the host's own programs; this is {name}; "
            f"allowed: Debian {', '.join(NEWER)} (a container of it will do)"
        )
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ConfigurationError(f"the guest rig needs {program}, which is not on this machine's PATH")
    return code


def source(suite: str, folder: Path = Path("/etc/apt")) -> Source:
    """Where this machine's apt gets that suite from. Raises ConfigurationError."""
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix in (".sources", ".list"):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:  # one that is not there, or that this user may not read
                continue
            for found, suites in _stanzas(text) if file.suffix == ".sources" else _lines(text):
                if suite in suites:
                    return found
    raise ConfigurationError(
        f"no source of apt below {folder} has the suite {suite!r}; the rig takes the mirror from there"
    )


def _stanzas(text: str) -> Iterator[tuple[Source, list[str]]]:
    for stanza in re.split(r"\n\s*\n", text):
        kept = "\n".join(line for line in stanza.splitlines() if not line.startswith("#"))
        told = {key.lower(): value.strip() for key, value in re.findall(r"^([\w-]+):\s*(.*)$", kept, re.MULTILINE)}
        if "deb" in told.get("types", "").split() and told.get("enabled", "yes") != "no" and told.get("uris"):
            yield Source(told["uris"].split()[0], told.get("signed-by", "")), told.get("suites", "").split()


def _lines(text: str) -> Iterator[tuple[Source, list[str]]]:
    for options, uri, suite in re.findall(r"^deb\s+(\[[^]]*\]\s+)?(\S+)\s+(\S+)", text, re.MULTILINE):
        signed = re.search(r"signed-by=([^\]\s]+)", options)
        yield Source(uri, signed[1] if signed else ""), [suite]


class Apt:
    """apt with lists and a cache of its own; nothing of the host's is locked or changed."""

    def __init__(self, places: Places, suite: str) -> None:
        self.suite = suite
        self.newer = NEWER[suite]
        self._folder = places.apt
        (places.apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        mirror = source(suite)
        read = {suite: mirror, self.newer: mirror}
        for updates in (f"{suite}-updates", f"{suite}-security"):
            with suppress(ConfigurationError):
                read[updates] = source(updates)
        self.suites = tuple(read)
        (places.apt / "sources.list").write_bytes(os.fsencode("".join(_line(one, name) for name, one in read.items())))
        (places.apt / "conf").write_bytes(os.fsencode(_configuration(places.apt)))

    def update(self) -> None:
        """Fetch the indices and verify who signed them. Raises RigError."""
        self._run("apt-get", "-qq", "-o", "APT::Update::Error-Mode=any", "update")

    def kernel(self) -> str:
        """The name of the newest kernel's package. Raises RigError."""
        shown = self._run("apt-cache", "show", f"linux-image-amd64/{self.newer}")
        found = re.search(r"^Depends:.*?\b(linux-image-\d[^ ,]*)", shown, re.MULTILINE)
        if found is None:
            raise RigError(f"{self.newer} has no kernel: linux-image-amd64 depends on none")
        return found[1]

    def missing(self, names: Sequence[str], newer: bool = False) -> list[tuple[str, str]]:
        """Names and versions of what these packages need and the host does not have, the packages themselves included.

        Raises RigError where a package is missing.
        """
        target = ["-t", self.newer] if newer else []
        ask = ["apt-get", "-qq", "-y", "--print-uris", "--reinstall", "--no-install-recommends", *target, "install"]
        return _archives(self._run(*ask, *names))

    def described(self, wanted: Sequence[tuple[str, str]]) -> list[Package]:
        """Size and SHA-256 of packages, from the signed index. Raises RigError."""
        shown = self._run("apt-get", "-qq", "--print-uris", "download", *(f"{name}={what}" for name, what in wanted))
        found = re.findall(r"^'[^']+' (\S+) (\d+) SHA256:([0-9a-f]{64})$", shown, re.MULTILINE)
        if len(found) != len(wanted):
            raise RigError(f"the index has SHA-256 sums of {len(found)} of {len(wanted)} packages")
        return [Package(*_parts(file), file, int(nbytes), digest) for file, nbytes, digest in found]

    def fetch(self, packages: Sequence[Package], folder: Path) -> int:
        """Have these packages in the folder, each as the index has it; returns the bytes that were fetched.

        What is there and right is not fetched again. Raises RigError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        absent = [one for one in packages if not intact(folder / one.file, one)]
        for one in absent:
            (folder / one.file).unlink(missing_ok=True)
        if absent:
            self._run("apt-get", "-qq", "download", *(f"{one.name}={one.version}" for one in absent), cwd=folder)
        for one in packages:
            if not intact(folder / one.file, one):
                raise RigError(f"{one.file} is not what the signed index says (a corrupt download); run setup again")
        return sum(one.nbytes for one in absent)

    def _run(self, *command: str, cwd: Path | None = None) -> str:
        environment = {**os.environ, "APT_CONFIG": str(self._folder / "conf"), "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=_APT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RigError(f"{' '.join(command[:3])} did not end within {_APT_S} s") from None
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(("E:", "W:"))]
            raise RigError(f"{command[0]} failed: {' '.join(said[:4]) or done.stderr[-400:]}")
        return done.stdout


def intact(path: Path, package: Package) -> bool:
    """Whether a file is the package, byte for byte."""
    if not path.is_file() or path.stat().st_size != package.nbytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


def _line(mirror: Source, suite: str) -> str:
    keys = mirror.signed_by or (str(_KEYS) if _KEYS.exists() else "")
    option = f"[signed-by={keys}] " if keys.startswith("/") else ""
    return f"deb {option}{mirror.uri} {suite} main\n"


def _configuration(folder: Path) -> str:
    if re.search(r'["\n]', str(folder)):
        raise ConfigurationError(f"apt takes no folder with quotes or line ends in its name: {folder}")
    lines = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder,
        "Debug::NoLocking": "true",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Acquire::http::Timeout": _SILENT_S,
        "Acquire::https::Timeout": _SILENT_S,
        "APT::Sandbox::User": "",
    }
    return "".join(f'{key} "{value}";\n' for key, value in lines.items())


def _archives(shown: str) -> list[tuple[str, str]]:
    """Names and versions in what `--print-uris` shows."""
    return [_parts(file) for file in re.findall(r"^'[^']+' (\S+\.deb) \d+", shown, re.MULTILINE)]


def _parts(file: str) -> tuple[str, str]:
    name, version, _ = file.split("_", 2)
    return name, unquote(version)
