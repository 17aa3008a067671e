"""Where the rig lies: one folder, which git ignores and `clean` removes.

    packages/   .deb files that were fetched and verified; kept only until the layers stand
    apt/        apt's own lists, private to the rig
    layers/     what guests are made of; appears whole, by a rename
    runs/       a folder for each guest that runs: its console, its drives, what comes out
    results/    what the tests of the last guest left, where no other folder is named

`TIERLOOP_GUEST` names another folder, for those who share one rig among checkouts.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tierloop.devices.errors import ConfigurationError

FORMAT = 1
"""Counts up when layers of an older rig no longer do."""


@dataclass(frozen=True)
class Layers:
    """What stands in `layers/`: written last, so that it says the rest is whole."""

    format: int
    suite: str
    kernel: str
    qemu: str
    setup_s: float
    packages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Places:
    """The folders of one rig."""

    root: Path

    @property
    def packages(self) -> Path:
        """Fetched packages."""
        return self.root / "packages"

    @property
    def apt(self) -> Path:
        """What apt keeps."""
        return self.root / "apt"

    @property
    def layers(self) -> Path:
        """What guests are made of."""
        return self.root / "layers"

    @property
    def runs(self) -> Path:
        """Guests that run."""
        return self.root / "runs"

    @property
    def lock(self) -> Path:
        """Held while the rig is set up or removed."""
        return self.root.with_name(f".{self.root.name}.lock")

    @property
    def qemu(self) -> Path:
        """QEMU and what it needs."""
        return self.layers / "qemu"

    @property
    def guest(self) -> Path:
        """The layer that lies over the host's file system in the guest."""
        return self.layers / "guest"

    def standing(self) -> Layers | None:
        """What the layers say of themselves; None where there are none that this version can use."""
        try:
            told = json.loads((self.layers / "rig.json").read_text())
            layers = Layers(**{**told, "packages": tuple(tuple(pair) for pair in told["packages"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return layers if layers.format == FORMAT else None

    def needed(self) -> Layers:
        """What the layers say of themselves. Raises ConfigurationError where there are none."""
        layers = self.standing()
        if layers is None:
            raise ConfigurationError(f"no guest rig in {self.root}: make one with `tierloop guest setup`")
        return layers


def write_note(folder: Path, layers: Layers) -> None:
    """Say of layers that they are whole."""
    (folder / "rig.json").write_text(json.dumps(asdict(layers), indent=2) + "\n")


def is_held(run: Path) -> bool:
    """Whether the process that runs this guest is still there: it holds a lock for as long as it lives."""
    try:
        with (run / "owner").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def places() -> Places:
    """The rig of this checkout: `.cache/guest` at its top, or what TIERLOOP_GUEST names."""
    named = os.environ.get("TIERLOOP_GUEST")
    if named:
        return Places(Path(named).absolute())
    top = Path(__file__).resolve().parents[2]
    if not (top / "pyproject.toml").exists():
        raise ConfigurationError("the guest rig belongs to a checkout; elsewhere TIERLOOP_GUEST names its folder")
    return Places(top / ".cache" / "guest")
