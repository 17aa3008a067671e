"""The driver on drives of any size: few queues, short ones, few vectors, any limit of transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvme_rig import on_drive
from tests.seeded import bytes_of
from tierloop.devices.commands import Write
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.nvme_identify import NvmeFigures


@pytest.mark.parametrize(
    "figures", [NvmeFigures(io_queues=1), NvmeFigures(vectors=1), NvmeFigures(vectors=2), NvmeFigures(queue_entries=2)]
)
def test_a_host_takes_what_the_controller_grants(figures: NvmeFigures) -> None:
    rig = on_drive(nvme_machine(figures=figures))
    region = rig.device.alloc(65536)
    rig.write(region.all(), bytes_of(1, 65536))
    with rig.machine.guard:
        rig.machine.host.reset()
    assert (rig.read(region.all()) == bytes_of(1, 65536)).all()
    rig.close()


FIGURES = st.builds(
    NvmeFigures,
    mdts=st.integers(0, 8),
    doorbell_stride=st.integers(0, 4),
    queue_entries=st.sampled_from([2, 3, 8, 1024]),
    io_queues=st.integers(1, 3),
    vectors=st.integers(1, 4),
    window=st.sampled_from([1, 2, 64]),
    volatile_cache=st.booleans(),
    aborts=st.integers(1, 4),
    error_entries=st.integers(1, 64),
)
WRITES = st.lists(st.tuples(st.integers(0, 31), st.integers(1, 32), st.integers(0, 15)), min_size=1, max_size=6)


@settings(max_examples=40)
@given(
    FIGURES,
    st.sampled_from([512, 4096]),
    st.sampled_from([("/dev/ng0n1", "io_uring"), ("/dev/ng0n1", "ioctl"), ("/dev/nvme0n1", "io_uring")]),
    st.integers(1, 8),
    WRITES,
)
def test_bytes_come_back_whatever_the_drive_can_do(
    figures: NvmeFigures, block: int, way: tuple[str, str], depth: int, writes: list[tuple[int, int, int]]
) -> None:
    machine = nvme_machine(capacity=1 << 20, lba_nbytes=block, figures=figures)
    rig = on_drive(machine, io=way[1], depth=depth, queues=1)
    rig.path = way[0]
    region = rig.device.alloc(64 * 4096)
    expected = np.zeros(64 * 4096, dtype=np.uint8)
    for seed, (first, pages, skew) in enumerate(writes):
        start, nbytes = first * 4096, pages * 4096
        data = bytes_of(seed, nbytes + 16)[skew : skew + nbytes]
        expected[start : start + nbytes] = data
        rig.run(Write(region.at(start, nbytes), data))
    assert (rig.read(region.all()) == expected).all()
    assert machine.controller.peek(1, 0, len(expected) // block) == expected.tobytes()
    rig.close()
