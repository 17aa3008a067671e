"""Windows played on a trace of rankings: hits, misses and bytes moved, without a platform and without time.

A trace is a sequence of steps, each int64 (layers, heads, m): the entries of each layer and KV head from the best on,
−1 where a head has fewer. It comes from a score trace (`ranked_steps`) or from what a run on real bytes has decided
(recorded_trace.py). In each step the best K are chosen, and what of them a window lacks is moved. Windows are the same
code that a policy runs (windows.py).

Systems differ in what they move: pages, chunks or single rows. `unit` neighbouring entries are ranked as their best one
is, chosen, moved and evicted together; K and the sizes of windows stay what they are in entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.window_sizes import WindowSizes
from tierloop.runtime.windows import Eviction, Int64, Windows


@dataclass(frozen=True, eq=False)
class Simulated:
    """What one size and rule of windows did on a trace; counts are of units, int64 (layers, heads)."""

    eviction: Eviction
    window: float | WindowSizes
    unit: int
    k: int
    """Units that are chosen in a step."""
    steps: int
    """Steps that count."""
    hits: Int64
    misses: Int64
    moved_nbytes: int
    """Bytes of all misses."""

    @property
    def hit_rate(self) -> float:
        """The share of what was chosen that was held, from 0 to 1."""
        chosen = int(self.hits.sum() + self.misses.sum())
        return int(self.hits.sum()) / chosen if chosen else 1.0


def simulate(
    trace: Sequence[Int64],
    k: int,
    window: float | WindowSizes,
    eviction: Eviction = "la",
    *,
    unit: int = 1,
    entry_nbytes: int = 1,
    warm_up: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """Play a trace through windows of `window` times K entries; they begin empty, and `warm_up` steps do not count.

    K is in entries of the trace, of `entry_nbytes` each; `noise` is that of `Windows`, an error of prediction that is
    put in on purpose. Raises ConfigurationError.
    """
    layers, heads, most = _shape(trace)
    if k < 1 or unit < 1 or entry_nbytes < 0 or not 0 <= warm_up < len(trace):
        raise ConfigurationError(
            f"K {k}, unit {unit}, entries of {entry_nbytes} bytes, {warm_up} of {len(trace)} steps not counted; "
            "K and unit must be at least 1, bytes at least 0, and at least one step must count"
        )
    chosen, most = max(k // unit, 1), -(-most // unit)
    sizes = window if isinstance(window, WindowSizes) else WindowSizes.uniform(layers, heads, window)
    sizes.check(layers, heads)
    hits, misses = np.zeros((layers, heads), dtype=np.int64), np.zeros((layers, heads), dtype=np.int64)
    try:
        windows = Windows(layers, heads, most, sizes.capacity(chosen), eviction, noise, seed)
        for step, entries in enumerate(trace):
            ranked = in_units(entries, unit)
            for layer in range(layers):
                mine = np.ascontiguousarray(ranked[layer])
                lacking, units = windows.missing(layer, mine[:, :chosen])
                windows.admit(layer, lacking, units, np.zeros_like(units), step)
                windows.evict(layer, mine, chosen, step)
                if step >= warm_up:
                    missed = np.bincount(lacking, minlength=heads)
                    misses[layer] += missed
                    hits[layer] += (mine[:, :chosen] >= 0).sum(axis=1) - missed
    except ValueError as error:
        raise ConfigurationError(f"the trace cannot be played: {error}") from error
    moved = int(misses.sum()) * unit * entry_nbytes
    return Simulated(eviction, window, unit, chosen, len(trace) - warm_up, hits, misses, moved)


def missed_by_union(trace: Sequence[Int64], k: int, steps: Sequence[int], warm_up: int) -> Int64:
    """Chosen entries that were chosen in none of the last w steps, for each w of `steps`: int64 (w, layers, heads).

    This is a window without a fixed size, which holds what the last w steps chose; 0 holds nothing. Raises
    ConfigurationError.
    """
    layers, heads, most = _shape(trace)
    if k < 1 or not 0 <= warm_up < len(trace):
        raise ConfigurationError(f"K {k}, {warm_up} of {len(trace)} steps not counted; one must be chosen, and count")
    last = np.full((layers, heads, most + 1), -(1 << 40), dtype=np.int64)  # the last place is for −1
    missed = np.zeros((len(steps), layers, heads), dtype=np.int64)
    for step, entries in enumerate(trace):
        chosen = entries[:, :, :k]
        age = step - np.take_along_axis(last, chosen, axis=2)
        if step >= warm_up:
            missed += np.stack([((age > w) & (chosen >= 0)).sum(axis=2) for w in steps])
        np.put_along_axis(last, chosen, step, axis=2)
    return missed


def in_units(ranked: Int64, unit: int) -> Int64:
    """Ranked entries, int64 (layers, heads, m), as ranked units of neighbours: each stands where its best entry is."""
    if unit == 1:
        return ranked
    units = np.where(ranked < 0, -1, ranked // unit)
    layers, heads, m = units.shape
    found = np.full((layers * heads, m), -1, dtype=np.int64)
    for row, mine in zip(found, units.reshape(-1, m), strict=True):
        some = mine[mine >= 0]
        _, first = np.unique(some, return_index=True)
        first.sort()
        row[: len(first)] = some[first]
    longest = int((found >= 0).sum(axis=1).max(initial=0))
    return found[:, :longest].reshape(layers, heads, longest)


def _shape(trace: Sequence[Int64]) -> tuple[int, int, int]:
    """Layers, heads, and one more than the largest entry. Raises ConfigurationError."""
    if not len(trace):
        raise ConfigurationError("a trace needs at least one step")
    shapes = {step.shape[:2] if step.ndim == 3 and step.dtype == np.int64 else None for step in trace}
    if len(shapes) != 1 or None in shapes:
        raise ConfigurationError(
            "each step of a trace must be int64 (layers, heads, ranks) of the same layers and heads"
        )
    layers, heads = trace[0].shape[:2]
    return layers, heads, max(int(step.max(initial=-1)) for step in trace) + 1
