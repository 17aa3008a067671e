"""The report: one HTML file that needs nothing else, with the tables, the plots and the manifest of comparisons.

Everything that a model or a file said is escaped. The same comparisons give the same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from tierloop.runtime.results import Comparison
from tierloop.tools.plots import plots
from tierloop.tools.table import USE, agreement, answered, guesses, provenance, rate, remarks, use_rows


def report(title: str, subtitle: str, comparisons: Sequence[Comparison], failures: Sequence[str]) -> str:
    """The HTML text. `failures` are all checks that failed; invalid runs are found in the comparisons."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("tierloop.tools").joinpath("report.html.jinja").read_text("utf-8"))
    invalid = [f"{c.platform}, {r.policy}: {r.invalid[0]}" for c in comparisons for r in c.policies if r.invalid]
    sections = [_section(comparison) for comparison in comparisons]
    return template.render(title=title, subtitle=subtitle, failures=list(failures), invalid=invalid, sections=sections)


def _section(comparison: Comparison) -> dict[str, Any]:
    rows = [
        {
            "result": result,
            "elsewhere": result.platform not in ("", comparison.platform),
            "answered": answered(comparison, result),
            "agreement": agreement(comparison, result),
            "differs": comparison.differs(result),
            "beyond": not result.max_error <= result.error_bound,
            "max_error": f"{result.max_error:.2e}",
            "error_bound": f"{result.error_bound:.2e}",
            "error_vs_dense": f"{result.error_vs_dense:.2e}",
            "rate": rate(result),
            "provenance": provenance(result),
        }
        for result in comparison.policies
    ]
    return {
        "comparison": comparison,
        "policies": rows,
        "plots": [{"caption": caption, "uri": _data_uri(svg)} for caption, svg in plots(comparison)],
        "headings": USE,
        "uses": [
            ("" if number else result.policy, *row)
            for result in comparison.policies
            for number, row in enumerate(use_rows(result))
        ],
        "remarks": remarks(comparison),
        "guesses": guesses(comparison),
        "manifest": json.dumps(comparison.manifest, indent=2, ensure_ascii=False) if comparison.manifest else "",
    }


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
