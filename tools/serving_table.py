"""What serving runs came to, as tables for a terminal: a row for each policy, and one for each kind of request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tierloop.runtime.served import Limits, ServingResult
from tierloop.runtime.spread import Spread
from tierloop.tools.table import use_remarks

MOST_REASONS = 5
"""Requests whose failure is told, for each policy; the JSON has all of them."""


def serving_tables(title: str, results: Sequence[ServingResult], limits: Limits | None, kinds: bool) -> list[Table]:
    """One table, or two: by policy, and by kind of request where there are several."""
    table = _table(title, ["policy"], ["running", "waiting"], limits)
    for result in results:
        if result.refused is not None:
            table.add_row(Text(result.policy), Text("refused"), style="yellow")
            continue
        over_time = [_mean_and_max(result.running), _mean_and_max(result.waiting)]
        style = "red" if result.invalid or result.failures else ""
        table.add_row(*map(Text, [result.policy, *_cells(result, limits, over_time)]), style=style)
    tables = [table]
    ran = [result for result in results if result.refused is None and len(result.kinds) > 1]
    if kinds and ran:
        by_kind = _table("by kind of request", ["policy", "kind"], [], limits)
        for result in ran:
            for kind in result.kinds:
                by_kind.add_row(*map(Text, [result.policy, kind or "(none)", *_cells(result.of(kind), limits, [])]))
            by_kind.add_section()
        tables.append(by_kind)
    return tables


def serving_remarks(results: Sequence[ServingResult]) -> list[str]:
    """What a reader must know beside the numbers: notes, guesses, why requests failed and why a run is invalid."""
    ran = [result for result in results if result.refused is None]
    shared = [note for note in (ran[0].notes if ran else ()) if all(note in result.notes for result in ran)]
    lines = [
        *shared,
        *(f"{result.policy}: refused: {result.refused}" for result in results if result.refused is not None),
    ]
    for result in ran:
        lines += [f"{result.policy}: {note}" for note in result.notes if note not in shared]
        lines += [f"{result.policy}: {line}" for line in use_remarks(result.devices)]
        told = list(result.failures.items())[:MOST_REASONS]
        lines += [f"{result.policy}: {name} failed: {reason}" for name, reason in told]
        if len(result.failures) > len(told):
            lines.append(f"{result.policy}: {len(result.failures) - len(told)} more failed; the JSON names them")
        if result.invalid:
            lines.append(f"{result.policy}: INVALID: {result.invalid[0]}")
    guesses = Counter(guess for result in ran for guess in result.guesses)
    if guesses:
        lines.append(f"constants that are assumed or unknown: {len(guesses)}; the JSON names them")
    return lines


def _table(title: str, first: Sequence[str], over_time: Sequence[str], limits: Limits | None) -> Table:
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for heading in first:
        table.add_column(heading)
    table.add_column("requests", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("TTFT ms\np50 / p95 / p99", justify="right")
    table.add_column("TPOT ms\np50 / p95 / p99", justify="right")
    for heading in over_time:
        table.add_column(f"{heading}\nmean / max", justify="right")
    for heading in ("preempted", "migrated", "failed", *(["within limits"] if limits is not None else [])):
        table.add_column(heading, justify="right")
    table.add_column("provenance")
    return table


def _cells(result: ServingResult, limits: Limits | None, over_time: Sequence[str]) -> list[str]:
    cells = [f"{len(result.requests):,}", _number(result.tokens_per_s)]
    cells += [_percentiles(result.ttft_ms), _percentiles(result.tpot_ms), *over_time]
    cells += [f"{result.preemptions:,}", f"{result.migrations:,}", f"{len(result.failures):,}"]
    if limits is not None:
        good = result.goodput(limits)["requests"]
        cells.append(f"{good:,} of {len(result.requests):,}")
    dilated = f", σ = {result.dilation}" if result.dilation > 1 else ""
    cells.append(f"INVALID ({result.provenance})" if result.invalid else result.provenance + dilated)
    return cells


def _percentiles(spread: Spread) -> str:
    return " / ".join(_number(spread[name]) for name in ("p50", "p95", "p99"))


def _mean_and_max(spread: Spread) -> str:
    return f"{_number(spread['mean'])} / {_number(spread['max'])}"


def _number(value: float | None) -> str:
    """Three digits, or all of those before the point; a dash where nothing was measured."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
