"""A comparison as tables for a terminal: what each policy answered, and what each device and link did for it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from tierloop.runtime.results import Comparison, DeviceUse, PolicyResult

_TEXT = 48
"""Characters of an answer that the table shows; the report and the JSON hold all of it."""


def title(comparison: Comparison) -> str:
    """One line that says what was compared on what."""
    return (
        f"{comparison.model}, {comparison.prompt_tokens:,} prompt tokens, "
        f"platform {comparison.platform} ({comparison.clock} clock)"
    )


def policies_table(comparison: Comparison) -> Table:
    """One row per policy: text, agreement with dense, error against its bound, and speed with how it is known."""
    table = Table(title=Text(title(comparison)), title_justify="left", header_style="bold")
    headings = ["policy", "text", "tokens = dense", "largest error (bound)", "error vs dense"]
    if comparison.answer:
        headings.insert(2, "answered")
    for heading in headings:
        table.add_column(heading)
    table.add_column("tokens/s", justify="right")
    table.add_column("provenance")
    for result in comparison.policies:
        elsewhere = result.platform not in ("", comparison.platform)
        name = f"{result.policy}\non {result.platform}" if elsewhere else result.policy
        if result.refused is not None:
            _add(table, name, f"refused: {result.refused}", style="yellow")
            continue
        _add(
            table,
            name,
            _shortened(result.text),
            *answered(comparison, result),
            agreement(comparison, result),
            f"{result.max_error:.2e} ({result.error_bound:.2e})",
            f"{result.error_vs_dense:.2e}",
            rate(result),
            provenance(result),
            style="red" if result.invalid or comparison.differs(result) else "",
        )
    return table


USE = ("device or link", "out / forward", "in / back", "media", "busy", "stall", "commands")
"""Headings of `use_rows`: bytes that left and entered, bytes that the medium moved, shares of the decode time."""


def use_rows(result: PolicyResult) -> list[tuple[str, ...]]:
    """What each device and link did during decode, under the headings `USE`; those that did nothing are left out."""
    total = result.elapsed_ns
    rows: list[tuple[str, ...]] = []
    for name, use in result.devices.items():
        if use.commands or use.bytes_read or use.bytes_written:
            moved = (amount(use.bytes_read), amount(use.bytes_written), amount(use.media_bytes))
            rows.append((name, *moved, share(use.busy_ns, total), share(use.stall_ns, total), f"{use.commands:,}"))
    for name, link in result.links.items():
        if link.bytes_forward or link.bytes_back:
            moved = (amount(link.bytes_forward), amount(link.bytes_back), "")
            rows.append((f"link {name}", *moved, share(link.busy_ns, total), "", ""))
    return rows


def use_table(comparison: Comparison) -> Table:
    """`use_rows` of every policy that ran."""
    table = Table(title="decode: bytes, busy and stall", title_justify="left", header_style="bold")
    table.add_column("policy")
    for heading in USE:
        table.add_column(heading, justify="left" if heading == USE[0] else "right")
    for result in comparison.policies:
        for number, row in enumerate(use_rows(result)):
            _add(table, "" if number else result.policy, *row)
        table.add_section()
    return table


def use_remarks(devices: Mapping[str, DeviceUse]) -> list[str]:
    """What the numbers of a device do not mean by themselves: bytes of a page cache, and commands tried again."""
    lines = []
    for name, use in devices.items():
        if use.cached_bytes:
            lines.append(f"{name}: {amount(use.cached_bytes)} were read from the page cache, not from the medium")
        if use.retries:
            lines.append(
                f"{name}: commands were tried again {use.retries:,} times after a failure, and {use.recovered:,} "
                "recovered"
            )
    return lines


def remarks(comparison: Comparison) -> list[str]:
    """What a reader must know beside the numbers: notes, guesses, and why a run is invalid or a check failed."""
    ran = [result for result in comparison.policies if result.refused is None]
    shared = [note for note in (ran[0].notes if ran else ()) if all(note in result.notes for result in ran)]
    lines = list(shared)
    for result in ran:
        lines += [f"{result.policy}: {note}" for note in result.notes if note not in shared]
        lines += [f"{result.policy}: {line}" for line in use_remarks(result.devices)]
        if result.clipped_keys:
            lines.append(
                f"{result.policy}: elements of later keys beyond the range of {comparison.kv_dtype} that the prompt "
                f"gave: {result.clipped_keys:,}; the largest code stands for each"
            )
        if result.invalid:
            more = f" (and {len(result.invalid) - 1} more)" if len(result.invalid) > 1 else ""
            lines.append(f"{result.policy}: INVALID: {result.invalid[0]}{more}")
    if count := len(guesses(comparison)):
        are = "constants that are" if count > 1 else "constant that is"
        lines.append(f"times rest on {count} {are} assumed or unknown; the report and the JSON name them")
    lines += [f"FAILED: {failure}" for failure in comparison.failures]
    return lines


def guesses(comparison: Comparison) -> list[str]:
    """Constants that are assumed or unknown, each once."""
    return list(dict.fromkeys(guess for result in comparison.policies for guess in result.guesses))


def agreement(comparison: Comparison, result: PolicyResult) -> str:
    """How many of the tokens equal those of dense attention: all, or the first that differs."""
    if result.equal_to_dense:
        return f"all {len(result.tokens)}"
    pairs = zip(result.tokens, comparison.dense_tokens, strict=False)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    place = f"first {first}" if first is not None else f"{len(result.tokens)} of {len(comparison.dense_tokens)}"
    return f"NO: {place}" if comparison.differs(result) else place


def answered(comparison: Comparison, result: PolicyResult) -> list[str]:
    """Whether the text holds the answer, for prompts that have one: no cell or one."""
    return ["yes" if result.answered else "no"] if comparison.answer else []


def provenance(result: PolicyResult) -> str:
    """How the time is known, with the dilation where there is one, and marked where the run is invalid."""
    text = result.provenance + (f", σ = {result.dilation}" if result.dilation > 1 else "")
    return f"INVALID ({text})" if result.invalid else text


def rate(result: PolicyResult) -> str:
    """Tokens per second with three digits; a dash where no step was decoded."""
    if not result.step_ns:
        return "–"
    return f"{result.tokens_per_s:,.0f}" if result.tokens_per_s >= 100 else f"{result.tokens_per_s:.3g}"


def share(time_ns: int, total_ns: int) -> str:
    """A part of the decode time in percent."""
    return f"{100 * time_ns / total_ns:.1f} %" if total_ns else "–"


def amount(nbytes: int) -> str:
    """Bytes with a unit of 1000: 1.23 GB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _add(table: Table, *cells: str, style: str = "") -> None:
    """A row whose cells are text, never markup."""
    table.add_row(*(Text(cell) for cell in cells), style=style)


def _shortened(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= _TEXT else line[: _TEXT - 1] + "…"
