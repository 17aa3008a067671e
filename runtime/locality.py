"""A model of locality: which candidates a sparse policy picks, as statistics of recorded selections and nothing else.

`fit_locality` takes recorded selections and finds for each layer, over all lists and steps:

    persistence   the share of what was picked that is kept in the next step, beyond what chance picks again
    run_tokens    the mean length of runs of neighbouring candidates, in tokens, beyond what chance puts side by side
    positions     how likely a pick is in each of 32 equal parts of the candidates, from the oldest to the newest

`LocalitySelection` (locality_selection.py) draws answers with these numbers. Chance is counted in the fit, so what is
drawn has the statistics that were observed.

What the model leaves out: how alike the lists are (heads are drawn independently), that some candidates are kept for
many steps and others never (persistence is the same for all), and that statistics change with the length of the context
(positions are relative). A layer that no record asks about has the numbers of the nearest one that was. Runs that were
fitted in blocks say little about rows: fit and question should have the same unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.runtime.checked_json import load_json
from tierloop.runtime.selection import Answer, SelectionRecord

Int64 = NDArray[np.int64]

FOLDER = Path(__file__).parent / "localities"
FORMAT, VERSION = "tierloop-locality", 1
PARTS = 32


def find_locality(name: str) -> Path:
    """The file of a locality model or score trace: a name that ships, or a path that ends in .json.

    Raises ConfigurationError.
    """
    if name.endswith(".json"):
        return Path(name)
    known = sorted(path.stem for path in FOLDER.glob("*.json"))
    if name not in known:
        raise ConfigurationError(f"locality model {name!r}: {nearest(name, known)}")
    return FOLDER / f"{name}.json"


@dataclass(frozen=True)
class LayerLocality:
    """The numbers of one layer; `positions` are 32 shares that sum to 1, the oldest candidates first."""

    persistence: float
    run_tokens: float
    positions: tuple[float, ...]


@dataclass(frozen=True)
class LocalityModel:
    """What was fitted, by layer (None: the layer was never asked about), and to what.

    `unit` is in tokens per candidate, `longest` the longest prompt among the records, in tokens.
    """

    layers: tuple[LayerLocality | None, ...]
    unit: int
    models: tuple[str, ...] = ()
    longest: int = 0
    fitted_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer is not None for layer in self.layers):
            raise ConfigurationError("a locality model needs the numbers of at least one layer")

    def layer(self, number: int, num_layers: int) -> LayerLocality:
        """The numbers for a layer of a model that may have more or fewer layers: those at the same relative depth."""
        wanted = (number + 0.5) * len(self.layers) / num_layers - 0.5
        known = [(abs(i - wanted), layer) for i, layer in enumerate(self.layers) if layer is not None]
        return min(known, key=lambda pair: pair[0])[1]

    def lines(self) -> list[str]:
        """The parameters for people: one line per layer."""
        shown = [f"locality per unit of {self.unit} tokens, fitted to {'; '.join(self.fitted_to) or 'nothing named'}"]
        for number, layer in enumerate(self.layers):
            if layer is not None:
                old, new = sum(layer.positions[: PARTS // 8]), sum(layer.positions[-PARTS // 8 :])
                shown.append(
                    f"layer {number}: persistence {layer.persistence:.3f}, runs of {layer.run_tokens:.1f} tokens, "
                    f"oldest eighth {old:.1%}, newest eighth {new:.1%}"
                )
        return shown

    def to_json(self) -> str:
        """Text for a file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n"

    @classmethod
    def load(cls, path: Path) -> LocalityModel:
        """Read and check a file. Raises ConfigurationError."""
        return load_json(path, "locality model", FORMAT, VERSION, _from_json)


def _from_json(table: dict[str, Any]) -> LocalityModel:
    layers = table.get("layers")
    counts: list[Any] = [table.get(name) for name in ("unit", "longest")]
    for name, value in zip(("unit", "longest"), counts, strict=True):
        if not isinstance(value, int) or not _within(value, 1, 1 << 30):
            raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 to {1 << 30:,}")
    for name in ("models", "fitted_to"):
        if not isinstance(table.get(name), list) or not all(isinstance(text, str) for text in table[name]):
            raise ValueError(f"{name} must be a list of texts")
    if not isinstance(layers, list) or len(layers) > 1 << 12:
        raise ValueError("layers must be a list of at most 4,096 tables")
    fitted = tuple(_layer(i, layer) for i, layer in enumerate(layers))
    unit, longest = counts
    return LocalityModel(fitted, unit, tuple(table["models"]), longest, tuple(table["fitted_to"]))


def _layer(number: int, table: Any) -> LayerLocality | None:
    if table is None:
        return None
    if not isinstance(table, dict):
        raise ValueError(f"layer {number} is no table")
    positions = table.get("positions")
    if not isinstance(positions, list) or len(positions) != PARTS or not all(_within(p, 0, 1) for p in positions):
        raise ValueError(f"layer {number}: positions must be {PARTS} numbers from 0 to 1")
    if abs(sum(positions) - 1) > 1e-6:
        raise ValueError(f"layer {number}: positions sum to {sum(positions):g}, not to 1")
    persistence: Any = table.get("persistence")
    run_tokens: Any = table.get("run_tokens")
    if not _within(persistence, 0, 1):
        raise ValueError(f"layer {number}: persistence is {persistence!r}; it must be from 0 to 1")
    if not _within(run_tokens, 1, 1 << 30):
        raise ValueError(f"layer {number}: run_tokens is {run_tokens!r}; it must be at least 1")
    return LayerLocality(float(persistence), float(run_tokens), tuple(map(float, positions)))


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


# -- fitting ------------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    """Sums over the answers of one layer."""

    picked: int = 0
    runs: int = 0
    by_chance: float = 0.0
    before: int = 0
    kept: int = 0
    kept_by_chance: float = 0.0
    parts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(PARTS))


def fit_locality(records: Sequence[SelectionRecord], num_layers: int | None = None) -> LocalityModel:
    """Fit a model to recorded selections of one unit and number of layers; labels are taken together.

    Raises ConfigurationError where they differ, or where nothing was selected.
    """
    depths = {record.origin.shape.num_layers for record in records} | ({num_layers} if num_layers else set())
    units = {kept.unit for record in records for kept in record.answers.values()}
    if len(units) != 1 or len(depths) != 1:
        raise ConfigurationError(
            f"a locality model is fitted to selections of one unit and depth; these have units {sorted(units)} and "
            f"{sorted(depths)} layers"
        )
    (unit,), (depth,) = units, depths
    assert depth is not None
    parts = [np.zeros(PARTS) for _ in range(depth)]
    for record in records:
        for (_, layer, _, _), kept in record.answers.items():
            if layer < depth:
                parts[layer] += np.bincount(_part(kept)[kept.answer >= 0], minlength=PARTS)
    counts = [_Counts(parts=p) for p in parts]
    for record in records:
        last: dict[tuple[int, str, int], Answer] = {}
        for (_, layer, label, number), kept in sorted(record.answers.items()):
            if layer < depth and (kept.answer >= 0).any():
                _count(counts[layer], kept, last.get((layer, label, number)))
                last[layer, label, number] = kept
    layers = tuple(_fitted(c, unit) for c in counts)
    models = tuple(dict.fromkeys(record.origin.model for record in records))
    longest = max((n for record in records for n in record.origin.prompt_tokens), default=1)
    return LocalityModel(layers, unit, models, longest, tuple(dict.fromkeys(_named(record) for record in records)))


def _named(record: SelectionRecord) -> str:
    origin = record.origin
    prompts = ", ".join(f"{n:,}" for n in origin.prompt_tokens)
    return f"{origin.model} under {origin.policy}, prompt of {prompts} tokens, seed {origin.seed}, {origin.steps} steps"


def _part(kept: Answer) -> Int64:
    """The part of its list in which each candidate of an answer lies."""
    return np.minimum(kept.answer * PARTS // np.maximum(kept.lengths[:, None], 1), PARTS - 1).clip(0)


def _count(counts: _Counts, kept: Answer, last: Answer | None) -> None:
    valid = kept.answer >= 0
    shares = counts.parts / counts.parts.sum()
    picked = valid.sum(axis=1)
    density = np.minimum(picked[:, None] * shares[_part(kept)] * PARTS / np.maximum(kept.lengths[:, None], 1), 1.0)
    flat = np.sort(_flat(kept)[valid])
    counts.picked += len(flat)
    counts.runs += 1 + int((np.diff(flat) != 1).sum())
    counts.by_chance += float(density[valid].sum())
    if last is None or last.answer.shape[0] != kept.answer.shape[0] or not np.array_equal(last.first, kept.first):
        return
    before = (last.answer >= 0) & (last.answer < kept.lengths[:, None])
    old = _flat(last, kept)[before]
    counts.before += len(old)
    counts.kept += int(np.isin(old, flat).sum())
    again = picked[:, None] * shares[_part(Answer(last.answer, kept.lengths, kept.first, kept.unit))] * PARTS
    counts.kept_by_chance += float(np.minimum(again / np.maximum(kept.lengths[:, None], 1), 1.0)[before].sum())


def _flat(kept: Answer, like: Answer | None = None) -> Int64:
    """Candidates as one number each: lists lie apart by more than they are long."""
    stride = int((like or kept).lengths.max()) + 2
    return kept.answer + np.arange(len(kept.answer))[:, None] * stride


def _fitted(counts: _Counts, unit: int) -> LayerLocality | None:
    if not counts.picked:
        return None
    by_chance = min(counts.by_chance / counts.picked, 0.99)
    run = max(counts.picked / counts.runs * (1 - by_chance), 1.0)
    persistence = 0.0
    if counts.before:
        persistence = 1 - _left(counts.kept / counts.before, min(counts.kept_by_chance / counts.before, 0.99))
    shares = counts.parts / counts.parts.sum()
    return LayerLocality(persistence, run * unit, tuple(shares.tolist()))


def _left(observed: float, chance: float) -> float:
    """The share u of picks that are drawn anew, where of u · chance of them chance picks the old one again.

    What is observed to stay is 1 − u + u² · chance.
    """
    if chance < 1e-9:
        return 1 - observed
    under = 1 - 4 * chance * (1 - observed)
    return min((1 - math.sqrt(max(under, 0.0))) / (2 * chance), 1.0)
