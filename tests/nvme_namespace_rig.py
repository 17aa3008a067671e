"""What tests of NVMe passthrough share: a modelled drive that is driven both ways, and what its medium was told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme_rig import MIB, Rig, on_drive

WAYS = ("io_uring", "ioctl")


@pytest.fixture(params=WAYS)
def both_ways(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A drive with blocks of 512 bytes and transfers of 128 KiB, both ways."""
    made = on_drive(io=request.param, reaches=["dram"])
    yield made
    made.close()


def buffer(nbytes: int = 1 * MIB, skew: int = 0) -> NDArray[np.uint8]:
    """Zeros that begin `skew` bytes behind a page."""
    room = np.zeros(nbytes + 8192, dtype=np.uint8)
    start = -room.__array_interface__["data"][0] % 4096 + skew
    return room[start : start + nbytes]


def operations(rig: Rig, kind: str) -> list[tuple[int, int]]:
    """(first block, blocks) of all media operations of one kind."""
    with rig.machine.guard:
        return [(each.lba, each.blocks) for each in rig.machine.controller.history if each.op == kind]
