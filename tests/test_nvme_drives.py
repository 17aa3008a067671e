"""NVMe drives as sysfs shows them: found by name or by number, with who uses them; nothing is opened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers.nvme_drives import controllers_of, in_use, nvme_drives, state_advice, whole
from tierloop.devices.drivers.nvme_probe import probe
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_nvme import nvme_machine

CONTROLLER = "/sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0"
TREE = f"""\
{CONTROLLER}/model = A drive
{CONTROLLER}/serial = S1
{CONTROLLER}/firmware_rev = 1.0
{CONTROLLER}/transport = pcie
{CONTROLLER}/address = 0000:01:00.0
{CONTROLLER}/numa_node = 1
{CONTROLLER}/state = live
{CONTROLLER}/ng0n1/dev = 240:0
{CONTROLLER}/ng0n1/device -> ../../nvme0
{CONTROLLER}/nvme0n1/dev = 259:0
{CONTROLLER}/nvme0n1/size = 2048
{CONTROLLER}/nvme0n1/holders/
{CONTROLLER}/nvme0n1/nvme0n1p1/dev = 259:1
{CONTROLLER}/nvme0n1/nvme0n1p1/partition = 1
{CONTROLLER}/nvme0n1/nvme0n1p1/holders/
/sys/class/nvme/nvme0 -> ../../devices/pci0000:00/0000:01:00.0/nvme/nvme0
/sys/class/nvme-generic/ng0n1 -> ../../devices/pci0000:00/0000:01:00.0/nvme/nvme0/ng0n1
/sys/block/nvme0n1 -> ../devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1
/sys/dev/block/259:0 -> ../../devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1
"""


def machine(**files: str) -> ModelKernel:
    """The machine above with more files, by path (`__` stands for a slash)."""
    tree = Tree.of(TREE)
    for path, text in files.items():
        tree.put("/" + path.replace("__", "/"), text)
    return ModelKernel(tree)


def test_a_drive_is_listed_with_its_namespaces() -> None:
    (drive,) = nvme_drives(machine())
    assert (drive.controller, drive.model, drive.serial, drive.firmware) == ("nvme0", "A drive", "S1", "1.0")
    assert (drive.state, drive.transport, drive.bus_address, drive.numa_node) == ("live", "pcie", "0000:01:00.0", 1)
    (namespace,) = drive.namespaces
    assert (namespace.name, namespace.generic, namespace.block) == ("nvme0n1", "/dev/ng0n1", "/dev/nvme0n1")
    assert namespace.nbytes == 1 << 20
    assert namespace.in_use == ""


def test_a_machine_without_drives_has_none() -> None:
    assert nvme_drives(ModelKernel()) == []


def test_a_namespace_under_multipath_is_listed_with_each_controller() -> None:
    tree = Tree.of("""\
/sys/devices/virtual/nvme-subsystem/nvme-subsys0/ng0n1/dev = 240:0
/sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0 -> ../../../pci/nvme/nvme0
/sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme1 -> ../../../pci/nvme/nvme1
/sys/devices/pci/nvme/nvme0/state = live
/sys/devices/pci/nvme/nvme1/state = connecting
/sys/class/nvme/nvme0 -> ../../devices/pci/nvme/nvme0
/sys/class/nvme/nvme1 -> ../../devices/pci/nvme/nvme1
/sys/class/nvme-generic/ng0n1 -> ../../devices/virtual/nvme-subsystem/nvme-subsys0/ng0n1
""")
    kernel = ModelKernel(tree)
    assert controllers_of(kernel, "/sys/class/nvme-generic/ng0n1") == ["nvme0", "nvme1"]
    assert [(d.controller, d.state, [n.generic for n in d.namespaces]) for d in nvme_drives(kernel)] == [
        ("nvme0", "live", ["/dev/ng0n1"]),
        ("nvme1", "connecting", ["/dev/ng0n1"]),
    ]


def test_a_namespace_without_a_block_device_has_no_block_node() -> None:
    kernel = machine()
    kernel.tree.remove("/sys/block/nvme0n1")
    ((namespace,),) = [drive.namespaces for drive in nvme_drives(kernel)]
    assert (namespace.generic, namespace.block, namespace.nbytes) == ("/dev/ng0n1", None, 0)


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("proc__self__mountinfo", "36 35 259:0 / /data rw - ext4 /dev/nvme0n1 rw", "nvme0n1 is mounted at /data"),
        ("proc__self__mountinfo", "36 35 259:1 / /mnt rw - xfs /dev/nvme0n1p1 rw", "nvme0n1p1 is mounted at /mnt"),
        ("proc__self__mountinfo", "36 35 0:50 / /pool rw - btrfs /dev/nvme0n1p1 rw", "nvme0n1p1 is mounted at /pool"),
        ("proc__swaps", "Filename Type\n/dev/nvme0n1p1 partition 8 0 -2", "nvme0n1p1 is swapped to"),
    ],
)
def test_a_disk_that_is_mounted_or_swapped_to_is_in_use(path: str, text: str, said: str) -> None:
    kernel = machine(**{path: text})
    assert in_use(kernel, "/sys/block/nvme0n1") == said
    assert in_use(kernel, "/sys/dev/block/259:0") == said


@pytest.mark.parametrize("part", ["", "/nvme0n1p1"])
def test_a_disk_or_partition_with_holders_is_in_use(part: str) -> None:
    kernel = machine()
    kernel.tree.link(f"{CONTROLLER}/nvme0n1{part}/holders/dm-0", "../../../../../virtual/block/dm-0")
    assert in_use(kernel, "/sys/block/nvme0n1").endswith("is held by dm-0")


def test_mounts_of_other_disks_do_not_count() -> None:
    mounts = "1 0 259:7 / / rw - ext4 /dev/nvme0n10 rw\n2 1 0:22 / /proc rw - proc proc rw\nbroken - line\n"
    assert in_use(machine(proc__self__mountinfo=mounts), "/sys/block/nvme0n1") == ""


@given(st.text(), st.text(), st.text())
def test_no_text_of_the_kernel_breaks_the_list(mounts: str, swaps: str, fact: str) -> None:
    kernel = machine(proc__self__mountinfo=mounts, proc__swaps=swaps)
    for name in ("numa_node", "state", "nvme0n1/size", "nvme0n1/dev", "nvme0n1/nvme0n1p1/partition"):
        kernel.tree.put(f"{CONTROLLER}/{name}", fact)
    (drive,) = nvme_drives(kernel)
    assert [namespace.name for namespace in drive.namespaces] == ["nvme0n1"]


@pytest.mark.parametrize("said", ["9" * 5000, str(1 << 64), "-1", "²", "", "12 KiB"])
def test_a_text_that_is_no_number_of_sysfs_is_none(said: str) -> None:
    assert whole(said) is None
    machine = nvme_machine(1 << 20)
    facts = ("numa_node", "nr_requests", "max_hw_sectors_kb", "logical_block_size")
    for name in [name for name in machine.tree.files if name.endswith(facts)]:
        machine.tree.put(name, said)
    for path in ("/dev/ng0n1", "/dev/nvme0n1"):
        assert [str(reason) for reason in probe(path, machine) if reason.fatal] == []


def test_a_state_that_is_not_live_comes_with_advice() -> None:
    assert state_advice("nvme0", "live") == state_advice("nvme0", "") == ""
    assert "try again" in state_advice("nvme0", "resetting")
    assert "does not answer" in state_advice("nvme0", "dead")
