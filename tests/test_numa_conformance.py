"""The conformance suite on the cpu driver with its memory bound to a node, and on a model of another machine."""

from __future__ import annotations

from typing import ClassVar

from tests.numa_rig import a_node_of_this_machine, machine
from tierloop.devices.conformance import Suite
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.site import Site

MIB = 1 << 20


class TestOnANodeOfThisMachine(Suite):
    """Real memory, bound for real."""

    virtual = False
    examples = 8

    def open(self, site: Site) -> Device:
        options = {"capacity": 64 * MIB, "threads": 2, "node": a_node_of_this_machine()}
        return open_cpu("cpu", site, options)


class TestOnACardOfAnotherMachine(Suite):
    """Real bytes; on which node each page lies is a model's."""

    virtual = False
    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "errors", "stateful")
    examples = 8

    def open(self, site: Site) -> Device:
        options = {"capacity": 64 * MIB, "threads": 2, "nodes": [0, 2], "placement": "interleave"}
        return open_cpu("cpu", site, options, machine("two-sockets-cxl").kernel)
