"""The report stands alone, shows every number, and believes nothing that a model or a file says."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tierloop.runtime.results import Comparison, DeviceUse, LinkUse, PolicyResult
from tierloop.tools.output import to_json
from tierloop.tools.plots import plots
from tierloop.tools.report import report
from tierloop.tools.table import amount, policies_table, remarks, use_table

ANSWERED = PolicyResult(
    policy="split-all",
    platform="demo",
    text="The magic number is 31337.",
    tokens=(5, 6, 7),
    equal_to_dense=True,
    max_error=2.0e-6,
    error_bound=9.0e-5,
    error_vs_dense=2.0e-6,
    tokens_per_s=41.25,
    step_ns=(24_000_000, 25_000_000, 24_500_000),
    elapsed_ns=73_500_000,
    provenance="simulated",
    answered=True,
    devices={
        "emu:gpu": DeviceUse(1_500_000_000, 2_000, 60_000_000, 5_000_000, 90, 1_500_002_000),
        "emu:dram": DeviceUse(700_000_000, 900, 50_000_000, 0, 30, 700_000_900),
        "emu:idle": DeviceUse(),
    },
    links={"pcie": LinkUse(12_345, 678_900, 1_000_000)},
    placement={"emu:gpu": 40_000_000, "emu:dram": 120_000_000},
)
REFUSED = PolicyResult(policy="all-gpu", platform="demo", refused="emu:gpu: 160 MB do not fit 40 MB")
SPARSE = replace(
    ANSWERED, policy="topk-blocks", exact=False, equal_to_dense=False, tokens=(5, 9, 7), guesses=("emu:cxl: latency",)
)


def comparison(*results: PolicyResult) -> Comparison:
    return Comparison(
        platform="demo",
        clock="virtual",
        model="smollm2-135m",
        prompt_tokens=4100,
        policies=results,
        dense_text="The magic number is 31337.",
        dense_tokens=(5, 6, 7),
        question="What is the magic number?",
        answer="31337",
        manifest={"seed": 0},
    )


class Page(HTMLParser):
    """Collects tags, what they point at, and the text of cells; fails on a tag that is closed out of turn."""

    void = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.targets: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1] += data


def page(*results: PolicyResult, failures: tuple[str, ...] = ()) -> Page:
    return Page(report("demo", "under test", [comparison(*results)], failures))


def shown(*results: PolicyResult) -> str:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(policies_table(comparison(*results)), use_table(comparison(*results)))
    return console.export_text()


def test_the_report_is_well_formed_and_needs_nothing_else() -> None:
    made = page(ANSWERED, REFUSED, SPARSE)
    assert made.open == []
    assert made.targets, "there are plots"
    assert all(target.startswith("data:image/svg+xml;base64,") for target in made.targets)
    assert not made.tags & {"script", "link", "iframe", "object"}


def test_the_report_shows_every_policy_with_its_numbers() -> None:
    cells = page(ANSWERED, REFUSED, SPARSE).cells
    for expected in ("split-all", "all 3", "2.00e-06", "9.00e-05", "41.2", "simulated", "topk-blocks", "first 1"):
        assert expected in cells
    assert "refused: emu:gpu: 160 MB do not fit 40 MB" in cells
    assert "1.5 GB" in cells
    assert "link pcie" in cells
    assert "emu:idle" not in cells


def test_what_a_model_says_is_text_and_not_markup() -> None:
    hostile = replace(ANSWERED, text="<script>alert(1)</script>", policy="<b>&", notes=("<i>note",))
    made = page(hostile)
    assert not made.tags & {"script", "b", "i"}
    assert "<script>alert(1)</script>" in made.cells


def test_the_same_comparison_gives_the_same_bytes() -> None:
    first, second = (report("demo", "", [comparison(ANSWERED, SPARSE)], ()) for _ in range(2))
    assert first == second


def test_every_plot_is_an_svg_of_its_own() -> None:
    drawn = plots(comparison(ANSWERED, SPARSE))
    assert len(drawn) == 6
    for _, svg in drawn:
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "http://www.w3.org/1999/xlink" not in re.findall(r'href="([^#"]+)"', svg)


@pytest.mark.parametrize(
    "result",
    [
        replace(ANSWERED, devices={}, links={}, placement={}, step_ns=(), tokens=(), tokens_per_s=0.0),
        replace(ANSWERED, max_error=0.0, error_bound=0.0),
        replace(ANSWERED, policy="a $b$ policy with a_name", max_error=float("nan")),
        REFUSED,
    ],
    ids=["nothing was done", "no error at all", "odd name and NaN", "refused"],
)
def test_a_report_can_be_made_of_any_result(result: PolicyResult) -> None:
    assert page(result).open == []
    assert result.policy in shown(result)


def test_failures_and_invalid_runs_stand_at_the_top() -> None:
    failed = report("demo", "", [comparison(ANSWERED)], ["split-all: the tokens differ from dense"])
    assert "1 check failed" in failed
    assert "All checks passed" not in failed
    invalid = report("demo", "", [comparison(replace(ANSWERED, invalid=("late by 3 ms",)))], [])
    assert "invalid" in invalid
    assert "All checks passed" not in invalid


def test_the_table_marks_what_is_wrong() -> None:
    wrong = replace(ANSWERED, equal_to_dense=False, tokens=(5, 8, 7), invalid=("late by 3 ms",), dilation=64)
    text = shown(wrong, SPARSE, REFUSED)
    assert "NO: first 1" in text
    assert "INVALID (simulated, σ = 64)" in text
    assert "refused: emu:gpu" in text
    assert "emu:idle" not in text


def test_a_text_with_markup_of_the_terminal_is_shown_as_it_is() -> None:
    assert "[red]alarm[/red]" in shown(replace(ANSWERED, text="[red]alarm[/red]"))


def test_a_text_cannot_command_the_terminal() -> None:
    assert "\x1b" not in shown(replace(ANSWERED, text="\x1b[2Jgone"))


def test_remarks_name_notes_guesses_and_failures() -> None:
    lines = remarks(comparison(replace(ANSWERED, max_error=1.0, notes=("GPU memory raised",)), SPARSE))
    assert "split-all: GPU memory raised" in lines
    assert not any("page cache" in line for line in lines)
    assert "dilated" in remarks(comparison(replace(ANSWERED, notes=("dilated",)), replace(SPARSE, notes=("dilated",))))
    assert any("1 constant that is assumed" in line for line in lines)
    assert "emu:cxl: latency" in report("demo", "", [comparison(ANSWERED, SPARSE)], [])
    assert any(line.startswith("FAILED: split-all: error 1 is above its bound") for line in lines)


def test_what_no_medium_was_asked_for_is_remarked() -> None:
    buffered = replace(ANSWERED, devices={"nvme0": DeviceUse(bytes_read=9_000_000, cached_bytes=7_000_000)})
    assert f"split-all: nvme0: {amount(7_000_000)} were read from the page cache, not from the medium" in remarks(
        comparison(buffered, SPARSE)
    )


def test_an_error_that_is_not_a_number_fails() -> None:
    assert comparison(replace(ANSWERED, max_error=float("nan"))).failures


def test_json_keeps_the_contract() -> None:
    read = json.loads(to_json(comparison(ANSWERED, replace(REFUSED, error_bound=float("inf"))).to_json()))
    assert {"platform", "clock", "model", "prompt_tokens", "policies"} <= set(read)
    wanted = {
        "policy",
        "text",
        "tokens",
        "equal_to_dense",
        "max_error",
        "error_bound",
        "error_vs_dense",
        "tokens_per_s",
    }
    assert wanted | {"provenance", "dilation", "devices", "links"} <= set(read["policies"][0])
    use = read["policies"][0]["devices"]["emu:gpu"]
    assert {"bytes_read", "bytes_written", "busy_ns", "stall_ns", "commands"} <= set(use)
    assert read["policies"][0]["links"]["pcie"] == {"bytes_forward": 12345, "bytes_back": 678900, "busy_ns": 1000000}
    assert read["policies"][0]["tokens"] == [5, 6, 7]
    assert read["policies"][1]["error_bound"] is None


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (5 * 10**12, "5 TB")]
)
def test_amounts_have_a_unit(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text


def test_the_plots_are_images_that_decode() -> None:
    for target in page(ANSWERED).targets:
        assert base64.b64decode(target.partition(",")[2]).startswith(b"<?xml")
