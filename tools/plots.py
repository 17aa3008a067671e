"""Plots of a comparison as SVG, drawn the same way whoever reads them: one colour per device, one row per policy.

Figures are made without pyplot's global state and without a display. The same values give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tierloop.runtime.results import Comparison, PolicyResult

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
"""Okabe and Ito's palette: told apart by colour-blind readers too."""

_STYLE: Any = {  # matplotlib types its keys as literals, a new set in every version
    "svg.hashsalt": "tierloop",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def plots(comparison: Comparison) -> list[tuple[str, str]]:
    """(caption, SVG text) of every plot that the comparison has values for."""
    ran = [result for result in comparison.policies if result.refused is None]
    if not ran:
        return []
    drawn: list[tuple[str, Callable[[Figure, Sequence[PolicyResult]], None], float]] = [
        ("Speed: decoded tokens per second of the platform's time, scaled back by σ.", _speed, 1.0),
        ("Largest error against the float64 oracle (dot) and the bound that it must not exceed (bar).", _errors, 1.0),
        ("Bytes that left each device's memory in decode, per generated token.", _bytes, 1.0),
        ("Where the KV cache lay after prefill.", _placement, 1.0),
        ("Share of the decode time in which each device was busy (full) or stalled (hatched).", _busy, 2.0),
        ("Time of each decode step.", _steps, 2.0),
    ]
    with matplotlib.rc_context(_STYLE):
        return [(caption, _svg(draw, ran, stretch)) for caption, draw, stretch in drawn]


def _svg(draw: Callable[[Figure, Sequence[PolicyResult]], None], ran: Sequence[PolicyResult], stretch: float) -> str:
    figure = Figure(figsize=(7.2, (0.9 + 0.36 * len(ran)) * stretch), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure, ran)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _colours(ran: Sequence[PolicyResult]) -> dict[str, str]:
    """One colour per device or memory, the same in every plot: in the order in which the platform names devices."""
    names = dict.fromkeys(name for result in ran for name in (*result.devices, *result.placement))
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _plain(name: str) -> str:
    """A name from outside as matplotlib must not read it: `$` begins a formula, a leading `_` hides an entry."""
    return name.replace("$", r"\$").lstrip("_") or "?"


def _rows(figure: Figure, ran: Sequence[PolicyResult]) -> Axes:
    axes = figure.subplots()
    axes.set_yticks(range(len(ran)), [_plain(result.policy) for result in ran])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return axes


def _speed(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    axes = _rows(figure, ran)
    hatches = ["//" if result.invalid else "" for result in ran]
    bars = axes.barh(range(len(ran)), [result.tokens_per_s for result in ran], color=COLOURS[0], hatch=hatches)
    texts = [f"{result.tokens_per_s:.3g} {result.provenance}{' INVALID' if result.invalid else ''}" for result in ran]
    axes.bar_label(bars, texts, padding=3)
    axes.margins(x=0.25)
    axes.set_xlabel("tokens/s")


def _stacked(axes: Axes, ran: Sequence[PolicyResult], parts: dict[str, list[float]], unit: str) -> None:
    left, colours = [0.0] * len(ran), _colours(ran)
    for name, values in parts.items():
        if any(values):
            axes.barh(range(len(ran)), values, left=left, color=colours[name], label=_plain(name))
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel(unit)
    if any(left):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _scale(largest: float) -> tuple[float, str]:
    """A divisor and its unit, so that an axis reads 0 to 999."""
    for divisor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, unit
    return 1.0, "B"


def _bytes(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    names = dict.fromkeys(name for result in ran for name in result.devices)
    per_token = {
        name: [
            result.devices[name].bytes_read / max(1, len(result.step_ns)) if name in result.devices else 0.0
            for result in ran
        ]
        for name in names
    }
    _bytes_stacked(figure, ran, per_token, "per token")


def _placement(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    names = dict.fromkeys(name for result in ran for name in result.placement)
    _bytes_stacked(figure, ran, {name: [float(r.placement.get(name, 0)) for r in ran] for name in names}, "")


def _bytes_stacked(figure: Figure, ran: Sequence[PolicyResult], parts: dict[str, list[float]], what: str) -> None:
    largest = max((sum(values) for values in zip(*parts.values(), strict=True)), default=0.0)
    divisor, unit = _scale(largest)
    scaled = {name: [value / divisor for value in values] for name, values in parts.items()}
    _stacked(_rows(figure, ran), ran, scaled, f"{unit} {what}".strip())


def _busy(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    axes = _rows(figure, ran)
    names = [
        name
        for name in dict.fromkeys(name for result in ran for name in result.devices)
        if any(r.devices[name].busy_ns or r.devices[name].stall_ns for r in ran if name in r.devices)
    ]
    height, colours = 0.8 / max(1, len(names)), _colours(ran)
    for number, name in enumerate(names):
        colour = colours[name]
        places = [row - 0.4 + height * (number + 0.5) for row in range(len(ran))]
        busy, stall = [], []
        for result in ran:
            use, total = result.devices.get(name), result.elapsed_ns or 1
            busy.append(100 * use.busy_ns / total if use else 0.0)
            stall.append(100 * use.stall_ns / total if use else 0.0)
        axes.barh(places, busy, height * 0.9, color=colour, label=_plain(name))
        axes.barh(places, stall, height * 0.9, left=busy, color="white", edgecolor=colour, hatch="////", linewidth=0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the decode time")
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _steps(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    axes = figure.subplots()
    for number, result in enumerate(ran):
        milliseconds = [step / 1e6 for step in result.step_ns]
        axes.plot(
            range(1, len(milliseconds) + 1),
            milliseconds,
            marker=".",
            color=COLOURS[number % len(COLOURS)],
            label=_plain(result.policy),
        )
    times = [step for result in ran for step in result.step_ns if step]
    if times and max(times) > 30 * min(times):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _errors(figure: Figure, ran: Sequence[PolicyResult]) -> None:
    axes = _rows(figure, ran)
    rows = range(len(ran))
    axes.set_xscale("log")
    floor = min((r.max_error for r in ran if r.max_error > 0), default=1e-9) / 10
    axes.barh(rows, [max(r.error_bound, floor) for r in ran], 0.3, color="#cccccc")
    axes.plot([max(r.max_error, floor) for r in ran], list(rows), "o", color=COLOURS[5])
    axes.set_xlim(left=floor)
    axes.set_xlabel("|output − oracle|")
