"""Machines with NUMA memory to test on: this one, and models of recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierloop.devices.drivers import numa
from tierloop.devices.drivers.numa_mapping import mapped
from tierloop.devices.drivers.numa_topology import numa_topology
from tierloop.devices.system import HOST, System
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_numa import NumaMemory
from tierloop.emulators.numa_pages import Memory

PAGE = numa.PAGE
TREES = Path(__file__).resolve().parent / "sysfs"


@dataclass
class Machine:
    """A kernel, and the model of its memory where it has one."""

    kernel: ModelKernel
    memory: NumaMemory


def machine(tree: str, populates: bool = True) -> Machine:
    """A model of a recorded machine."""
    kernel = ModelKernel(Tree.read(TREES / f"{tree}.tree"))
    return Machine(kernel, NumaMemory.of(kernel, populates))


def small(populates: bool = True, **pages: int) -> Machine:
    """The machine with two sockets and CXL, whose nodes have room for so many pages: n0=4, n1=4, …"""
    made = machine("two-sockets-cxl", populates)
    for name, count in pages.items():
        node = int(name[1:])
        made.memory.nodes[node] = Memory(count * PAGE, made.memory.nodes[node].movable)
    return made


def a_node_of_this_machine() -> int:
    """A node that this process may bind to; skips the test where there is none."""
    why = numa.refusal(HOST)
    nodes = numa_topology(HOST).with_memory
    if why or not nodes:
        pytest.skip(why or "this kernel shows no node with memory")
    return nodes[0]


def scratch(system: System, pages: int) -> tuple[NDArray[np.uint8], int]:
    """Mapped memory that nobody has touched, and its address."""
    memory = mapped(system, "dram", pages * PAGE)
    return memory, memory.ctypes.data
