"""`tierloop bench attention`: every attention kernel against this machine's limits, torch and NumPy, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tierloop.devices.errors import ConfigurationError
from tierloop.tools import options
from tierloop.tools.console import progress, results, say
from tierloop.tools.exits import FAILED

if TYPE_CHECKING:
    from tierloop.tools.bench_data import Sizes
    from tierloop.tools.bench_measure import Report, Run

HEADINGS = ("kernel", "dtype", "group", "dim", "tokens", "µs", "GB/s", "GFLOP/s", "roofline", "read", "limit",
            "× gqa", "× resh.", "× other", "error", "target")  # fmt: skip
_TEXTS = ("kernel", "dtype", "limit", "target")
_SHORTER = {
    "ratio_torch_sdpa_": "",
    "ratio_gather": "other",
    "_fraction": "",
    "time_us": "µs",
    "prefill_share": "share",
}


def attention(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tries: 40 s instead of four minutes.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of kernels and rivals; default: every core.", metavar="N")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """The attention kernels of this package: how near they are to this machine's limits, to torch and to NumPy.

    Reads and computes in memory only. Every result is checked against float64. Close other programs first.

    Exit codes: 0 good (also where a target is missed), 1 a result was wrong, 2 the input was wrong.
    """
    from tierloop.devices.kernels import run
    from tierloop.tools.bench_data import Sizes
    from tierloop.tools.roofline import last_level_cache_nbytes

    chosen = allowed_threads(threads)
    cache_nbytes = last_level_cache_nbytes()
    bench_attention(Sizes.quick(cache_nbytes) if quick else Sizes.full(cache_nbytes), chosen, as_json, run)


def allowed_threads(threads: int | None) -> int:
    """What `--threads` says. Raises ConfigurationError."""
    from tierloop.tools.roofline import cores

    most = cores()
    if threads is not None and not 1 <= threads <= most:
        raise ConfigurationError(f"--threads {threads}: allowed: 1 to {most}, the cores that this process may use")
    return threads or most


def bench_attention(sizes: Sizes, threads: int, as_json: bool, run: Run) -> None:
    """Measure and print. Raises typer.Exit(1) if a result is wrong."""
    from tierloop.tools.bench_measure import measure

    with results(as_json) as shown:
        with progress() as advance:
            report = measure(sizes, threads, run, advance)
        shown.json(report.to_json())
        shown.show(limits_table(report), cases_table(report), *(Text(note) for note in report.notes()))
    for wrong in report.wrong():
        say(f"WRONG: {wrong}")
    if report.wrong():
        raise typer.Exit(FAILED)


def limits_table(report: Report) -> Table:
    """What this machine can do."""
    limits = report.limits
    table = Table(title=f"limits of this machine, {limits.threads} threads", title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("per second", justify="right")
    table.add_row("memory read", f"{limits.read / 1e9:.1f} GB")
    table.add_row("multiply-add", f"{limits.peak_flops / 1e9:.0f} GFLOP")
    for dtype, rate in limits.conversions.items():
        if dtype != "float32":
            table.add_row(f"{dtype} → float32", f"{rate / 1e9:.1f} G")
    table.add_row("exp", f"{limits.exponentials / 1e9:.2f} G")
    return table


def cases_table(report: Report) -> Table:
    """A row for each case; fractions of the roofline and of the read rate, ratios of times, error over its bound."""
    table = Table(
        title="attention kernels", title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in _TEXTS else "right", no_wrap=heading != "target")
    for row in report.rows():
        other = row["ratio_numpy"] if row["ratio_numpy"] is not None else row["ratio_gather"]
        numbers = (row["gb_s"], row["gflop_s"], row["roofline_fraction"], row["read_fraction"])
        ratios = (row["ratio_torch_sdpa_gqa"], row["ratio_torch_sdpa_reshaped"], other)
        wrong = not row["max_error_over_bound"] <= 1
        table.add_row(
            row["kernel"], row["dtype"] or "", _whole(row["group"]), _whole(row["head_dim"]), _whole(row["tokens"]),
            f"{row['time_us']:,.0f}", *map(_short, numbers), row["limit"] or "", *map(_short, ratios),
            _short(row["max_error_over_bound"]) + (" WRONG" if wrong else ""), _target(row),
            style="red" if wrong else "",
        )  # fmt: skip
    return table


def _target(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return ""
    text = "met" if row["met"] else ", ".join(row["missed"])
    for long, short in _SHORTER.items():
        text = text.replace(long, short)
    return text


def _whole(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
