"""QMP, and what is done to the hardware of a guest by it, on a QEMU that only answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError, NotPresent, ProtocolError, Timeout
from tierloop.devices.regions import Region
from tierloop.tools.guest.hardware import DriveDoor, Hardware
from tierloop.tools.guest.machine import DEFAULT, load
from tierloop.tools.guest.qmp import Qmp, QmpError

GREETING = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}}}}


class FakeQemu:
    """Answers QMP on a unix socket, as told, and keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "qmp"
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, list[dict[str, Any] | bytes]] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, client.makefile("rwb") as stream:
            stream.write(json.dumps(GREETING).encode() + b"\n")
            stream.flush()
            for line in stream:
                told = json.loads(line)
                self.asked.append(told)
                for answer in self.answers.get(told["execute"], [{"return": {}}]):
                    stream.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")
                stream.flush()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)

    @property
    def last(self) -> tuple[str, dict[str, Any]]:
        return self.asked[-1]["execute"], self.asked[-1].get("arguments", {})


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[FakeQemu]:
    made = FakeQemu(tmp_path)
    yield made
    made.close()


@pytest.fixture
def qmp(qemu: FakeQemu) -> Iterator[Qmp]:
    with Qmp(qemu.path, limit_s=5) as made:
        yield made


def test_an_answer_is_told_from_events(qemu: FakeQemu, qmp: Qmp) -> None:
    assert qmp.version == "10.0.2"
    qemu.answers["query-status"] = [{"event": "RESUME"}, {"return": {"running": True}}]
    assert qmp.ask("query-status") == {"running": True}
    assert [event["event"] for event in qmp.events] == ["RESUME"]


def test_a_refusal_has_qemus_words(qemu: FakeQemu, qmp: Qmp) -> None:
    qemu.answers["device_del"] = [{"error": {"class": "DeviceNotFound", "desc": "Device 'x' not found"}}]
    with pytest.raises(QmpError, match="guest: device_del: DeviceNotFound: Device 'x' not found"):
        qmp.ask("device_del", id="x")


@pytest.mark.parametrize("answer", [b"nonsense\n", b"[]\n", b"{}\n", b"7\n"])
def test_nonsense_is_a_protocol_error(qemu: FakeQemu, qmp: Qmp, answer: bytes) -> None:
    qemu.answers["stop"] = [answer]
    with pytest.raises(ProtocolError):
        qmp.ask("stop")


def test_a_qemu_that_says_nothing_is_a_timeout(qemu: FakeQemu) -> None:
    qemu.answers["stop"] = []
    with Qmp(qemu.path, limit_s=0.2) as silent, pytest.raises(Timeout, match=r"within 0\.2 s"):
        silent.ask("stop")


def test_outside_of_a_guest_there_is_no_qmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIERLOOP_GUEST_QMP", raising=False)
    with pytest.raises(NotPresent, match="runs in no guest"):
        Qmp.from_inside()
    with pytest.raises(NotPresent, match="does not answer"):
        Qmp(tmp_path / "nothing")


def test_lost_sectors_are_put_in_a_drives_way_and_taken_out(qemu: FakeQemu, qmp: Qmp) -> None:
    hardware = Hardware(qmp, load(DEFAULT))
    hardware.lose("TIER0001", [8, 9])
    added = next(one["arguments"] for one in qemu.asked if one["execute"] == "blockdev-add")
    assert [rule["sector"] for rule in added["inject-error"]] == [8, 9]
    assert qemu.last == (
        "blockdev-reopen",
        {"options": [{"driver": "raw", "node-name": "top-TIER0001", "file": added["node-name"]}]},
    )
    hardware.lose("TIER0001", [])
    assert qemu.last == ("blockdev-del", {"node-name": added["node-name"]})


@pytest.mark.parametrize("sectors", [[-1], [1 << 40], list(range(5000))])
def test_sectors_that_a_drive_does_not_have_are_refused(qemu: FakeQemu, qmp: Qmp, sectors: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="lost sectors of TIER0001"):
        Hardware(qmp, load(DEFAULT)).lose("TIER0001", sectors)


def test_the_back_door_loses_the_sectors_of_a_region(qemu: FakeQemu, qmp: Qmp) -> None:
    door = DriveDoor(Hardware(qmp, load(DEFAULT)), "TIER0001", lambda _: 1 << 20)
    assert door.abilities == {"unreadable", "hang"}
    door.unreadable(Region("nvme0", "nvme0", 0, 65536), 4096, 600)
    added = next(one["arguments"] for one in qemu.asked if one["execute"] == "blockdev-add")
    assert [rule["sector"] for rule in added["inject-error"]] == [2048 + 8, 2048 + 9]


def test_the_next_flush_of_a_drive_is_refused(qemu: FakeQemu, qmp: Qmp) -> None:
    hardware = Hardware(qmp, load(DEFAULT))
    hardware.refuse_a_flush("TIER0001")
    added = next(one["arguments"] for one in qemu.asked if one["execute"] == "blockdev-add")
    assert [(rule["iotype"], rule["once"]) for rule in added["inject-error"]] == [("flush", True)]
    hardware.lose("TIER0001", [])
    assert qemu.last == ("blockdev-del", {"node-name": added["node-name"]})


def test_what_lies_in_a_drives_way_is_changed_before_it_is_plugged_in(qemu: FakeQemu, qmp: Qmp) -> None:
    hardware = Hardware(qmp, load(DEFAULT))
    hardware.lose("TIER0002", [8])
    qemu.asked.clear()
    hardware.restore("TIER0002")
    asked = [one["execute"] for one in qemu.asked]
    assert asked.index("blockdev-reopen") < asked.index("device_add")
    assert "block_set_io_throttle" not in asked  # it is the device's, and there is none


def test_a_drive_with_nothing_in_its_way_is_left_alone(qemu: FakeQemu, qmp: Qmp) -> None:
    hardware = Hardware(qmp, load(DEFAULT))
    hardware.lose("TIER0001", [])
    assert "blockdev-reopen" not in [one["execute"] for one in qemu.asked]


def test_a_drive_without_a_slot_cannot_be_pulled_out(qemu: FakeQemu, qmp: Qmp) -> None:
    with pytest.raises(ConfigurationError, match="hotplug = true"):
        Hardware(qmp, load(DEFAULT)).unplug("TIER0001")


def test_poison_is_whole_lines_of_a_memory(qemu: FakeQemu, qmp: Qmp) -> None:
    hardware = Hardware(qmp, load(DEFAULT))
    hardware.poison("volatile", 4096, 128)
    assert qemu.last == (
        "cxl-inject-poison",
        {"path": "/machine/peripheral/cxl-volatile", "start": 4096, "length": 128},
    )
    for start, nbytes in ((1, 64), (0, 63), (512 << 20, 64), (0, 0)):
        with pytest.raises(ConfigurationError, match="poison of volatile"):
            hardware.poison("volatile", start, nbytes)
    with pytest.raises(NotPresent, match="did you mean 'volatile'"):
        hardware.poison("volatil", 0)
