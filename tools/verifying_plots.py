"""Plots of a verification as SVG: expected against got, and the error of every point."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tierloop.tools.measuring import Point
from tierloop.tools.plots import COLOURS
from tierloop.tools.verifying import Compared, Verification

_STYLE: Any = {"svg.hashsalt": "tierloop", "font.size": 9, "axes.grid": True, "grid.color": "#dddddd"}


def plots(found: Verification) -> list[tuple[str, str]]:
    """(caption, SVG text) of every plot that the verification has points for."""
    drawn: list[tuple[str, str]] = []
    with matplotlib.rc_context(_STYLE):
        streams = [one for one in found.points if one.expected.point.pattern == "sequential"]
        if streams:
            caption = "Rate against size: expected (line) and got from the emulation (dot; a ring does not count)."
            drawn.append((caption, _rates(streams)))
        loaded = [one for one in found.points if one.expected.point.pattern in ("idle", "loaded")]
        if loaded:
            drawn.append(("Latency, expected (bar) and got (dot).", _bars(loaded)))
        drawn.append(("Error of every point; the dotted lines are the bounds of the worst point.", _errors(found)))
    return drawn


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _rates(points: Sequence[Compared]) -> str:
    figure = _figure(3.6)
    axes = figure.subplots()
    series: dict[tuple[str, int, float], list[Compared]] = {}
    for one in points:
        point = one.expected.point
        series.setdefault((point.verb, point.depth, point.read_fraction), []).append(one)
    for number, ((verb, depth, reads), ones) in enumerate(sorted(series.items())):
        colour = COLOURS[number % len(COLOURS)]
        ones = sorted(ones, key=lambda one: one.expected.point.nbytes)
        label = f"{verb}, depth {depth}" + (f", {reads:.0%} reads" if verb == "transfer" else "")
        sizes = [one.expected.point.nbytes for one in ones]
        axes.plot(sizes, [one.expected.value / 1e9 for one in ones], color=colour, marker="_", label=label)
        for one in ones:
            if one.got:
                fill = "none" if one.reason else colour
                axes.plot(
                    one.expected.point.nbytes, one.got / 1e9, "o", color=colour, markerfacecolor=fill, markersize=4
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a command")
    axes.set_ylabel("GB/s")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    return _svg(figure)


def _bars(points: Sequence[Compared]) -> str:
    figure = _figure(0.9 + 0.3 * len(points))
    axes = figure.subplots()
    rows = range(len(points))
    axes.barh(rows, [one.expected.value for one in points], 0.5, color="#cccccc")
    for row, one in zip(rows, points, strict=True):
        if one.got:
            axes.plot(one.got, row, "o", color=COLOURS[5], markerfacecolor="none" if one.reason else COLOURS[5])
    axes.set_yticks(rows, [_label(one.expected.point) for one in points], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ns")
    return _svg(figure)


def _errors(found: Verification) -> str:
    figure = _figure(0.9 + 0.18 * len(found.points))
    axes = figure.subplots()
    rows = range(len(found.points))
    counted = [0.0 if one.reason or not one.got else 100 * one.error for one in found.points]
    left_out = [100 * one.error if one.reason and one.got else 0.0 for one in found.points]
    axes.barh(rows, counted, 0.7, color=COLOURS[0])
    axes.barh(rows, left_out, 0.7, color="white", edgecolor=COLOURS[7], hatch="////", linewidth=0.6)
    for bound in {found.bounds.latency, found.bounds.rate}:
        for side in (-100 * bound, 100 * bound):
            axes.axvline(side, color=COLOURS[5], linestyle=":", linewidth=1)
    axes.set_yticks(rows, [_label(one.expected.point) for one in found.points], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("error in %; hatched: not counted")
    return _svg(figure)


def _label(point: Point) -> str:
    return str(point).replace("$", r"\$")
