"""A read that moves nothing: the end of a disk whose drive was pulled out, or bytes that a live drive does not give."""

from __future__ import annotations

import threading

import pytest

from tierloop.devices.drivers.engines import Target, ran_dry
from tierloop.devices.errors import DeviceError, Gone, MediaError, ProtocolError
from tierloop.emulators.kernel import ModelKernel, Tree


def target(*states: str) -> Target:
    """A target whose controllers are in these states; "" is one that sysfs no longer shows."""
    names = [f"nvme{at}" for at in range(len(states))]
    shown = {f"/sys/class/nvme/{name}/state": state for name, state in zip(names, states, strict=True) if state}
    kernel = ModelKernel(Tree(shown))
    return Target("nvme0", kernel, 3, 512, 4, 1.0, 2, threading.Event(), controllers=tuple(names))


@pytest.mark.parametrize("states", [("",), ("dead",), ("deleting", "")])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_has_left_is_gone(states: tuple[str, ...], op: str) -> None:
    error = ran_dry(target(*states), op, 4096, 512)
    assert isinstance(error, Gone)
    assert "512 bytes at offset 4096" in str(error)


@pytest.mark.parametrize("states", [(), ("live",), ("dead", "live"), ("resetting",)])
@pytest.mark.parametrize(("op", "kind"), [("read", MediaError), ("write", ProtocolError)])
def test_a_drive_that_is_there_is_not(states: tuple[str, ...], op: str, kind: type[DeviceError]) -> None:
    assert type(ran_dry(target(*states), op, 4096, 512)) is kind
