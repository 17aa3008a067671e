"""The model of a kernel: as strict as Linux about paths, descriptors and requests, and a tree that reads back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tierloop.devices.system import HostSystem, System, resolved
from tierloop.emulators.kernel import Absent, ModelKernel, Tree, failure

TREE = """\
# a card below a bridge
/sys/devices/pci0/0000:01:00.0/numa_node = 1
/sys/devices/pci0/0000:01:00.0/table = hex:00ff0a
/sys/devices/pci0/0000:01:00.0/label = one\\ntwo \\\\ three
/sys/devices/pci0/0000:01:00.0/empty =
/sys/devices/pci0/0000:01:00.0/slots/
/sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0/0000:01:00.0
/sys/class/card/card0 -> ../../bus/pci/devices/0000:01:00.0
/sys/round -> around
/sys/around -> round
"""


class Echo(Absent):
    """Answers one request by turning its structure round."""

    def ioctl(self, request: int, argument: bytearray) -> int:
        if request != 7:
            raise failure(errno.ENOTTY)
        argument.reverse()
        return 3


@pytest.fixture(params=["model", "host"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    """The tree behind a model, and the same tree as files of this host."""
    tree = Tree.of(TREE)
    if request.param == "model":
        return ModelKernel(tree)
    for folder in tree.folders:
        (tmp_path / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for path, data in tree.files.items():
        (tmp_path / path.lstrip("/")).write_bytes(data)
    for path, target in tree.links.items():
        (tmp_path / path.lstrip("/")).symlink_to(target)
    return HostSystem(tmp_path)


def test_texts_bytes_links_and_folders_are_read_as_they_stand(system: System) -> None:
    card = "/sys/class/card/card0"
    assert system.read_text(f"{card}/numa_node") == "1"
    assert system.read_bytes(f"{card}/table") == b"\x00\xff\n"
    assert system.read_text(f"{card}/label") == "one\ntwo \\ three"
    assert system.read_text(f"{card}/empty") == ""
    assert system.listdir(card) == ["empty", "label", "numa_node", "slots", "table"]
    assert system.listdir(f"{card}/slots") == []
    assert system.readlink(card) == "../../bus/pci/devices/0000:01:00.0"
    assert resolved(system, card) == "/sys/devices/pci0/0000:01:00.0"


@pytest.mark.parametrize(
    ("call", "path", "number"),
    [
        ("read_text", "/sys/nothing", errno.ENOENT),
        ("read_text", "/sys/devices", errno.EISDIR),
        ("listdir", "/sys/nothing", errno.ENOENT),
        ("listdir", "/sys/devices/pci0/0000:01:00.0/numa_node", errno.ENOTDIR),
        ("readlink", "/sys/devices", errno.EINVAL),
        ("readlink", "/sys/nothing", errno.ENOENT),
        ("read_text", "/sys/round/x", errno.ELOOP),
    ],
)
def test_what_is_not_there_is_refused_with_the_errno_of_linux(
    system: System, call: str, path: str, number: int
) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        getattr(system, call)(path)
    assert caught.value.errno == number


def test_links_in_a_circle_are_no_endless_walk(system: System) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        resolved(system, "/sys/round/x")
    assert caught.value.errno == errno.ELOOP


def test_a_tree_reads_back_from_its_text() -> None:
    tree = Tree.of(TREE)
    again = Tree.of(tree.text())
    assert (again.files, again.links, again.folders) == (tree.files, tree.links, tree.folders)


@pytest.mark.parametrize("line", ["sys = 1", "/sys/neither"])
def test_a_line_that_is_no_entry_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        Tree.of(f"# a tree\n{line}")


def test_a_folder_is_removed_with_what_is_in_it() -> None:
    tree = Tree.of(TREE)
    tree.remove("/sys/devices/pci0")
    kernel = ModelKernel(tree)
    assert kernel.listdir("/sys/devices") == []
    with pytest.raises(FileNotFoundError):
        kernel.read_text("/sys/class/card/card0/numa_node")


def test_a_request_changes_its_structure_in_place() -> None:
    kernel = ModelKernel(nodes={"/dev/echo": Echo()})
    fd = kernel.open("/dev/echo", os.O_RDWR)
    argument = bytearray(b"abc")
    assert kernel.ioctl(fd, 7, argument) == 3
    assert argument == b"cba"
    with pytest.raises(OSError, match=r".") as caught:
        kernel.ioctl(fd, 8, argument)
    assert caught.value.errno == errno.ENOTTY
    assert kernel.listdir("/dev") == ["echo"]


def test_a_node_that_is_pulled_out_is_gone_for_those_who_have_it_open() -> None:
    kernel = ModelKernel(nodes={"/dev/echo": Echo()})
    fd = kernel.open("/dev/echo", os.O_RDWR)
    kernel.remove("/dev/echo")
    with pytest.raises(OSError, match=r".") as caught:
        kernel.ioctl(fd, 7, bytearray())
    assert caught.value.errno == errno.ENODEV
    kernel.add("/dev/echo", Echo())  # another one in its place
    with pytest.raises(OSError, match=r".") as caught:
        kernel.ioctl(fd, 7, bytearray())
    assert caught.value.errno == errno.ENODEV
    kernel.close(fd)
    assert kernel.open_fds == 0


def test_a_node_has_one_owner_and_a_closed_descriptor_is_none() -> None:
    kernel = ModelKernel(nodes={"/dev/echo": Echo()})
    first, second = (kernel.open("/dev/echo", os.O_RDWR) for _ in range(2))
    kernel.lock(first)
    with pytest.raises(BlockingIOError):
        kernel.lock(second)
    kernel.close(first)
    kernel.lock(second)
    with pytest.raises(OSError, match=r".") as caught:
        kernel.close(first)
    assert caught.value.errno == errno.EBADF


def test_system_calls_are_answered_where_somebody_offers_them() -> None:
    kernel = ModelKernel()
    kernel.answer(5000, lambda a, b: a + b)
    assert kernel.syscall(5000, 2, 3) == 5
    with pytest.raises(OSError, match=r".") as caught:
        kernel.syscall(5001)
    assert caught.value.errno == errno.ENOSYS


def test_a_call_fails_once_where_that_is_asked_for() -> None:
    kernel = ModelKernel(nodes={"/dev/echo": Echo()})
    kernel.fail_next("open", errno.EACCES)
    with pytest.raises(PermissionError):
        kernel.open("/dev/echo", os.O_RDWR)
    kernel.close(kernel.open("/dev/echo", os.O_RDWR))
    assert kernel.calls == ["open", "open", "close"]


def test_the_calls_of_a_long_run_are_remembered_in_bounded_room() -> None:
    kernel = ModelKernel(nodes={"/dev/echo": Echo()})
    for _ in range(300_000):
        kernel.listdir("/dev")
    kernel.close(kernel.open("/dev/echo", os.O_RDWR))
    assert kernel.calls[-2:] == ["open", "close"]
    assert 65_536 <= len(kernel.calls) <= 2 * 65_536 + 1
