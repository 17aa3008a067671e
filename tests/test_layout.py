"""The house stands: the links of the package, and who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("devices", "firmware_models", "emulators", "runtime", "tools")
MAY_IMPORT = {
    "devices": set[str](),
    "firmware_models": {"devices"},
    "emulators": {"devices", "firmware_models"},
    "runtime": {"devices"},
    "tools": set(PARTS),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_link_stands(part: str) -> None:
    link = ROOT / "src" / "tierloop" / part
    assert link.is_symlink(), f"{link} must be a link: an unpacker that ignores links leaves an empty package"
    assert link.resolve() == ROOT / part


def imported_parts(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("tierloop.") and n.split(".")[1] in PARTS}
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    allowed = MAY_IMPORT[part] | {part}
    for path in sorted((ROOT / part).rglob("*.py")):
        wrong = imported_parts(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_walk_sees_imports() -> None:
    assert imported_parts(ROOT / "devices" / "queues.py") == {"devices"}
