"""The manifest of a run: what has to be known to believe a number and to get it again.

Every run can write one. It never fails: what cannot be found out is the string `unknown`. It holds no paths, no user
and no host name, so that it can be published.
"""

from __future__ import annotations

import platform as host
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tierloop import __version__
from tierloop.devices.platform import Platform

PACKAGES = ("numpy", "numba", "llvmlite", "torch", "transformers", "tokenizers", "safetensors")
"""Libraries whose version can change a bit of the result."""

UNKNOWN = "unknown"


def manifest(config: Mapping[str, Any], platform: Platform | None = None, seed: int | None = None) -> dict[str, Any]:
    """Everything but the numbers themselves, as plain data for JSON.

    `config` is what the user asked for; `platform` adds its name, clock, dilation, provenance, guesses and notes.
    """
    record: dict[str, Any] = {
        "tierloop": __version__,
        "commit": commit(),
        "config": dict(config),
        "seed": seed,
        "python": sys.version.split()[0],
        "packages": {name: version(name) for name in PACKAGES},
        "threads": threads(),
        "cpu": cpu_model(),
        "machine": host.machine() or UNKNOWN,
        "system": f"{host.system()} {host.release()}",
    }
    if platform is not None:
        record["platform"] = {
            "name": platform.name,
            "clock": "virtual" if platform.clock.virtual else "wall",
            "dilation": platform.dilation,
            "provenance": platform.provenance,
            "guesses": list(platform.guesses),
            "notes": list(platform.notes),
        }
    return record


def commit() -> str:
    """The commit of the checkout that this code runs from, with `+changes` if files differ; `unknown` outside one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return UNKNOWN
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return UNKNOWN
    return f"{head}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else head


def version(package: str) -> str:
    """The installed version of a distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the operating system gives it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu model"))]
    return named[0] if named else host.processor() or UNKNOWN


def threads() -> int | str:
    """Threads of torch's matmuls, which change the last bits of a result; `unknown` before torch is loaded."""
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else UNKNOWN


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout.strip()
