"""What the README and the pages of docs/ show is run, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block of a language."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match.group(1)) for match in found]


def run_blocks(page: Path) -> dict[str, Any]:
    """Run a page's Python blocks one after the other, as a reader would, with line numbers of the page."""
    names: dict[str, Any] = {"__name__": "example"}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return names


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
    ((_, code),) = blocks(ROOT / "README.md", "python")
    statements = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "    "))]
    assert len(statements) <= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    for target in targets:
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    code = "import typer.main, json; from tierloop.tools.cli import app; g = typer.main.get_command(app); " + (
        "print(json.dumps({n: [o for p in c.params for o in (*p.opts, *p.secondary_opts) if o.startswith('--')] "
        "for n, c in g.commands.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    import json

    commands = json.loads(done.stdout)
    assert set(commands) == {"doctor", "list", "run", "compare", "demo", "bench", "conformance"}
    for command, options in commands.items():
        assert f"## `tierloop {command}`" in page
        for option in options:
            if option != "--help":
                assert f"`{option}" in page, f"{command} {option} is not documented"


def test_the_readme_lists_every_policy_that_ships() -> None:
    from tierloop.devices.registry import discover

    readme = (ROOT / "README.md").read_text()
    for policy in discover("policies"):
        if policy.distribution == "tierloop":
            assert f"| `{policy.name}` |" in readme
