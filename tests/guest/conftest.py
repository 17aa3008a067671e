"""The guest that these tests run in: its description, and its hardware where QMP reaches it.

Elsewhere (a server with the same devices) TIERLOOP_GUEST_MACHINE names a file that describes the machine, and tests
that change the hardware are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tierloop.devices.errors import NotPresent
from tierloop.tools.guest import hardware as hardware_module
from tierloop.tools.guest.hardware import Hardware
from tierloop.tools.guest.machine import Machine, load


@pytest.fixture(scope="session")
def machine() -> Machine:
    """What this machine is described as."""
    return load(os.environ["TIERLOOP_GUEST_MACHINE"])


@pytest.fixture(scope="session")
def hardware(machine: Machine) -> Iterator[Hardware]:
    """What can be done to its hardware."""
    try:
        made, qmp = hardware_module.from_inside(machine)
    except NotPresent as error:
        pytest.skip(f"nothing can be done to this machine's hardware: {error}")
    yield made
    qmp.close()


@pytest.fixture(scope="session")
def pyverbs() -> None:
    """pyverbs can be imported."""
    folder = os.environ.get("TIERLOOP_GUEST_PYVERBS")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    pytest.importorskip("pyverbs.device")
