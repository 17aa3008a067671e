"""Sizes and paths as callers hand them in: NumPy's integers count, and what cannot be either is refused at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvme_rig import MIB, Rig, on_drive, on_fake, on_file
from tests.seeded import bytes_of
from tierloop.devices.drivers.nvme import open_nvme, probe
from tierloop.devices.errors import ConfigurationError, OutOfRange


@pytest.fixture(params=[on_fake, on_drive])
def rig(request: pytest.FixtureRequest) -> Rig:
    made: Rig = request.param()
    return made


@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.int16])
def test_sizes_and_offsets_may_be_integers_of_numpy(rig: Rig, kind: Any) -> None:
    region = rig.device.alloc(kind(8192))
    assert type(region.nbytes) is int
    rig.write(region.all(), bytes_of(1, 8192))
    offset = rig.device.offset_of(region)
    rig.device.free(region)
    again = rig.device.adopt(kind(offset), kind(8192))
    assert type(rig.device.offset_of(again)) is int
    rig.device.free(again)
    rig.close()


@pytest.mark.parametrize("size", [True, np.True_, 1.5, 4096.0, np.float64(4096), "4096", None])
def test_what_is_no_whole_number_of_bytes_is_refused_and_takes_nothing(rig: Rig, size: Any) -> None:
    with pytest.raises(OutOfRange, match="is no whole number of bytes"):
        rig.device.alloc(size)
    for call in ((0, size), (size, 4096)):
        with pytest.raises(OutOfRange, match="is no whole number of bytes"):
            rig.device.adopt(*call)
    rig.device.free(rig.device.alloc(8 * MIB))  # all of it is free
    rig.close()


@pytest.mark.parametrize("path", ["\ud800", "a\0b", "", None, 5, b"bytes", Path("object")])
def test_what_no_system_takes_for_a_path_is_refused_as_an_option_and_as_a_reason(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="a path is a string that is not empty"):
        open_nvme("nvme0", on_fake().site, {"path": path})
    (reason,) = probe(path)
    assert reason.fatal
    assert "a path is a string" in reason


def test_a_path_of_bytes_that_are_no_text_is_a_path(tmp_path: Path) -> None:
    rig = on_file(tmp_path)
    rig.path = str(tmp_path / "medium\udcff")
    rig.open(capacity=MIB)
    rig.close()
    assert [os.fsencode(name) for name in os.listdir(tmp_path)] == [b"medium\xff"]
