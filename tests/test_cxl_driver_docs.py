"""The page about CXL: its example runs, its platform is one, and its commands are those that the driver shows."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from tests.cxl_rig import tree
from tests.test_docs import blocks, run_blocks
from tierloop.devices.drivers.cxl_options import Options
from tierloop.devices.drivers.cxl_problems import to_devdax, to_system_ram
from tierloop.devices.drivers.cxl_topology import cxl_topology
from tierloop.emulators.kernel import ModelKernel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cxl.md"


def test_the_example_runs() -> None:
    assert run_blocks(PAGE)["there"] == list(range(8))


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()
    for option in {field.name for field in fields(Options)} - {"folder"}:
        assert f"`{option}`" in text, option


def test_the_options_of_the_platform_on_the_page_are_allowed() -> None:
    ((_, _, text),) = blocks(PAGE, "")
    devices = tomllib.loads(text)["devices"]
    for name, options in devices.items():
        if options.pop("driver") == "cxl":
            assert Options.of(name, options)
    assert set(devices["cpu0"]["reaches"]) == set(devices) - {"cpu0"}


def test_every_command_that_the_driver_shows_is_on_the_page() -> None:
    def kind(command: str) -> str:
        return re.sub(r"\d+(\.\d+)?", "0", command).replace("dax0 ", "dax0.0 ")

    page = kind(PAGE.read_text())
    (dax,) = cxl_topology(ModelKernel(tree("system-ram"))).daxes
    shown = [to_devdax(dax), to_system_ram(dax)]
    for name in ("broken-region", "system-ram"):
        shown += [problem.command for problem in cxl_topology(ModelKernel(tree(name))).problems if problem.command]
    for command in shown:
        for part in command.split(", then "):
            assert kind(part) in page, part
