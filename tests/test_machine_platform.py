"""`doctor --write-platform`: a file of what is there, with nothing in it that would overwrite what somebody owns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cxl_rig import tree
from tests.numa_rig import a_node_of_this_machine, machine
from tierloop.devices.errors import NotPresent
from tierloop.devices.platform_file import read_platform
from tierloop.devices.registry import find_platform, open_platform
from tierloop.devices.system import System
from tierloop.emulators.kernel import ModelKernel, Tree
from tierloop.emulators.kernel_nvme import nvme_machine
from tierloop.tools import cli
from tierloop.tools.machine_platform import platform_text

Rows = dict[str, tuple[str, dict[str, object], list[str]]]


def devices(system: System, folder: Path, gpus: tuple[str, ...] = ()) -> Rows:
    """(driver, options, reached) by device of the file, as the platform reader sees it."""
    path = folder / "here.toml"
    path.write_text(platform_text(system, list(gpus)))
    file = read_platform(path, find_platform)
    return {name: (d.driver, dict(d.options), sorted(d.reaches)) for name, d in file.devices.items()}


def on_a_laptop(other: Tree) -> ModelKernel:
    """A laptop with the devices of another machine."""
    laptop = machine("laptop").kernel.tree
    return ModelKernel(Tree(laptop.files | other.files, laptop.links | other.links))


def test_nodes_with_cores_compute_and_nodes_without_are_memory(tmp_path: Path) -> None:
    found = devices(machine("two-sockets-cxl").kernel, tmp_path, ("cuda:0",))
    assert found == {
        "cpu0": ("cpu", {"node": 0}, ["cpu1", "cxl2", "cxl4"]),
        "cpu1": ("cpu", {"node": 1}, ["cpu0", "cxl2", "cxl4"]),
        "cxl2": ("cxl", {"node": 2}, []),
        "cxl4": ("cxl", {"node": 4}, []),
        "gpu0": ("gpu", {"device": "cuda:0"}, ["cpu0", "cpu1"]),
    }


def test_a_container_gets_the_nodes_that_it_may_use(tmp_path: Path) -> None:
    assert list(devices(machine("restricted-cpuset").kernel, tmp_path)) == ["cpu1"]


def test_what_would_be_overwritten_is_a_comment(tmp_path: Path) -> None:
    for other, path in ((nvme_machine().tree, "/dev/ng0n1"), (tree("volatile-devdax"), "/dev/dax0.0")):
        kernel = on_a_laptop(other)
        assert f'# path = "{path}"' in platform_text(kernel, []).splitlines()
        assert list(devices(kernel, tmp_path)) == ["cpu0"]


def test_a_machine_without_a_node_that_may_be_used_is_refused() -> None:
    with pytest.raises(NotPresent, match="no NUMA node"):
        platform_text(ModelKernel(), [])


def test_a_run_says_on_which_nodes_its_pages_lay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:  # C12
    node = a_node_of_this_machine()
    path = tmp_path / "here.toml"
    path.write_text(
        f'description = "one node"\nclock = "wall"\nhost = "dram"\n[devices.dram]\ndriver = "cpu"\nnode = {node}\n'
        f"capacity = {1 << 26}\n"
    )
    options = ["--prompt-tokens", "300", "--tokens", "3", "--model", str(tiny_folder), "--json"]
    assert cli.main(["run", "--policy", "cpu-attention", "--platform", str(path), *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)["policies"]
    found = result["nodes"]["memories"]["dram"]
    assert found["wanted_nodes"] == [node]
    assert found["pages_per_node"].keys() == {str(node)}
    assert (found["pages_elsewhere"], result["nodes"]["moved"]) == (0, [])


def test_the_file_of_this_machine_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    assert cli.main(["doctor", "--quick", "--write-platform", str(path)]) == 0
    try:
        with open_platform(path) as platform:
            assert platform.host.startswith("cpu")
            assert platform.provenance == "measured"
    except PermissionError as refused:
        pytest.skip(f"this machine forbids binding memory: {refused}")
    assert cli.main(["doctor", "--quick", "--write-platform", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
