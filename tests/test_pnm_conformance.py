"""The pnm driver passes the suite of every device on the firmware model.

Alone, beside a real cpu device, and on a mapped file that firmware on another thread looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from tests.pnm_rig import MIB, card_of, served
from tierloop.devices.conformance import Suite
from tierloop.devices.device import Device
from tierloop.devices.drivers import cache_lines
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.firmware_models.pnm_card import PnmParts


class TestOnTheModel(Suite):
    """Four engines, small rings: the driver has to wait for room in them."""

    examples: ClassVar[int] = 10

    def open(self, site: Site) -> Device:
        card = card_of(engines=4, entries=8, capacity=16 * MIB)
        return open_pnm("pnm0", site, {"deadline_ms": 20_000}, window=card.bus())


class TestBesideACpu(Suite):
    """A platform whose host memory the device copies to and from."""

    device: ClassVar[str] = "pnm0"
    levels: ClassVar[tuple[str, ...]] = ("identity", "memory")

    def open(self, site: Site) -> Platform:
        options = {"reaches": ["cpu0"], "deadline_ms": 20_000}
        device = open_pnm("pnm0", site, options, window=card_of(capacity=16 * MIB).bus())
        cpu = open_cpu("cpu0", site, {"capacity": 64 * MIB})
        return Platform("pair", site, {"cpu0": cpu, "pnm0": device}, "cpu0")


class TestBehindAMappedFile(Suite):
    """The window is mapped by both sides, and what the firmware knows of the doorbell is a word that changes."""

    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors")

    @pytest.fixture(autouse=True)
    def firmware(self, tmp_path: Path) -> Iterator[None]:
        with ExitStack() as self.running:
            self.folder = tmp_path
            yield

    def open(self, site: Site) -> Device:
        parts = PnmParts(engines=2, entries=8, capacity=4 * MIB)
        path = self.folder / f"window{len(list(self.folder.iterdir()))}"
        path.write_bytes(bytes(parts.layout().window_nbytes))
        self.running.enter_context(served(path, parts))
        return open_pnm("pnm0", site, {"path": str(path), "deadline_ms": 20_000})


class TestBehindAMappedFileWithCachesFlushed(TestBehindAMappedFile):
    """As for a card that does not look into the host's caches: lines are written back and dropped all the time."""

    levels: ClassVar[tuple[str, ...]] = ("memory", "ordering")

    def open(self, site: Site) -> Device:
        if not cache_lines.known():
            pytest.skip("no instruction that flushes caches is known on this processor")
        parts = PnmParts(engines=2, entries=8, capacity=4 * MIB)
        path = self.folder / f"window{len(list(self.folder.iterdir()))}"
        path.write_bytes(bytes(parts.layout().window_nbytes))
        self.running.enter_context(served(path, parts))
        return open_pnm("pnm0", site, {"path": str(path), "deadline_ms": 20_000, "caches": "flush"})
