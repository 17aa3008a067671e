"""Sizes of windows by layer and head: found offline from a trace, kept in a file, without any cost in a run.

Heads differ in how much a larger window saves them. `SizeProfile.measured` plays a trace of ranked entries through
`Windows` of each candidate size and counts hits; `chosen_sizes` divides a budget of entries among layers and heads, so
that there are as many hits as can be; `WindowSizes` is the result, which a policy reads from its file.

A size is a multiple of K, so that sizes that were found at one K hold for another: a window has floor(multiple · K)
entries. The file is JSON:

    {"format": "tierloop-window-sizes", "version": 1, "k": 512, "eviction": "la", "made_from": ["…"],
     "multiples": [[2.0, 1.5, …], …]}      one row for each layer, one number for each KV head

It comes from outside: whatever is wrong with it is a ConfigurationError of one line that names the file.

The mechanism is KVDrive's two-dimensional scaling (reference: systems.md §1.2.3). The candidate sizes and the trace
that is profiled are parameters: the paper gives neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime import knapsack
from tierloop.runtime.checked_json import load_json
from tierloop.runtime.windows import EVICTIONS, Eviction, Windows

Int64 = NDArray[np.int64]

FORMAT, VERSION = "tierloop-window-sizes", 1
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Multiples of K that are tried: around the 2 to 4 that KVDrive's evaluation has for all heads (systems.md §1.2.10)."""
Method = Literal["best", "optimum", "greedy", "uniform"]
METHODS: tuple[Method, ...] = get_args(Method)
_MOST = 1 << 12
"""Layers, and heads of a layer, that a file may have."""
_LARGEST_MULTIPLE = 1 << 20


@dataclass(frozen=True)
class WindowSizes:
    """A window's size as a multiple of K, by layer and head, and what it was found with."""

    multiples: tuple[tuple[float, ...], ...]
    """One row for each layer, one number for each KV head, from 0 to 1,048,576."""
    k: int = 1
    eviction: Eviction = "la"
    made_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.multiples) <= _MOST:
            raise ConfigurationError(f"window sizes of {len(self.multiples)} layers; 1 to {_MOST:,} are allowed")
        heads = len(self.multiples[0])
        for layer, row in enumerate(self.multiples):
            if not 0 < len(row) <= _MOST or len(row) != heads:
                raise ConfigurationError(
                    f"window sizes of {len(row)} heads in layer {layer} and {heads} in layer 0; each layer needs as "
                    f"many, 1 to {_MOST:,}"
                )
            for head, multiple in enumerate(row):
                if not 0 <= multiple <= _LARGEST_MULTIPLE:
                    raise ConfigurationError(
                        f"layer {layer}, head {head}: a window of {multiple} · K; 0 to {_LARGEST_MULTIPLE:,} is allowed"
                    )

    @classmethod
    def uniform(cls, num_layers: int, num_heads: int, multiple: float) -> WindowSizes:
        """The same size everywhere."""
        return cls(((float(multiple),) * num_heads,) * num_layers)

    def capacity(self, k: int) -> Int64:
        """Entries of each window for this K, int64 (layers, heads)."""
        return _entries(np.array(self.multiples), k)

    def check(self, num_layers: int, num_heads: int) -> None:
        """Raises ConfigurationError if these are the sizes of a model of another shape."""
        shape = (len(self.multiples), len(self.multiples[0]))
        if shape != (num_layers, num_heads):
            raise ConfigurationError(
                f"window sizes of {shape[0]} layers and {shape[1]} KV heads; the model has {num_layers} and {num_heads}"
            )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> WindowSizes:
        """Read and check a file. Raises ConfigurationError."""
        return load_json(path, "window sizes", FORMAT, VERSION, _from_json)


@dataclass(frozen=True, eq=False)
class SizeProfile:
    """How many of the chosen entries windows of each size would have held."""

    k: int
    sizes: tuple[float, ...]
    """Candidate sizes as multiples of K, ascending."""
    hits: Int64
    """Chosen entries that were held, int64 (layers, heads, sizes)."""
    chosen: Int64
    """Chosen entries, int64 (layers, heads): hits and misses together."""
    eviction: Eviction

    @classmethod
    def measured(
        cls, trace: Sequence[Int64], k: int, sizes: Sequence[float] = SIZES, eviction: Eviction = "la"
    ) -> SizeProfile:
        """Play a trace through windows of each size; they begin empty, so the first step counts as missed.

        A step of the trace is int64 (layers, heads, m), entries from the best on, −1 where a head has fewer; m may
        differ between steps. The first `k` of a ranking are chosen. Raises ConfigurationError for a trace that is none,
        for k below 1, and for sizes that do not ascend from at least 0 on.
        """
        sizes = tuple(map(float, sizes))
        layers, heads, most = _checked_trace(trace)
        if k < 1:
            raise ConfigurationError(f"K {k}: at least one entry must be chosen")
        if not sizes or not all(0 <= size <= _LARGEST_MULTIPLE for size in sizes) or sorted(set(sizes)) != list(sizes):
            raise ConfigurationError(f"sizes {sizes}: different multiples of K are needed, the smallest first")
        hits = np.zeros((layers, heads, len(sizes)), dtype=np.int64)
        chosen = np.zeros((layers, heads), dtype=np.int64)
        for step in trace:
            chosen += (step[:, :, :k] >= 0).sum(axis=2)
        try:
            for number, size in enumerate(sizes):
                capacity = np.full((layers, heads), int(_entries(np.array(size), k)), dtype=np.int64)
                windows = Windows(layers, heads, most, capacity, eviction)
                hits[:, :, number] = chosen - _misses(windows, trace, k)
        except ValueError as error:
            raise ConfigurationError(f"the trace cannot be profiled: {error}") from error
        return cls(k, sizes, hits, chosen, eviction)

    def capacities(self) -> Int64:
        """Entries of each candidate size, int64 (sizes,)."""
        return _entries(np.array(self.sizes), self.k)

    def hits_of(self, sizes: WindowSizes) -> int:
        """Hits of all windows together at these sizes. Raises ConfigurationError for one that was not profiled."""
        sizes.check(*self.chosen.shape)
        wanted = np.array(sizes.multiples)
        number = np.searchsorted(self.sizes, wanted).clip(max=len(self.sizes) - 1)
        if (np.array(self.sizes)[number] != wanted).any():
            raise ConfigurationError(f"these window sizes were not all profiled: the profile has {self.sizes}")
        return int(np.take_along_axis(self.hits, number[:, :, None], axis=2).sum())


def chosen_sizes(
    profile: SizeProfile, budget: int, method: Method = "best", made_from: Sequence[str] = ()
) -> WindowSizes:
    """Divide `budget` entries, of all layers and heads together, by one of the ways of knapsack.py.

    Raises ConfigurationError where not even the smallest sizes fit, and where `method` cannot answer.
    """
    ways: dict[Method, Callable[[Int64, Int64, int], knapsack.Choice]] = {
        "best": knapsack.best,
        "optimum": knapsack.optimum,
        "greedy": knapsack.greedy,
        "uniform": knapsack.uniform,
    }
    if method not in ways:
        raise ConfigurationError(f"method {method!r}: it must be one of {', '.join(METHODS)}")
    benefits = profile.hits.reshape(-1, len(profile.sizes))
    costs = np.tile(profile.capacities(), (len(benefits), 1))
    try:
        choice = ways[method](costs, benefits, budget)
    except ValueError as error:
        raise ConfigurationError(f"window sizes for {budget:,} entries (items are heads of layers): {error}") from error
    multiples = np.array(profile.sizes)[choice.sizes].reshape(profile.chosen.shape)
    return WindowSizes(tuple(map(tuple, multiples.tolist())), profile.k, profile.eviction, tuple(made_from))


def _entries(multiples: NDArray[np.float64], k: int) -> Int64:
    """floor(multiple · k), where a product that is whole but for its rounding counts as whole."""
    if k < 0:
        raise ConfigurationError(f"K {k}: it must be at least 0")
    entries: Int64 = np.floor(multiples * k + 1e-6).astype(np.int64)
    return entries


def _checked_trace(trace: Sequence[Int64]) -> tuple[int, int, int]:
    """Layers, heads, and one more than the largest entry."""
    if not len(trace):
        raise ConfigurationError("a trace without steps says nothing about sizes")
    for number, step in enumerate(trace):
        if step.dtype != np.int64 or step.ndim != 3 or step.shape[:2] != trace[0].shape[:2] or not step.shape[0]:
            raise ConfigurationError(
                f"step {number} of the trace is {step.dtype} {step.shape}; each must be int64 (layers, heads, ranks) "
                "of the same layers and heads"
            )
    layers, heads = trace[0].shape[:2]
    return layers, heads, 1 + max(int(step.max(initial=0)) for step in trace)


def _misses(windows: Windows, trace: Sequence[Int64], k: int) -> Int64:
    """Chosen entries that were not held, int64 (layers, heads)."""
    missed = np.zeros((windows.num_layers, windows.num_heads), dtype=np.int64)
    for number, step in enumerate(trace):
        for layer in range(windows.num_layers):
            heads, entries = windows.missing(layer, step[layer, :, :k])
            missed[layer] += np.bincount(heads, minlength=windows.num_heads)
            windows.admit(layer, heads, entries, np.zeros_like(heads), number)
            windows.evict(layer, step[layer], k, number)
    return missed


def _from_json(table: dict[str, Any]) -> WindowSizes:
    rows, k, made_from = table.get("multiples"), table.get("k"), table.get("made_from")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("multiples must be a list of lists of numbers, one for each layer")
    for layer, row in enumerate(rows):
        for head, multiple in enumerate(row):
            if not isinstance(multiple, (int, float)) or isinstance(multiple, bool):
                raise ValueError(f"multiples: layer {layer}, head {head}: {str(multiple)[:40]!r} is no number")
            if not 0 <= multiple <= _LARGEST_MULTIPLE:  # a whole number may be too large for a float
                raise ValueError(f"multiples: layer {layer}, head {head}: it must be from 0 to {_LARGEST_MULTIPLE:,}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k < 1 << 40:
        raise ValueError(f"k is {str(k)[:40]!r}; it must be a whole number from 1 on")
    eviction = table.get("eviction")
    if not isinstance(eviction, str) or eviction not in EVICTIONS:
        raise ValueError(f"eviction is {str(eviction)[:40]!r}; it must be one of {', '.join(EVICTIONS)}")
    if not isinstance(made_from, list) or not all(isinstance(text, str) for text in made_from):
        raise ValueError("made_from must be a list of texts")
    return WindowSizes(tuple(tuple(map(float, row)) for row in rows), k, eviction, tuple(made_from))
