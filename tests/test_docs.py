"""What the README and the pages of docs/ show is run, and what they name exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[tuple[int, str, str]]:
    """(line, file name or nothing, text) of each fenced block of a language."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}(?: file=(\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(2)].count("\n") + 1, match.group(1) or "", match.group(2)) for match in found]


def run_blocks(page: Path) -> dict[str, Any]:
    """Run a page's Python blocks one after the other, as a reader would, with line numbers of the page."""
    names: dict[str, Any] = {"__name__": "example"}
    for line, file, code in blocks(page, "python"):
        if not file:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return names


def install(page: Path, folder: Path) -> None:
    """Do what the page says: put its files into a folder, and install them with the entry points that it shows."""
    points: list[str] = []
    for language in ("python", "toml"):
        for _, file, text in blocks(page, language):
            if file:
                (folder / file).write_text(text)
            elif language == "toml":
                for group, entries in tomllib.loads(text)["project"]["entry-points"].items():
                    points += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    described = folder / "example-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("\n".join(points))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Install a page's example into the folder that is the current one, for the time of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda page: install(page, tmp_path)
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.model
def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(ROOT / "README.md")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()][:1] == ["split-all"]
    split_all, topk = names["comparison"].policies
    assert split_all.refused is None
    assert split_all.equal_to_dense
    assert topk.max_error <= topk.error_bound


def test_the_example_of_the_readme_has_five_lines() -> None:
    ((_, _, code),) = blocks(ROOT / "README.md", "python")
    statements = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "    "))]
    assert len(statements) <= 5


def test_the_device_that_the_page_builds_passes_and_opens(
    installed: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "adding_a_device.md"
    installed(page)
    names = run_blocks(page)
    assert names["report"].passed
    assert not [result for result in names["report"].results if result.outcome == "failed"]
    assert "emu:scratchpad" in capsys.readouterr().out


def test_the_examples_of_placement_run(installed: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "placement.md"
    installed(page)
    names = run_blocks(page)
    assert names["took"]["emu:cards"] < names["took"]["emu:cxl1"]
    assert names["fell"] == {"emu:cxl0": 4 << 20, "emu:cxl1": 4 << 20}  # written once and read once
    assert names["moved"] > 0
    assert len(names["copy"].completions) >= 2 * 2
    assert capsys.readouterr().out.count("\n") == 2


def test_the_examples_of_tuning_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(ROOT / "docs" / "tuning.md")
    assert names["tuned"].options == {"centroids": 2048, "window": 3, "micro_batch": 1, "waves": 1}
    assert capsys.readouterr().out.splitlines() == [
        "3 [None, 1, 2, 3]",
        "4 FLOP/byte, P 20, even at a hit rate of 80%",
    ]


def test_the_example_of_real_hardware_runs_on_models_and_says_so() -> None:
    names = run_blocks(ROOT / "docs" / "real_hardware.md")
    assert names["drive"].info.model
    assert names["region"].nbytes == 4096


def test_the_example_of_persistence_runs(installed: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "persistence.md"
    installed(page)
    run_blocks(page)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "24 ['labels'] 4096 8192"
    assert "name='chat 7'" in second
    assert "intact=True" in second


def test_the_example_of_real_hardware_runs() -> None:
    names = run_blocks(ROOT / "docs" / "real_hardware.md")
    assert names["drive"].info.model


def test_the_example_of_serving_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(ROOT / "docs" / "serving.md")
    assert not names["served"].failures
    assert capsys.readouterr().out.endswith("1.0\n")


@pytest.mark.slow
@pytest.mark.model
def test_the_policy_that_the_page_builds_runs(installed: Callable[[Path], None]) -> None:
    page = ROOT / "docs" / "adding_a_policy.md"
    installed(page)
    names = run_blocks(page)
    assert names["narrow"].refused is None
    assert names["narrow"].text
    assert names["wide"].error_vs_dense < names["narrow"].error_vs_dense


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    for target in targets:
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_and_option_is_documented() -> None:
    """In command_line.md, or in the section of a page that it links to."""
    overview = (ROOT / "docs" / "command_line.md").read_text()
    code = "import typer.main, json; from tierloop.tools.cli import app; g = typer.main.get_command(app); " + (
        "found = [(n, c) for n, c in g.commands.items()]; "
        "found += [(f'{n} {m}', d) for n, c in found for m, d in getattr(c, 'commands', {}).items()]; "
        "print(json.dumps({n: [o for p in c.params for o in (*p.opts, *p.secondary_opts) if o.startswith('--')] "
        "for n, c in found}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    commands = json.loads(done.stdout)
    assert set(commands) == {
        "doctor",
        "list",
        "run",
        "compare",
        "demo",
        "bench",
        "bench attention",
        "bench devices",
        "bench emulation",
        "calibrate",
        "verify",
        "conformance",
        "accuracy",
        "k-min",
        "window-sizes",
        "archives",
        "ablate",
        "phantom",
        "reproduce",
        "tune",
        "serve-bench",
        "guest",
        "guest setup",
        "guest run",
        "guest shell",
        "guest test",
        "guest capture",
        "guest clean",
    }
    for command, options in commands.items():
        assert f"`tierloop {command}`" in overview
        (page,) = [text for text in map(Path.read_text, PAGES) if f"## `tierloop {command}`\n" in text]
        for option in options:
            if option != "--help":
                assert f"`{option}" in page, f"{command} {option} is not documented"


def test_the_readme_lists_every_policy_that_ships() -> None:
    from tierloop.devices.registry import discover

    readme = (ROOT / "README.md").read_text()
    for policy in discover("policies"):
        if policy.distribution == "tierloop":
            assert f"| `{policy.name}` |" in readme
