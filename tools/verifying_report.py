"""A verification as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import json
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from tierloop.tools.verify import cells
from tierloop.tools.verifying import Verification
from tierloop.tools.verifying_plots import plots


def html(found: Verification) -> str:
    """The text of the report; whatever a file said is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("tierloop.tools").joinpath("verifying.html.jinja").read_text("utf-8"))
    return template.render(
        found=found,
        rows=[(cells(one), bool(one.reason)) for one in found.points],
        plots=[{"caption": caption, "uri": _data_uri(svg)} for caption, svg in plots(found)],
        values=json.dumps(found.to_json(), indent=2, ensure_ascii=False),
    )


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
