"""What is said of GPUs before any is opened: what there is, and why there is none."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_cuda import FakeTorch
from tierloop.devices.clocks import WallClock
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.gpu_probe import Slot, driver_version, gpu_slots, gpus, refuse_where_there_is_none
from tierloop.devices.errors import DeviceError, NoPermission, NotPresent, Unsupported
from tierloop.devices.site import Site
from tierloop.emulators.kernel import Absent, ModelKernel, Tree, failure
from tierloop.tools.inventory_hardware import gpus_seen

TREE = """\
/sys/bus/pci/devices/0000:00:02.0/vendor = 0x8086
/sys/bus/pci/devices/0000:00:02.0/class = 0x030000
/sys/bus/pci/devices/0000:41:00.0/vendor = 0x10de
/sys/bus/pci/devices/0000:41:00.0/class = 0x030200
/sys/bus/pci/devices/0000:41:00.0/numa_node = 1
/sys/bus/pci/devices/0000:41:00.1/vendor = 0x10de
/sys/bus/pci/devices/0000:41:00.1/class = 0x040300
/sys/bus/pci/devices/0000:42:00.0/vendor = 0x10de
/sys/bus/pci/devices/0000:42:00.0/class = 0x030200
/sys/bus/pci/devices/0000:42:00.0/numa_node = -1
/proc/driver/nvidia/version = NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1
"""


class Refusing(Absent):
    """A node that may not be opened."""

    def opened(self, flags: int) -> None:
        raise failure(errno.EACCES)


def machine(node: Absent | None) -> ModelKernel:
    return ModelKernel(Tree.of(TREE), {} if node is None else {"/dev/nvidiactl": node})


def without_cuda() -> Any:
    return SimpleNamespace(version=SimpleNamespace(cuda=None, hip=None), __version__="2.9+cpu")


def test_slots_are_those_of_gpus_and_not_of_their_sound_chips() -> None:
    assert gpu_slots(machine(None)) == (Slot("0000:41:00.0", 1, "NVIDIA"), Slot("0000:42:00.0", None, "NVIDIA"))


def test_each_gpu_is_found_with_its_address_and_its_node() -> None:
    seen = gpus(FakeTorch(2), machine(Absent()))
    assert [gpu.device for gpu in seen.found] == ["cuda:0", "cuda:1"]
    assert [gpu.slot.numa_node for gpu in seen.found] == [1, None]
    assert seen.found[0].compute_capability == "9.0"
    assert seen.runtime == "CUDA 12.8"
    assert "570.1" in seen.driver
    assert seen.reasons == ()
    assert seen.found[0].to_json()["slot"]["bus_address"] == "0000:41:00.0"


def test_a_torch_without_cuda_is_the_reason() -> None:
    seen = gpus(without_cuda(), machine(Absent()))
    assert not seen.found
    assert seen.reasons == ("torch 2.9+cpu was built without CUDA and ROCm: install a build with it",)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (machine(None), "no node of a driver below /dev"),
        (machine(Refusing()), "permission to open /dev/nvidiactl is refused"),
        (machine(Absent()), "CUDA_VISIBLE_DEVICES"),
        (ModelKernel(Tree.of("")), "/sys/bus/pci/devices has no GPU"),
    ],
)
def test_why_torch_sees_none(kernel: ModelKernel, reason: str) -> None:
    seen = gpus(FakeTorch(0), kernel)
    assert not seen.found
    assert any(reason in why for why in seen.reasons), seen.reasons


def test_a_driver_that_is_not_there_has_no_version() -> None:
    assert driver_version(ModelKernel(Tree.of(""))) == ""


@pytest.mark.parametrize(
    ("torch", "kernel", "kind"),
    [
        (FakeTorch(1), machine(Absent()), NotPresent),
        (FakeTorch(0), machine(Refusing()), NoPermission),
        (without_cuda(), machine(Absent()), Unsupported),
    ],
)
def test_opening_one_that_is_not_there_says_what_is(torch: Any, kernel: ModelKernel, kind: type[DeviceError]) -> None:
    with pytest.raises(kind, match="gpu0: open: cuda:3 is not there"):
        refuse_where_there_is_none("gpu0", 3, kernel, torch)


def test_on_this_machine_the_driver_opens_a_gpu_or_says_why_not() -> None:
    seen = gpus()
    if seen.found:
        pytest.skip(f"there is one: {seen.found[0].name}")
    with pytest.raises(DeviceError) as raised:
        open_gpu("gpu0", Site(clock=WallClock()), {})
    assert all(reason in str(raised.value) for reason in seen.reasons)


def test_doctor_lists_gpus_or_the_reason() -> None:
    found = gpus_seen()
    assert found
    assert all(one.kind == "gpu" and one.reasons for one in found)
