"""Selections that are drawn: from a locality model or from a score trace, whichever a file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol, runtime_checkable

from tierloop.runtime.decisions import Decisions
from tierloop.runtime.locality import LocalityModel
from tierloop.runtime.locality_selection import LocalitySelection
from tierloop.runtime.score_trace import FORMAT, ScoreTrace, ScoreTraceModel

SelectionModel = LocalityModel | ScoreTraceModel


@runtime_checkable
class DrawnSelection(Decisions, Protocol):
    """Decisions that a model has made up."""

    asked: bool
    """Whether any answer was needed: times of a policy that selects nothing do not rest on the model."""

    def beyond(self, model: str | None, longest: int) -> list[str]:
        """Why answers are extrapolated, where they are: for a model by name and prompts of so many tokens."""


def load_selection_model(path: Path) -> SelectionModel:
    """What a file holds; its `format` says which. Raises ConfigurationError."""
    return ScoreTraceModel.load(path) if _format(path) == FORMAT else LocalityModel.load(path)


def draw(model: SelectionModel, num_layers: int, seed: int = 0) -> DrawnSelection:
    """Decisions from a model, for a model of `num_layers` layers."""
    if isinstance(model, ScoreTraceModel):
        return ScoreTrace(model, num_layers, seed)
    return LocalitySelection(model, num_layers, seed)


def _format(path: Path) -> object:
    """What a file says that it is; None where it says nothing, of which the reader of locality models complains."""
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(1 << 24))
    except (OSError, ValueError, RecursionError):
        return None
    return table.get("format") if isinstance(table, dict) else None
