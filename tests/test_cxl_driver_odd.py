"""Opening CXL memory where sysfs contradicts itself, or what it says is not true any more when it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cxl_rig import PAGE, file_of, opened, tree
from tierloop.devices.drivers.cxl_mailbox import Mailbox
from tierloop.devices.errors import DeviceError, MediaError, ProtocolError
from tierloop.devices.system import HOST, HostSystem
from tierloop.emulators.kernel import ModelKernel
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.firmware_models.cxl_codes import Code


@pytest.mark.parametrize("node", ["-1", "", "many"])
def test_a_system_ram_device_without_a_node_is_refused_by_its_serial(node: str) -> None:
    texts = tree("system-ram")
    for path in [path for path in texts.files if path.endswith("/target_node")]:
        texts.put(path, node)
    kernel = ModelKernel(texts)
    serial = int(next(text for path, text in texts.files.items() if path.endswith("/mem0/serial")), 0)
    with pytest.raises(ProtocolError, match=r"cxl0: open: mem0 has the serial 0x\w+, but: .*its node is not known"):
        opened({"serial": serial}, kernel)


class Cut(HostSystem):
    """A system on which a file is cut right after its size was asked for."""

    def size(self, fd: int) -> int:
        there = super().size(fd)
        os.ftruncate(fd, PAGE)
        return there


def test_a_file_that_is_cut_while_it_is_opened_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    with pytest.raises(ProtocolError, match=rf"cxl0: open: mapping {8 << 20} bytes of {path}"):
        opened({"path": str(path)}, Cut())


@pytest.mark.parametrize("nbytes", [0, -1, 2 * PAGE, 1 << 63, 1 << 70])
def test_what_cannot_be_mapped_is_an_error_of_the_operating_system(nbytes: int, tmp_path: Path) -> None:
    with file_of(tmp_path, PAGE).open("r+b") as file:
        if nbytes == 0:
            os.ftruncate(file.fileno(), 0)
        with pytest.raises(OSError):  # noqa: PT011  # which one differs
            HOST.mmap(file.fileno(), nbytes)


@pytest.mark.parametrize("code", [code for code in Code if code != Code.SUCCESS])
def test_every_return_code_of_a_card_is_named(code: Code) -> None:
    kernel = cxl_machine()
    kernel.cards[0].answer_next(code)
    with pytest.raises(
        DeviceError, match=rf"cxl0: health: /dev/cxl/mem0: the device answers {code} \((?!see)"
    ) as found:
        Mailbox("cxl0", "/dev/cxl/mem0", kernel).health()
    assert isinstance(found.value, MediaError) == (code in (Code.MEDIA_DISABLED, Code.MEDIA_FAILURE))
