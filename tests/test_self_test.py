"""The self-test of a platform's tiers: what it finds, what it names, and that nothing of what is stored is changed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.broken_devices import CallsItselfReal
from tests.cxl_rig import file_of, pair
from tests.machines import write_machine
from tests.nvme_rig import MIB, Rig, on_drive, on_fake
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.example import Example
from tierloop.devices.device import Device
from tierloop.devices.drivers.cxl import open_cxl
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import Busy, Gone, MediaError, OutOfRange
from tierloop.devices.faulty_host import of
from tierloop.devices.persistent import keeper
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.self_test import BLOCK, self_test, start_up_test
from tierloop.devices.site import Site
from tierloop.devices.waiting import read_bytes, write_bytes
from tierloop.devices.wrappers import Faulty
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.emulators.modelled import KINDS, open_modelled
from tierloop.tools import cli
from tierloop.tools.comparing import Asked

Bytes = NDArray[np.uint8]
MEDIUM = 128 * BLOCK


class Forgets(Example):
    """Takes what it is told to write, and does nothing with it."""

    def _store(self, segments: Sequence[Segment], data: Bytes) -> None:
        pass


class TakesOneByteForAnother(CallsItselfReal):
    """A real device whose byte 17 of every region is stuck."""

    def _store(self, segments: Sequence[Segment], data: Bytes) -> None:
        stuck = data.copy()
        stuck[17:18] = 0
        super()._store(segments, stuck)


def platform_of(device: Device, site: Site) -> Platform:
    return Platform("one", site, {device.info.name: device})


def on(rig: Rig) -> Platform:
    """A platform of the rig's device."""
    return Platform("drive", rig.site, {"nvme0": rig.device})


# -- what is found ----------------------------------------------------------------------------------------------------


def test_every_tier_is_written_and_read_by_everybody_who_reaches_it() -> None:  # B12
    with open_modelled(sorted(KINDS), Site(clock=WallClock())) as platform:
        found = self_test(platform, real_only=True)
        assert all(tested.good and tested.wrote for tested in found), found
        assert {tested.memory for tested in found} == {"cpu0", "cxl0", "gpu0", "nvme0", "pnm0"}
        by = {tested.by for tested in found if tested.memory == "cxl0"}
        assert {"cpu0 cores", "gpu0 h2d", "nvme0 dma", "pnm0 dma"} <= by


def test_a_tier_that_forgets_what_was_written_is_named_with_what_differs() -> None:  # B12
    site = Site()
    (tested,) = self_test(platform_of(Forgets(site), site))
    assert isinstance(tested.error, MediaError)
    assert str(tested.error).startswith("emu:example: self-test: emu:example engine to a new region of 4096 bytes")
    assert "4096 of 4096 bytes are not those that were written, the first at 0: 0x00 instead of" in str(tested.error)
    assert not tested.good


def test_a_single_wrong_byte_of_a_real_tier_ends_the_start() -> None:  # B12
    site = Site(WallClock())
    with pytest.raises(MediaError, match=r"example: self-test: .* 1 of 4096 bytes .* the first at 17: 0x00 instead of"):
        start_up_test(platform_of(TakesOneByteForAnother(site), site))


def test_emulated_tiers_are_left_alone_at_the_start() -> None:
    with open_platform("demo", clock="virtual") as platform:
        assert start_up_test(platform) == []
        assert platform.clock.now() == 0


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"cxl"}))
def test_a_lost_tier_keeps_the_kind_of_its_error(kind: str) -> None:
    platform = open_modelled([kind], Site(clock=WallClock()))
    back_door = of(platform.site, f"{kind}0")
    assert back_door is not None
    back_door.unplug()
    failed = [tested.error for tested in self_test(platform) if tested.memory == f"{kind}0"]
    assert len(failed) == 1
    assert isinstance(failed[0], Gone), repr(failed[0])
    assert str(failed[0]).startswith(f"{kind}0: self-test: ")


def test_a_write_that_the_drive_refuses_is_its_error_with_the_place() -> None:
    rig = on_drive()
    machine, capacity = rig.machine, rig.device.info.memories[0].capacity
    grid = rig.device.info.memories[0].alignment
    machine.controller.inject_write_fault(1, (capacity - BLOCK) // grid, BLOCK // grid)
    (tested,) = self_test(on(rig))
    assert isinstance(tested.error, MediaError)
    assert f"nvme0 dma to bytes [{capacity - BLOCK}, {capacity}) of the medium" in str(tested.error)
    rig.close()


def test_what_was_told_to_fail_is_left_out_and_so_is_what_nobody_reaches(tmp_path: Path) -> None:
    site = Site(WallClock())
    alone = open_cxl("cxl0", site, {"path": str(file_of(tmp_path))})
    faulty = Faulty(Example(site), site, write_per_million=1_000_000)
    with Platform("two", site, {"cxl0": alone, "emu:example": faulty}) as platform:
        remarks = {tested.memory: tested.remark for tested in self_test(platform)}
    assert remarks == {
        "cxl0": "nobody reads and writes it from host memory",
        "emu:example": "it was told to fail now and then",
    }


@pytest.mark.parametrize("path", ["/dev/ng0n1", "/dev/nvme0n1"])
def test_a_drive_that_takes_no_writes_is_only_read_and_that_is_said(path: str) -> None:
    machine = nvme_machine()
    machine.tree.put("/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/ro", "1")
    rig = on_drive(machine)
    rig.path = path
    (tested,) = start_up_test(on(rig))
    assert tested.good
    assert not tested.wrote
    assert tested.remark.startswith("only read: the kernel has nvme0n1 set to read-only")
    rig.close()
    assert {operation.op for operation in machine.controller.history} == {"read"}


def test_who_was_told_to_fail_tests_no_other_tier(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    (tmp_path / "medium").write_bytes(bytes(MEDIUM))
    file.write_text(REAL + 'reaches.dram = []\nwrap = [{ kind = "faulty", write_per_million = 1_000_000 }]\n')
    with open_platform(file) as platform:
        tested = {(each.memory, each.by): each.remark for each in start_up_test(platform)}
    assert tested == {("dram", "dram cores"): "", ("nvme", ""): "it was told to fail now and then"}


@pytest.mark.parametrize("tested", [True, False])
def test_a_platform_that_was_tried_can_be_recorded_afterwards(tested: bool, tmp_path: Path) -> None:
    (tmp_path / "medium").write_bytes(bytes(MEDIUM))
    file = tmp_path / "here.toml"
    file.write_text(REAL + 'wrap = [{ kind = "recorded", file = "recording" }]\n')
    Asked(platform=str(file), self_test=tested).try_out()
    assert not (tmp_path / "recording").exists()
    with open_platform(file) as platform:
        device = platform.device("nvme")
        device.free(device.alloc(BLOCK))
    assert [json.loads(line).get("op") for line in (tmp_path / "recording").read_text().splitlines()][1:]


# -- what is stored ---------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_not_a_byte_of_a_medium_is_changed(full: list[bool]) -> None:
    stored = np.concatenate(
        [bytes_of(i, BLOCK) | 1 if taken else np.zeros(BLOCK, np.uint8) for i, taken in enumerate(full)]
    )
    rig = on_fake(capacity=len(stored))
    rig.fake.add("/medium", "file", stored.tobytes())
    (tested,) = self_test(on(rig))
    assert rig.fake.contents("/medium") == stored.tobytes()
    assert tested.good
    assert tested.wrote == (not all(full[-64:]))
    assert ("only read" in tested.remark) == (not tested.wrote)
    rig.device.free(rig.device.alloc(len(stored)))  # and all of it can be had
    rig.close()


def test_a_test_that_fails_half_way_puts_zeros_back() -> None:
    rig = on_fake(capacity=MEDIUM, io="posix", queues=1)
    written: list[Completion] = []

    def spoil(completion: Completion) -> None:
        if isinstance(completion.command, Write):
            if not written:
                rig.fake.inject("read", errno.EIO)
            written.append(completion)

    rig.site.observers.append(spoil)
    (tested,) = self_test(on(rig))
    assert isinstance(tested.error, MediaError)
    assert (tested.error.errno, len(written)) == (errno.EIO, 2)
    assert not any(rig.fake.contents("/medium"))
    rig.close()


def nvme_file(folder: Path) -> Platform:
    site = Site(WallClock())
    options = {"path": str(folder / "medium"), "capacity": MIB, "create": True, "queues": 1}
    return platform_of(open_nvme("nvme0", site, options), site)


def cxl_file(folder: Path) -> Platform:
    return pair(Site(WallClock()), {"path": str(file_of(folder, MIB))})


def emulated_file(folder: Path) -> Platform:
    return open_platform(write_machine(folder), overrides={"devices.nvme.keep": str(folder / "kept")})


@pytest.mark.parametrize(("opened", "name"), [(nvme_file, "nvme0"), (cxl_file, "cxl0"), (emulated_file, "emu:nvme")])
def test_what_is_disowned_can_be_adopted_again_with_its_bytes(
    opened: Callable[[Path], Platform], name: str, tmp_path: Path
) -> None:
    with opened(tmp_path) as platform:
        device, clock = platform.device(name), platform.clock
        who = next(owner for owner, executor in platform.executors() if executor.path(name) is not None)
        keep = keeper(device)
        assert keep is not None
        region = keep.adopt(16 * BLOCK, 2 * BLOCK)
        write_bytes(clock, who, region.all(), bytes_of(1, 2 * BLOCK))
        keep.disown(region)
        with pytest.raises(OutOfRange):
            keep.disown(region)
        again = keep.adopt(16 * BLOCK, 2 * BLOCK)
        assert np.array_equal(read_bytes(clock, who, again.all()), bytes_of(1, 2 * BLOCK))
        with pytest.raises(Busy):
            keep.adopt(16 * BLOCK, BLOCK)


# -- on the command line ----------------------------------------------------------------------------------------------

REAL = """
description = "This host's memory and a file as its drive"
clock = "wall"
host = "dram"
[devices.dram]
driver = "cpu"
capacity = 67_108_864
[devices.nvme]
driver = "nvme"
path = "medium"
"""


def test_doctor_tests_the_tiers_of_a_platform_and_leaves_them_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = bytes_of(3, MEDIUM) | 1
    (tmp_path / "medium").write_bytes(stored.tobytes())
    file = tmp_path / "here.toml"
    file.write_text(REAL)  # a relative path begins at the file
    assert cli.main(["doctor", "--quick", "--platform", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["self_test"]
    assert {row["memory"]: row["wrote"] for row in found} == {"dram": True, "nvme": False}
    assert (tmp_path / "medium").read_bytes() == stored.tobytes()


@pytest.mark.parametrize("command", [("run",), ("compare",), ("ablate", "hybridgen")])
def test_a_command_ends_with_the_tier_that_failed_unless_the_test_is_left_out(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> Platform:
        site = Site(WallClock())
        return platform_of(TakesOneByteForAnother(site), site)

    monkeypatch.setattr(Asked, "open", broken)
    asked = [*command, "--model", "/no/such/model"]
    assert cli.main(asked) == 1
    assert "self-test" in capsys.readouterr().err
    assert cli.main([*asked, "--no-self-test"]) == 2
    assert "/no/such/model" in (err := capsys.readouterr().err)
    assert "self-test" not in err
