"""The cxl driver passes the suite of every device beside a cpu device that reaches it: on a file, a devdax, a node."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.cxl_rig import MIB, devdax, file_of, pair
from tests.numa_rig import a_node_of_this_machine
from tierloop.devices.conformance import Suite
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site


class TestOnAFile(Suite):
    """Real pages of a real file."""

    device: ClassVar[str] = "cxl0"
    examples: ClassVar[int] = 10

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open(self, site: Site) -> Platform:
        return pair(site, {"path": str(file_of(self.path))})


class TestOnAPersistentDevdax(Suite):
    """A recorded machine with a dax device of this test's own."""

    device: ClassVar[str] = "cxl0"
    levels: ClassVar[tuple[str, ...]] = ("memory",)

    def open(self, site: Site) -> Platform:
        kernel, _ = devdax("pmem", "dax1.0")
        return pair(site, {"path": "/dev/dax1.0"}, kernel)


class TestOnANodeOfThisMachine(Suite):
    """Memory that is really bound."""

    device: ClassVar[str] = "cxl0"
    levels: ClassVar[tuple[str, ...]] = ("memory",)

    def open(self, site: Site) -> Platform:
        return pair(site, {"node": a_node_of_this_machine(), "capacity": 8 * MIB})
