"""Opening a window of a near-memory processor: on a real mapping, for one owner, and nothing that is not one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pnm_rig import MIB, SteppingClock, served
from tierloop.devices.clocks import VirtualClock, WallClock
from tierloop.devices.commands import Launch
from tierloop.devices.drivers.pnm import open_pnm
from tierloop.devices.drivers.pnm_wire import Layout
from tierloop.devices.errors import (
    Busy,
    ConfigurationError,
    DeviceError,
    Gone,
    Misaligned,
    NotPresent,
    ProtocolError,
    Unsupported,
)
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, wait, write_bytes
from tierloop.firmware_models.pnm_card import PnmCard, PnmParts

PARTS = PnmParts(capacity=MIB, arena_nbytes=1 << 16, largest_arguments=1 << 16)
LAYOUT = PARTS.layout()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the window of a card that nobody serves."""
    found = tmp_path / "window"
    found.write_bytes(PnmCard(PARTS).window.tobytes())
    return found


def opened(path: object, clock: Any = None, **options: Any) -> Any:
    return open_pnm("pnm0", Site(clock=clock or SteppingClock()), {"path": str(path), "deadline_ms": 5, **options})


def test_a_device_behind_a_mapped_file_computes(path: Path) -> None:
    site = Site(clock=WallClock())
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    with served(path, PARTS):
        device = open_pnm("pnm0", site, {"path": path.name, "folder": str(path.parent)})
        source, target = device.alloc(5000), device.alloc(5000)
        write_bytes(site.clock, device, source.all(), data, queue=2)
        wait(site.clock, device.submit(Launch(Gather(), ((source.all(),),), ((target.all(),),))))
        assert read_bytes(site.clock, device, target.all(), queue=2).tobytes() == data.tobytes()
        assert device.info.notes["path"] == str(path)
        device.close()
        again = open_pnm("pnm0", site, {"path": str(path)})
        again.close()


def test_a_window_that_nobody_serves_is_gone(path: Path) -> None:  # B18
    with pytest.raises(Gone, match="no answer to open within 5 ms"):
        opened(path)


def test_a_window_has_one_owner(path: Path) -> None:  # B18
    with served(path, PARTS):
        first = open_pnm("pnm0", Site(clock=WallClock()), {"path": str(path)})
        with pytest.raises(Busy, match="belongs to another owner"):
            opened(path)
        first.close()


def test_a_path_where_nothing_is_is_not_present(tmp_path: Path) -> None:
    with pytest.raises(NotPresent):
        opened(tmp_path / "nothing")


def test_a_folder_is_no_window(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="is a directory; a window is a file or a character device"):
        opened(tmp_path)


def test_a_character_device_has_to_be_told_its_size() -> None:
    with pytest.raises(ConfigurationError, match="'window_nbytes' is missing: /dev/zero does not say"):
        opened("/dev/zero")


def test_a_character_device_that_is_no_processor_is_not_present() -> None:
    with pytest.raises(NotPresent, match="no near-memory processor is there: the window begins with"):
        opened("/dev/zero", window_nbytes=1 << 20)


@pytest.mark.parametrize(
    ("nbytes", "kind", "says"),
    [
        (0, ConfigurationError, "a window of 0 bytes; allowed: at least"),
        (4096, ConfigurationError, "a window of 4096 bytes; allowed: at least"),
        (MIB + 100, Misaligned, "whole pages of"),
    ],
)
def test_a_window_that_is_too_small_or_no_whole_pages_is_refused(
    path: Path, nbytes: int, kind: type[Exception], says: str
) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(kind, match=says):
        opened(path)


def test_a_window_larger_than_its_file_is_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"window_nbytes = {1 << 30}: .* holds {LAYOUT.window_nbytes} bytes"):
        opened(path, window_nbytes=1 << 30)


def test_a_window_smaller_than_the_device_lays_out_is_refused(path: Path) -> None:
    with pytest.raises(ProtocolError, match=f"lays out {LAYOUT.window_nbytes} bytes, and the window has {MIB}"):
        opened(path, window_nbytes=MIB)


def _write_layout(path: Path, layout: Layout) -> None:
    path.write_bytes(layout.pack() + path.read_bytes()[len(layout.pack()) :])


def test_a_layout_that_cannot_be_is_refused_with_what_is_wrong(path: Path) -> None:
    _write_layout(path, replace(LAYOUT, arena_offset=LAYOUT.completion_offset))
    with pytest.raises(NotPresent, match=r"begins at \d+, inside the"):
        opened(path)


def test_another_version_is_unsupported(path: Path) -> None:
    _write_layout(path, replace(LAYOUT, oldest=2, newest=3))
    with pytest.raises(Unsupported, match="the device speaks versions 2 to 3 of the protocol; the driver speaks 1"):
        opened(path)


def test_what_failed_to_open_can_be_opened_afterwards(path: Path) -> None:
    for _ in range(2):
        with pytest.raises(DeviceError):
            opened(path)
    with served(path, PARTS):
        opened(path, clock=WallClock(), deadline_ms=10_000).close()


def test_it_refuses_a_virtual_clock(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pnm0 is a real device and cannot run on the virtual clock"):
        opened(path, clock=VirtualClock())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "path = ''"),
        ({"path": 7}, "path = 7"),
        ({"path": "a\0b"}, "path = "),
        ({"path": "x", "queues": 0}, "queues = 0"),
        ({"path": "x", "queues": 65}, "queues = 65; allowed: an integer from 1 to 64"),
        ({"path": "x", "deadline_ms": 0}, "deadline_ms = 0"),
        ({"path": "x", "deadline_ms": 10**9}, "deadline_ms = 1000000000; allowed: an integer from 1 to 86400000"),
        ({"path": "x", "window_nbytes": -1}, "window_nbytes = -1"),
        ({"path": "x", "reaches": "dram"}, "reaches = 'dram'"),
        ({"path": "x", "reaches": ["pnm0"]}, "reaches = "),
        ({"path": "x", "model": True}, "option 'model' is unknown"),
        ({"path": "x", "caches": "warm"}, "caches = 'warm'; allowed: auto, flush, coherent"),
        ({}, "option 'path' is missing"),
    ],
)
def test_options_that_are_wrong_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_pnm("pnm0", Site(clock=WallClock()), options)


def test_a_path_beside_a_window_that_was_handed_in_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="option 'path' beside a window"):
        open_pnm("pnm0", Site(clock=WallClock()), {"path": "x"}, window=PnmCard(PARTS).bus())
