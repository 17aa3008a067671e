"""The page about NUMA: its example runs, and it names every option and every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numa_rig import TREES, machine
from tests.test_docs import blocks, run_blocks
from tierloop.devices.drivers import numa
from tierloop.devices.drivers.cpu_options import HUGE_PAGES, OPTIONS, read_options
from tierloop.devices.system import HOST
from tierloop.emulators.kernel import Tree

PAGE = Path(__file__).resolve().parent.parent / "docs" / "numa.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(PAGE)
    assert capsys.readouterr().out or not names["topology"].nodes
    if not numa.refusal(HOST) and names["topology"].with_memory:
        assert names["found"]["pages_elsewhere"] == 0
        assert sum(names["found"]["pages_per_node"].values()) * numa.PAGE == 64 << 10


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()
    for option in set(OPTIONS) - {"folder"}:
        assert f"`{option}`" in text, option
    for value in (*numa.MODES, *HUGE_PAGES):
        assert f'`"{value}"`' in text, value


def test_the_platform_on_the_page_opens_on_the_machine_that_it_describes() -> None:
    import tomllib

    (text,) = (text for _, _, text in blocks(PAGE, ""))
    two = machine("two-sockets-cxl")
    two.kernel.tree.put("/sys/devices/system/node/node2/hugepages/hugepages-2048kB/free_hugepages", "8")
    for name, options in tomllib.loads(text)["devices"].items():
        assert options.pop("driver") == "cpu"
        assert read_options(name, options, two.kernel).nodes == (options["node"],)


@pytest.mark.parametrize("tree", sorted(path.name for path in TREES.glob("*.tree")))
def test_trees_are_written_as_they_are_read(tree: str) -> None:
    read = Tree.read(TREES / tree)
    again = Tree.of(read.text())
    assert (again.files, again.links, again.folders) == (read.files, read.links, read.folders)
