"""The gpu driver passes the suite of every device on a stand-in whose streams run in any legal order."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tierloop.devices.conformance import Suite, run
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.gpu import open_gpu
from tierloop.devices.drivers.gpu_staging import Staging
from tierloop.devices.platform import Platform
from tierloop.devices.site import Site
from tierloop.emulators.host_accelerator import Event, HostAccelerator, Stream

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"capacity": 16 * MIB, "staging_nbytes": 16384, "staging_buffers": 3}


class TestOnTheStandIn(Suite):
    """Small buffers: every transfer of a check takes several."""

    examples: ClassVar[int] = 15

    def open(self, site: Site) -> Device:
        return open_gpu("gpu0", site, OPTIONS, accelerator=HostAccelerator(1, 16 * MIB))


class TestBesideACpu(Suite):
    """A platform whose host memory the copy engines reach."""

    device: ClassVar[str] = "gpu0"
    levels: ClassVar[tuple[str, ...]] = ("identity", "memory", "ordering", "errors", "stateful")
    examples: ClassVar[int] = 8

    def open(self, site: Site) -> Platform:
        gpu = open_gpu("gpu0", site, {**OPTIONS, "reaches": ["cpu0"]}, accelerator=HostAccelerator(2, 16 * MIB))
        return Platform("pair", site, {"cpu0": open_cpu("cpu0", site, {"capacity": 64 * MIB}), "gpu0": gpu}, "cpu0")


def test_operands_of_kernels_may_lie_on_the_host() -> None:
    report = run(TestBesideACpu().open, only=["operands_may_lie_in_several_memories"], device="gpu0")
    assert report.passed, str(report)
    assert not [result for result in report.results if result.outcome == "skipped"]


@pytest.mark.parametrize("seed", range(3, 6))
def test_it_passes_whatever_the_order(seed: int) -> None:
    def opener(site: Site) -> Device:
        return open_gpu("gpu0", site, OPTIONS, accelerator=HostAccelerator(seed, 16 * MIB))

    report = run(opener, ["memory", "ordering"])
    assert not report.failed, str(report)


def test_it_passes_where_everything_is_carried_out_at_once() -> None:
    def opener(site: Site) -> Device:
        return open_gpu("gpu0", site, OPTIONS, accelerator=HostAccelerator(capacity=16 * MIB, eager=True))

    report = run(opener, ["ordering", "errors"])
    assert not report.failed, str(report)


# What must be noticed


class WaitsForNothing(HostAccelerator):
    """As if the driver forgot to order its streams."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing."""


def _failed(accelerator: type[HostAccelerator], check: str, **options: int) -> bool:
    """Whether one of some orders fails the check."""
    for seed in range(12):

        def opener(site: Site, seed: int = seed) -> Device:
            return open_gpu("gpu0", site, {**OPTIONS, **options}, accelerator=accelerator(seed=seed, capacity=16 * MIB))

        if run(opener, only=[check], shrink=False).outcome(check) == "failed":
            return True
    return False


@pytest.mark.parametrize("check", ["after_orders_two_queues", "fresh_memory_is_zero"])
def test_streams_that_are_not_ordered_are_noticed(check: str) -> None:
    assert _failed(WaitsForNothing, check, staging_nbytes=65536)
    assert not _failed(HostAccelerator, check, staging_nbytes=65536)


def test_buffers_that_are_given_back_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    give = Staging.give
    monkeypatch.setattr(Staging, "give", lambda self, buffer, event=None: give(self, buffer))
    assert _failed(HostAccelerator, "every_byte_comes_back")
