"""The tables of our device models beside those of QEMU: identify pages, logs, features, CDAT, read by a real kernel.

Every byte is the same, or lies in a field that is listed here with the reason why it may differ. A field that is listed
and does not differ any more is taken off the list.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tierloop.devices.drivers.cxl_cdat import Rates, Table, parse
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.devices.drivers.nvme_identity import Health, identity_of
from tierloop.devices.system import System
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_cxl import cxl_machine
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.firmware_models.cxl_part import CxlPart
from tierloop.firmware_models.nvme_identify import NvmeFigures
from tierloop.tools.guest.capturing import features_of, pages_of
from tierloop.tools.guest.machine import DEFAULT, load

TREES = Path(__file__).resolve().parent / "sysfs"
SERIAL = "TIER0002"
CAPACITY = next(drive.mib << 20 for drive in load(DEFAULT).drives if drive.serial == SERIAL)
GUEST = ModelKernel(Tree.read(TREES / "guest-nvme.tree"))
FIGURES = NvmeFigures(serial=SERIAL, model="QEMU NVMe Ctrl", firmware="10.0.2")
"""A model that calls itself what QEMU's drive is called."""


class Field(NamedTuple):
    """Bytes of a table that may differ, and why."""

    start: int
    nbytes: int
    why: str


OPTIONAL = "what is optional, and offered by one of the two"
FIELDS = {
    "identify-controller": (
        Field(0, 4, "the vendor's numbers"),
        Field(72, 1, "arbitration burst: a recommendation"),
        Field(73, 3, "the vendor's OUI"),
        Field(76, 1, "several controllers can be: there, for which the kernel shows the drive with multipath"),
        Field(77, 1, "largest transfer: 2^7 pages there, 2^5 here, so that drivers have to split"),
        Field(80, 4, "version of the specification: 1.4 there, 2.0 here"),
        Field(84, 8, "latencies of runtime D3: 0 says nothing there"),
        Field(92, 4, "optional events: changed namespaces there"),
        Field(96, 4, OPTIONAL),
        Field(256, 2, f"administrative commands: {OPTIONAL}"),
        Field(261, 1, f"log pages: {OPTIONAL}"),
        Field(262, 1, "entries of the error log: 1 there, 64 here"),
        Field(263, 1, "power states: 1 there, 2 here"),
        Field(268, 2, "critical temperature: 373 K there, 358 K here"),
        Field(280, 16, "capacity of the drive: 0 there, which says nothing"),
        Field(340, 2, f"endurance groups: {OPTIONAL}"),
        Field(514, 2, "commands in flight: 0 there, which says nothing"),
        Field(516, 4, "namespaces that can be: 256 there, those that are here"),
        Field(520, 2, f"commands of a namespace: {OPTIONAL}"),
        Field(526, 2, "atomic write, in blocks, counted from 0: one there"),
        Field(534, 2, "copy formats: no Copy here"),
        Field(536, 4, "scatter and gather lists: one more kind of descriptor each"),
        Field(768, 256, "the drive's qualified name"),
        Field(2048, 64, "power states: watts and latencies"),
    ),
    "identify-namespace": (
        Field(16, 8, "blocks that are in use: all there, those that were written here"),
        Field(24, 1, "features: hints for writing there, thin and errors of deallocated blocks here"),
        Field(25, 1, "formats: eight there, two here"),
        Field(27, 2, "metadata: none here"),
        Field(33, 1, "what Write Zeroes may do: deallocate, here"),
        Field(48, 16, "capacity in bytes: 0 there, which says nothing"),
        Field(64, 8, "preferred sizes of deallocation: said there"),
        Field(104, 24, "identifiers: none there, made from the serial number here"),
        Field(128, 32, "formats; the one in use is compared as the driver reads it"),
    ),
    "identify-active": (),
    "identify-descriptors": (Field(0, 64, "identifiers: the command set alone there, EUI64 and NGUID before it here"),),
    "log-health": (
        Field(1, 2, "temperature: 323 K there, 310 K here"),
        Field(3, 2, "spare blocks and threshold: 0 there, where nothing wears"),
        Field(32, 32, "data units: what the kernel read while it started"),
        Field(64, 32, "commands: what the kernel sent while it started"),
        Field(112, 16, "power cycles: 0 there"),
        Field(200, 2, "the first sensor: none there"),
    ),
    "log-errors": (),
    "log-firmware": (Field(8, 8, "the revision in slot 1: fixed there, whatever identify says"),),
    "log-effects": (
        Field(84, 4, "namespace attachment: only there"),
        Field(100, 8, "directives: only there"),
        Field(496, 4, "doorbell buffers: only there"),
        Field(512, 4, "format: only there"),
        Field(1024, 4, "flush changes blocks, says QEMU; the specification does not"),
        Field(1040, 4, "write uncorrectable: only here"),
        Field(1072, 4, "verify: only there"),
        Field(1096, 4, "management of reclaim units: only there"),
        Field(1124, 4, "copy: only there"),
        Field(1140, 4, "management of reclaim units: only there"),
    ),
}
FEATURES = {
    "feature-01": "arbitration burst: the default of a vendor",
    "feature-03": "LBA ranges exist in neither; here the answer says that the error log has more (bit 13)",
    "feature-05": "of a namespace: 0 is none in either; here the answer says that the error log has more (bit 13)",
    "feature-07": "queues: 64 there, as many as the kernel asked for here",
    "feature-09": "vector 0: coalescing is off there because the administrative queue has it",
    "feature-0b": "events: the kernel asks for changed namespaces, which only QEMU's drive reports",
}


@pytest.fixture(scope="module")
def model() -> System:
    """A machine with our model of a drive, as large as QEMU's."""
    return nvme_machine(CAPACITY, figures=FIGURES)


def captured(name: str) -> bytes:
    """A table of QEMU's drive."""
    return GUEST.read_bytes(f"/capture/{SERIAL}/{name}")


def differing(name: str, model: System) -> set[int]:
    """Where the two tables have different bytes."""
    mine, other = pages_of(model, "/dev/ng0n1")[name], captured(name)
    assert len(mine) == len(other)
    return {at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b}


@pytest.mark.parametrize("name", FIELDS)
def test_tables_of_the_drive_differ_only_where_they_may(name: str, model: System) -> None:
    allowed = {at for field in FIELDS[name] for at in range(field.start, field.start + field.nbytes)}
    assert sorted(differing(name, model) - allowed) == []


@pytest.mark.parametrize("name", FIELDS)
def test_what_may_differ_does(name: str, model: System) -> None:
    different = differing(name, model)
    same = [field for field in FIELDS[name] if not different & set(range(field.start, field.start + field.nbytes))]
    assert same == []


def test_every_table_that_was_captured_is_compared(model: System) -> None:
    pages = {name for name in GUEST.listdir(f"/capture/{SERIAL}") if not name.startswith("feature-")}
    assert pages == FIELDS.keys() == pages_of(model, "/dev/ng0n1").keys()


def test_the_driver_reads_the_same_of_both_drives(model: System) -> None:
    """What it acts on: sizes, the block format in use, caches, what zeroes and deallocation do."""
    pages = pages_of(model, "/dev/ng0n1")
    names = ("identify-controller", "identify-namespace")
    mine = identity_of("nvme0", 1, *(pages[name] for name in names))
    other = identity_of("nvme0", 1, *(captured(name) for name in names))
    assert {key for key, value in vars(mine).items() if value != vars(other)[key]} == {
        "mdts_nbytes",  # 2^5 pages here
        "thin",  # here, so that a medium can be smaller than what it promises
        "zeroes_may_deallocate",  # here, so that the driver's wish is granted
        "write_unit_nbytes",  # QEMU prefers single blocks, and says so
    }


def test_the_driver_reads_both_health_logs_as_those_of_a_healthy_drive(model: System) -> None:
    for page in (pages_of(model, "/dev/ng0n1")["log-health"], captured("log-health")):
        health = Health.of(page)
        assert (health.warnings, health.read_only, health.media_errors, health.used_percent) == ((), False, 0, 0)
        assert 273 < health.temperature_k < 343


def test_features_have_the_same_values_where_no_vendor_chooses(model: System) -> None:
    mine = features_of(model, "/dev/ng0n1")
    other = {name: GUEST.read_text(f"/capture/{SERIAL}/{name}").strip() for name in mine}
    assert {name for name, value in mine.items() if value != other[name]} == FEATURES.keys()


def test_what_one_drive_refuses_the_other_refuses_with_the_same_status(model: System) -> None:
    """Bit 13 apart, which says that the error log has more, and bit 14, which says that a retry would not help."""
    for name, told in features_of(model, "/dev/ng0n1").items():
        mine, other = (int(text.split()[0], 16) for text in (told, GUEST.read_text(f"/capture/{SERIAL}/{name}")))
        assert mine & 0x7FF == other & 0x7FF, name


def tables_of(system: System) -> dict[tuple[int, int], Table]:
    """CDATs by the memory's (volatile, persistent) bytes, parsed by the driver."""
    found = {}
    for memdev in cxl_topology(system).memdevs:
        raw = system.read_bytes(f"/sys/bus/cxl/devices/{memdev.endpoint}/CDAT")
        found[memdev.ram_nbytes, memdev.pmem_nbytes] = parse("cxl0", raw)
    return found


@pytest.fixture(scope="module")
def cdats() -> tuple[dict[tuple[int, int], Table], dict[tuple[int, int], Table]]:
    """Of our models, and of QEMU's memories of the same sizes."""
    other = tables_of(ModelKernel(Tree.read(TREES / "guest-cxl.tree")))
    parts = [CxlPart(serial=at, volatile_nbytes=ram, persistent_nbytes=pmem) for at, (ram, pmem) in enumerate(other, 1)]
    return tables_of(cxl_machine(parts)), other


Cdats = tuple[dict[tuple[int, int], Table], dict[tuple[int, int], Table]]


def test_the_tables_of_memories_speak_of_the_same_ranges(cdats: Cdats) -> None:
    mine, other = cdats
    assert mine.keys() == other.keys()
    for sizes, table in mine.items():
        shown = [[(one.dpa, one.nbytes, one.non_volatile) for one in each.ranges] for each in (table, other[sizes])]
        assert shown[0] == shown[1]


def test_the_tables_of_memories_have_no_structure_that_the_driver_does_not_know(cdats: Cdats) -> None:
    assert all(table.unknown == () for tables in cdats for table in tables.values())


def test_the_tables_of_memories_say_how_fast_each_range_is(cdats: Cdats) -> None:
    """The numbers are each part's own; that all four are there is what the driver needs."""
    for tables in cdats:
        for table in tables.values():
            for one in table.ranges:
                rates: Rates = table.rates(one.dpa)
                assert all(rates), rates


def test_the_tables_of_memories_say_the_use_of_each_range_and_agree_on_it(cdats: Cdats) -> None:
    mine, other = cdats
    for sizes, table in mine.items():
        shown = [[(use.kind, use.offset, use.nbytes) for use in each.uses] for each in (table, other[sizes])]
        assert shown[0] == shown[1]
        assert {use.handle for use in table.uses} == {one.handle for one in table.ranges}
