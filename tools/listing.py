"""`tierloop list`: the names that other commands take."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from tierloop.tools import options
from tierloop.tools.console import results


def listing(as_json: options.AsJson = False) -> None:
    """List platforms, device profiles, policies and drivers. Exit code 0."""
    from tierloop.devices.registry import discover, list_devices, list_platforms
    from tierloop.tools.inventory import profiles

    with results(as_json) as shown:
        groups: dict[str, list[dict[str, Any]]] = {
            "platforms": [
                {"name": p.name, "clock": p.clock, "about": p.description, "reasons": list(p.reasons)}
                for p in list_platforms()
            ],
            "profiles": [
                {"name": p.name, "kind": p.kind, "about": p.summary, "reasons": list(p.reasons)} for p in profiles()
            ],
            "policies": [
                {"name": p.name, "about": _about(p.name) if p.usable else "", "reasons": list(p.reasons)}
                for p in discover("policies")
            ],
            "drivers": [{"name": d.name, "from": d.distribution, "reasons": list(d.reasons)} for d in list_devices()],
        }
        shown.json(groups)
        for title, rows in groups.items():
            shown.show(_table(title, rows))


def _about(policy: str) -> str:
    from tierloop.devices.registry import entry

    return (entry("policies", policy).__doc__ or "").strip().partition("\n")[0]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    headings = list(rows[0]) if rows else ["name"]
    for heading in headings:
        table.add_column("what is wrong" if heading == "reasons" else heading)
    for row in rows:
        cells = ["; ".join(value) if isinstance(value, list) else str(value) for value in row.values()]
        table.add_row(*(Text(cell) for cell in cells))
    return table
