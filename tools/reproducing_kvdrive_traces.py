"""K1 to K3: what windows hold, played on traces of scores. No clock and no device: hits and bytes are counted.

A trace ranks the candidates of each layer and head in every step (runtime/score_trace.py). Candidates are independent
of each other, so units differ in what they are made of: those of neighbours (pages, chunks) rank by the best of their
candidates; those of a cluster rank together, since their keys are alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime import knapsack
from tierloop.runtime.decisions import Question
from tierloop.runtime.locality import find_locality
from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.reproduction import Check, Claim, at_least, at_most, over
from tierloop.runtime.score_trace import ScoreTrace, ScoreTraceModel
from tierloop.runtime.study import Study
from tierloop.runtime.window_simulation import in_units, missed_by_union, simulate
from tierloop.runtime.window_sizes import SizeProfile, WindowSizes, chosen_sizes
from tierloop.runtime.windows import Eviction
from tierloop.tools.reproducing_kvdrive_constants import CONSTANTS

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
RULES: tuple[Eviction, Eviction] = ("la", "lru")
Steps = list[Int64]
"""Ranked entries of each step: int64 (layers, heads, ranks), −1 where a head has fewer."""


def ranked(
    study: Study,
    locality: str,
    num_layers: int,
    candidates: int,
    k: int,
    steps: int,
    *,
    unit: int = 1,
    text: str = "a text",
    spread: float | None = None,
) -> Steps:
    """The best `k` candidates of `unit` tokens, of each layer and head in `steps` steps.

    Another `text` has other scores, of heads that differ as much; `spread` changes how heads differ.
    """
    model = ScoreTraceModel.load(find_locality(locality))
    if spread is not None:
        model = replace(model, layers=tuple(replace(layer, spread=spread) for layer in model.layers))
    trace, heads = ScoreTrace(model, num_layers, study.seed), CONSTANTS.trace_heads
    lengths, first = np.full(heads, candidates, dtype=np.int64), np.zeros(heads, dtype=np.int64)

    def step(number: int) -> Int64:
        asked = (Question("trace", layer, (text,), number, lengths, first, unit, k) for layer in range(num_layers))
        return np.stack([trace.answer(question, None) for question in asked])

    study.tell()
    return [step(number) for number in range(steps)]


# -- K1 -----------------------------------------------------------------------------------------------------------


def windows_and_transfer(study: Study) -> Check:
    """K1: what is transferred per step falls as the window grows."""
    c = CONSTANTS
    k = round(c.budget_high * c.trace_candidates)
    steps = ranked(study, c.locality, c.draw_layers, c.trace_candidates, 4 * k, c.trace_steps)
    from_step = max(c.draw_windows)
    unions = missed_by_union(steps, k, (*c.fig3_windows, *c.draw_windows), from_step)
    by_layer = unions.mean(axis=2) / (k * (len(steps) - from_step))
    missed = by_layer.mean(axis=1)
    whole_mb = c.fig3_context * find_model(c.model).kv_nbytes() * c.budget_high / 1e6
    volumes = (missed[: len(c.fig3_windows)] * whole_mb).tolist()
    draw = missed[len(c.fig3_windows) :]
    falls = [float(1 - each / draw[0]) for each in draw[1:]]
    rises = sum(later >= earlier for earlier, later in pairwise(volumes))
    last = c.fig3_windows[-1]
    ratio = volumes[0] / volumes[-1]
    ruled = [1 / (1 - simulate(steps, k, last, rule, warm_up=from_step).hit_rate) for rule in RULES]
    claims = [
        Claim("Fig. 3: a wider window never transfers as much (windows ×0 to ×3, number of exceptions)",
              at_most(0.0), float(rises), over(float(rises))),
        Claim("Fig. 3: more than 500 MB per step without a window (64 Ki tokens, 6.25 %)",
              at_least(c.fig3_most_mb), volumes[0], over(volumes[0])),
        Claim("Fig. 3: a window of ×3 transfers 40 times less than none", at_least(c.fig3_least_ratio), ratio,
              over(ratio, *ruled), "the window is a union of choices, or 3·K entries under LA or LRU"),
        *(
            Claim(f"KVDrive-Draw, which the trace was fitted to: a window of {window} steps instead of 1 moves "
                  f"{wanted:.0%} less (± {c.draw_tolerance * 100:g} points)",
                  (wanted - c.draw_tolerance, wanted + c.draw_tolerance), got, over(got))
            for window, wanted, got in zip(c.draw_windows[1:], c.draw_falls, falls, strict=True)
        ),
    ]  # fmt: skip
    third = by_layer[len(c.fig3_windows) - 1]
    details = {
        "MB per step by window": dict(zip(map(str, c.fig3_windows), volumes, strict=True)),
        "share outside the last 3 choices, by layer": [round(float(x), 4) for x in third],
    }
    reason = (
        "the last four claims show that the fit is one, and nothing else. As the union of the last choices a window of "
        f"×{last} transfers {ratio:.1f} times less than none; a window that is kept full, of {last}·K entries, "
        f"{ruled[0]:.0f} times (LA) and {ruled[1]:.0f} times (LRU): choices overlap, so it remembers many more steps"
    )
    return Check("K1", "transfer by size of the window", tuple(claims), "extrapolated", study.seed, reason, details)


# -- K2 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """What a system moves together: `tokens` of them, neighbours or tokens whose keys are alike."""

    name: str
    tokens: int
    neighbours: bool

    @property
    def k(self) -> int:
        """Units that a budget of the context is."""
        return ceil(CONSTANTS.budget * CONSTANTS.context / self.tokens)


def unit_steps(study: Study, unit: Unit, locality: str) -> Steps:
    """All units ranked, step after step: every entry of a window has a score."""
    c = CONSTANTS
    if unit.tokens > c.chunk and not unit.neighbours:
        clusters = c.context // unit.tokens
        return ranked(study, locality, c.gain_layers, clusters, clusters, c.gain_steps, unit=unit.tokens)
    entries = c.context // c.chunk
    if unit.neighbours:
        fine = ranked(study, locality, c.gain_layers, entries, entries, c.gain_steps, unit=c.chunk)
        return [in_units(step, unit.tokens // c.chunk) for step in fine]
    groups = c.centroids
    coarse = ranked(study, locality, c.gain_layers, groups, groups, c.gain_steps, unit=c.context // groups)
    return [_members(step, entries, groups) for step in coarse]


def _members(step: Int64, entries: int, groups: int) -> Int64:
    """Entries of ranked groups, cluster by cluster, ascending; entry e is in group e modulo `groups`."""
    flat = (step[..., None] + groups * np.arange(-(-entries // groups))).reshape(*step.shape[:2], -1)
    return flat[flat < entries].reshape(*step.shape[:2], entries)


def evictions(study: Study) -> list[dict[str, Any]]:
    """Hit rates under LA and LRU: a cell for each trace, unit and window."""
    return cast("list[dict[str, Any]]", study.once("evictions", lambda: _evictions(study)))


def _evictions(study: Study) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for locality in (CONSTANTS.locality, CONSTANTS.short):
        for unit in (Unit(*each) for each in CONSTANTS.units):
            steps = unit_steps(study, unit, locality)
            for window in CONSTANTS.gain_windows:
                la, lru = (
                    simulate(steps, unit.k, window, rule, warm_up=CONSTANTS.gain_warmup).hit_rate for rule in RULES
                )
                cells.append(
                    {"trace": locality, "unit": unit.name, "window": window, "LA": la, "LRU": lru, "gain": la - lru}
                )
    return cells


def look_ahead(study: Study) -> Check:
    """K2: look-ahead eviction against the least recently used, by unit, on scores that persist and that do not."""
    c, cells = CONSTANTS, evictions(study)
    inputs = f"window ×{c.gain_windows[0]:g} to ×{c.gain_windows[-1]:g}"
    claims: list[Claim] = []
    for name, _, neighbours in c.units:
        mine = [cell for cell in cells if cell["unit"] == name]
        lasting, short = ([cell for cell in mine if cell["trace"] == trace] for trace in (c.locality, c.short))
        rates = [cell[rule] for cell in lasting for rule in ("LA", "LRU")]
        gains, small = ([cell["gain"] for cell in each] for each in (lasting, short))
        claims += [
            Claim(f"Table 3: LA less LRU, {name}'s unit, share of hits", c.gain, gains[0], over(*gains), inputs),
            Claim(f"Table 3: hit rate, {name}'s unit", c.hit_rates, rates[0], over(*rates), f"{inputs}; LA or LRU"),
        ]
        if neighbours:
            text = f"Table 3, Phi-4-mini: LA is no better than LRU, {name}'s unit, scores that persist little"
            claims.append(Claim(text, at_most(0.0), small[0], over(*small), inputs))
    details = {"hit rates on a real model": _on_the_model(study), "cells": len(cells)}
    reason = (
        f"traces of scores: {c.locality} was fitted to how much is recovered by window, not to LA or LRU; {c.short} is "
        "assumed. Units of neighbours rank by their best candidate. All cells are in the table `look-ahead`"
    )
    return Check("K2", "look-ahead against LRU", tuple(claims), "extrapolated", study.seed, reason, details)


def _on_the_model(study: Study) -> dict[str, float]:
    """Hit rates of a real model's decoding, by eviction rule."""
    from tierloop.tools.reproducing_kvdrive_model import decoded

    return {rule: decoded(study, 0, eviction=rule).hit_rate for rule in RULES}


# -- K3 -----------------------------------------------------------------------------------------------------------


def sizing(study: Study) -> Check:
    """K3: windows by layer and head against equal ones of the same memory."""
    c = CONSTANTS
    k = round(c.budget_high * c.trace_candidates)
    saved, sizes, profile = _sized(study, k)
    wrong = float(_not_in_order(profile))
    claims = (
        Claim("Fig. 15: sizes by layer and head transfer 15 to 30 % less in the same memory", c.saved, saved[0],
              over(*saved), "the text that was profiled, or another one"),
        Claim("never more than equal windows on the trace that was profiled", at_least(0.0), saved[0], over(saved[0])),
        Claim("… and not on another text", at_least(0.0), saved[1], over(saved[1])),
        Claim("optimum ≥ greedy ≥ equal sizes, on small instances (number of exceptions)", at_most(0.0), wrong,
              over(wrong)),
    )  # fmt: skip
    details = {
        "multiples of K by layer, mean over heads": [round(float(np.mean(row)), 2) for row in sizes.multiples],
        "saved if heads differ more, by spread": {str(s): _sized(study, k, s)[0] for s in c.sizing_spreads},
    }
    reason = (
        "how layers and heads differ is assumed in the trace: as much as the four layers that are published do. What "
        "is saved hangs on it, see `details`"
    )
    return Check("K3", "windows by layer and head", claims, "extrapolated", study.seed, reason, details)


def _sized(study: Study, k: int, spread: float | None = None) -> tuple[list[float], WindowSizes, SizeProfile]:
    """What sizes by layer and head save on the text that was profiled and on another one; sizes and profile."""
    c = CONSTANTS
    texts = [
        ranked(study, c.locality, c.draw_layers, c.trace_candidates, 8 * k, c.sizing_steps, text=text, spread=spread)
        for text in ("profiled", "another text")
    ]
    profile = SizeProfile.measured(texts[0], k)
    uniform = WindowSizes.uniform(c.draw_layers, c.trace_heads, c.sizing_window)
    sizes = chosen_sizes(profile, int(uniform.capacity(k).sum()))
    return [_saved(steps, k, sizes, uniform) for steps in texts], sizes, profile


def _saved(steps: Steps, k: int, sizes: WindowSizes, uniform: WindowSizes) -> float:
    """The share of misses that the sizes save, after the first step, which misses everything."""
    ours, equal = (int(simulate(steps, k, each).misses.sum()) for each in (sizes, uniform))
    return 1 - ours / equal


def _not_in_order(profile: SizeProfile) -> int:
    """Over small parts of the profile and budgets: how often the three ways are not in their order."""
    benefits = profile.hits.reshape(-1, len(profile.sizes))
    costs = np.tile(profile.capacities(), (len(benefits), 1))
    wrong = 0
    for start in _starts(len(benefits)):
        mine = slice(start, start + CONSTANTS.small_items)
        for multiple in (1, 2, 4):
            budget = multiple * profile.k * CONSTANTS.small_items
            ways = (knapsack.optimum, knapsack.greedy, knapsack.uniform)
            found = [way(costs[mine], benefits[mine], budget).benefit for way in ways]
            wrong += found != sorted(found, reverse=True)
    return wrong


def _starts(count: int) -> Iterable[int]:
    return range(0, count - CONSTANTS.small_items + 1, CONSTANTS.small_items)
