"""Ablation: all combinations of a system's mechanisms, what each does, and what the command prints."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.decoding import SMALL, dense_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices import registry
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime import ablation
from tierloop.runtime.ablation import Ablation, Combination, ablate, effects, every_combination
from tierloop.runtime.compare import PolicyRequest
from tierloop.runtime.engine import Engine
from tierloop.runtime.placed import InPlace
from tierloop.runtime.policy import Batch
from tierloop.runtime.prefill import generate_dense
from tierloop.runtime.results import Comparison, PolicyResult
from tierloop.runtime.statistics import wilson_ci95
from tierloop.runtime.workloads import Workload
from tierloop.tools import ablate as command
from tierloop.tools.cli import app, main

MODEL = tiny_model()
NUM_TOKENS = 4


class TwoParts(InPlace):
    """Attends over the first and last blocks where it selects, and keeps rows on the GPU where it is near."""

    name: ClassVar[str] = "two-parts"
    exact: ClassVar[bool] = False
    mechanisms: ClassVar[tuple[str, ...]] = ("selection", "nearness")

    def __init__(self, engine: Engine, recent: int = 2, without: Sequence[str] = (), far: str = "emu:dram") -> None:
        if recent < 1:
            raise ConfigurationError(f"two-parts: recent is {recent}; it must be at least 1")
        if "nearness" in without and far == "nowhere":
            raise ConfigurationError("two-parts: there is no far memory")
        memory = far if "nearness" in without else engine.dense.memory
        super().__init__(engine, {memory: 1.0}, tail=memory)
        self._recent = None if "selection" in without else recent

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        self.open_blocks(layer, batch)
        appended = self.append(layer, batch)
        heads = np.arange(self.shape.num_kv_heads)
        picked = []
        batch.attended = []
        for request in batch.requests:
            count = request.blocks.num_blocks(layer)
            chosen = np.arange(count) if self._recent is None else np.arange(max(0, count - self._recent), count)
            picked.append((np.repeat(heads, len(chosen)), np.tile(chosen, len(heads))))
            batch.attended.append([chosen for _ in heads])
        return self._attention.attend(layer, batch, appended, picked)


class Plain(InPlace):
    """A policy without mechanisms."""

    name: ClassVar[str] = "plain"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies of this file by name, beside those that are installed."""
    installed = registry._entry_points

    def points(group: str, where: tuple[str, ...]) -> list[EntryPoint]:
        ours = []
        for kind in (TwoParts, Plain):
            point = EntryPoint(kind.name, f"{__name__}:{kind.__name__}", "tierloop.policies")
            vars(point)["dist"] = SimpleNamespace(name="tests", metadata={"Name": "tests"})
            ours.append(point)
        return installed(group, where) + (ours if group == "tierloop.policies" else [])

    monkeypatch.setattr(registry, "_entry_points", points)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # 0.3 s for each policy, after what else was imported


def opened(_: PolicyRequest) -> Platform:
    return open_platform(SMALL)


@cache
def prompts() -> tuple[Workload, ...]:
    """Prompts of some blocks, whose answer is what dense attention says first."""
    made = []
    for seed in range(2):
        workload = tiny_workload(200, seed)
        said = dense_of(MODEL, tuple(workload.token_ids), NUM_TOKENS).text
        made.append(replace(workload, answer=said.split()[0]))
    return tuple(made)


_kept: list[tuple[Ablation, list[list[int]]]] = []


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[Ablation, list[list[int]]]:
    """A table, made once, and the prompts that were prefilled for it."""
    if not _kept:
        prefilled: list[list[int]] = []

        def counted(model: Any, token_ids: list[int], *more: Any) -> Any:
            prefilled.append(token_ids)
            return generate_dense(model, token_ids, *more)

        monkeypatch.setattr("tierloop.runtime.compare.generate_dense", counted)
        found = ablate("two-parts", MODEL, prompts(), opened, num_tokens=NUM_TOKENS, options={"recent": 1})
        _kept.append((found, prefilled))
    return _kept[0]


@pytest.fixture
def table(kept: tuple[Ablation, list[list[int]]]) -> Ablation:
    return kept[0]


def test_every_combination_has_a_row_and_all_mechanisms_come_first(table: Ablation) -> None:
    assert [row.enabled for row in table.rows] == [("selection", "nearness"), ("selection",), ("nearness",), ()]
    assert len(every_combination("abcd")) == len(set(every_combination("abcd"))) == 16


def test_mechanisms_that_are_not_named_stay_on(table: Ablation) -> None:
    found = ablate(
        "two-parts", MODEL, prompts(), opened, num_tokens=NUM_TOKENS, options={"recent": 1}, mechanisms=["nearness"]
    )
    assert found.mechanisms == ("nearness",)
    assert [row.enabled for row in found.rows] == [("nearness",), ()]
    both, selection, *_ = table.rows
    assert [row.mass_recalls for row in found.rows] == [both.mass_recalls, selection.mass_recalls]
    assert [row.tokens_per_s for row in found.rows] == [both.tokens_per_s, selection.tokens_per_s]


def test_each_mechanism_moves_what_it_is_for_and_nothing_else(table: Ablation) -> None:
    both, selection, nearness, none = table.rows
    for on, off in ((both, selection), (nearness, none)):
        assert on.tokens_per_s > off.tokens_per_s  # type: ignore[operator]  # they ran
        assert on.mass_recalls == off.mass_recalls
    for on, off in ((both, nearness), (selection, none)):
        assert on.mass_recall <= off.mass_recall == 1  # type: ignore[operator]  # likewise
        assert on.tokens_per_s != off.tokens_per_s
    assert both.equal_to_dense == selection.equal_to_dense == 0
    assert nearness.equal_to_dense == none.equal_to_dense == 2
    assert nearness.accuracy == none.accuracy == table.dense_accuracy == 1
    assert not table.failures
    assert table.provenance in ("simulated", "extrapolated")


def test_a_row_holds_the_means_of_its_repeats(table: Ablation) -> None:
    for row in table.rows:
        assert len(row.speeds) == len(row.mass_recalls) == 2
        assert row.tokens_per_s == pytest.approx(np.mean(row.speeds))
        assert row.mass_recall == pytest.approx(np.mean(row.mass_recalls))
        assert row.ci95 is not None
        assert row.ci95[0] <= row.tokens_per_s <= row.ci95[1]  # type: ignore[operator]  # it ran


def test_a_row_counts_what_its_runs_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: Any, workload: Workload, __: Any, requests: Sequence[PolicyRequest], **___: Any) -> Comparison:
        second = workload is prompts()[1]
        results = tuple(
            PolicyResult(r.title, tokens_per_s=3.0 + second, mass_recall=0.5 + second / 4, answered=second)
            for r in requests
        )
        return Comparison("p", "virtual", "m", 1, results, dense_text=prompts()[0].answer)

    monkeypatch.setattr(ablation, "compare", found)
    row = ablate("two-parts", MODEL, prompts(), opened, num_tokens=2).rows[0]
    assert (row.tokens_per_s, row.mass_recall, row.accuracy) == (3.5, 0.625, 0.5)
    assert row.accuracy_ci95 == wilson_ci95(1, 2)
    assert row.ci95 == pytest.approx((3.5 - 12.706 / 2, 3.5 + 12.706 / 2), abs=1e-3)


def test_a_prompt_is_prefilled_once_for_all_combinations(kept: tuple[Ablation, list[list[int]]]) -> None:
    assert kept[1] == [prompt.token_ids for prompt in prompts()]


def rows_of(speed: dict[tuple[str, ...], list[float]], recall: dict[tuple[str, ...], list[float]]) -> list[Combination]:
    return [
        Combination(on, 1.0, speeds=tuple(speed[on]), mass_recalls=tuple(recall[on])) for on in every_combination("ab")
    ]


def test_effects_are_those_that_were_put_in() -> None:
    # a doubles the speed, b triples it, together they give another half on top; a costs 0.1 of recall.
    rows = rows_of(
        {(): [1, 10], ("a",): [2, 20], ("b",): [3, 30], ("a", "b"): [9, 90]},
        {(): [1, 1], ("a",): [0.9, 0.9], ("b",): [1, 1], ("a", "b"): [0.9, 0.9]},
    )
    a, b, both = effects("ab", rows)
    assert [e.mechanisms for e in (a, b, both)] == [("a",), ("b",), ("a", "b")]
    assert a.speed == pytest.approx(math.sqrt(2 * 3))
    assert b.speed == pytest.approx(math.sqrt(3 * 4.5))
    assert both.speed == pytest.approx(1.5)
    assert a.speed_ci95 == pytest.approx((a.speed, a.speed))  # prompts that differ tenfold do not blur the effect
    assert (a.mass_recall, b.mass_recall, both.mass_recall) == pytest.approx((-0.1, 0, 0))


def test_effects_of_one_prompt_have_no_interval() -> None:
    rows = rows_of({(): [1], ("a",): [2], ("b",): [3], ("a", "b"): [6]}, {on: [0.5] for on in every_combination("ab")})
    assert [e.speed for e in effects("ab", rows)] == pytest.approx([2, 3, 1])
    assert {e.speed_ci95 for e in effects("ab", rows)} == {None}


def test_a_combination_that_is_refused_stands_in_the_table_and_there_are_no_effects() -> None:
    found = ablate("two-parts", MODEL, [tiny_workload(70)], opened, num_tokens=2, options={"far": "nowhere"})
    assert [row.refused for row in found.rows] == [None, "two-parts: there is no far memory"] * 2
    assert found.rows[1].tokens_per_s is None
    assert found.rows[0].accuracy is None  # the prompt has no answer
    assert found.effects == ()
    assert any("no effects" in line for line in command.remarks(found))


@pytest.mark.parametrize(
    ("system", "options", "wrong"),
    [
        ("plain", {}, r"plain has no mechanisms .* have some: .*two-parts"),
        ("two-part", {}, "unknown policy 'two-part'; did you mean 'two-parts'"),
        ("two-parts", {"budget": 1}, "no option 'budget'"),
        ("two-parts", {"without": ["selection"]}, "what an ablation sets itself"),
        ("two-parts", {"recent": 0}, "recent is 0"),
    ],
)
def test_what_cannot_be_ablated_is_refused_before_any_work(system: str, options: dict[str, Any], wrong: str) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("work has begun")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "compare", never)
        with pytest.raises(ConfigurationError, match=wrong):
            ablate(system, MODEL, [tiny_workload(70)], opened, num_tokens=2, options=options)


def test_no_workload_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no workload"):
        ablate("two-parts", MODEL, [], opened, num_tokens=2)


# The command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command with the tiny model in place of a real one."""

    def prompt(model: Any, num_tokens: int, depth: float, seed: int, new_tokens: int) -> Workload:
        return prompts()[seed]

    monkeypatch.setattr("tierloop.runtime.models.load_model", lambda *_: MODEL)
    monkeypatch.setattr("tierloop.runtime.workloads.needle_prompt", prompt)
    if all(known.name != "ablate" for known in app.registered_commands):
        app.command("ablate")(command.ablate)
    return main(
        ["ablate", "two-parts", "--platform", str(SMALL), "--tokens", str(NUM_TOKENS), "--repeats", "2", *arguments]
    )


def test_the_json_has_a_row_for_each_combination_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Ablation
) -> None:
    assert run(monkeypatch, "--option", "recent=1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["system"] == "two-parts"
    assert [(row["enabled"], row["tokens_per_s"], row["ci95"], row["accuracy"]) for row in found["rows"]] == [
        (list(row.enabled), row.tokens_per_s, list(row.ci95 or ()), row.accuracy) for row in table.rows
    ]
    assert found["manifest"]["config"]["options"] == {"recent": 1}


def test_the_table_shows_what_is_on_and_the_effects_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Ablation
) -> None:
    monkeypatch.setattr(ablation, "ablate", lambda *_, **__: table)
    assert run(monkeypatch) == 0
    shown = capsys.readouterr().out
    for part in (
        "selection",
        "nearness",
        "selection × nearness",
        "mass recall",
        "2 of 2",
        "dense attention answers 100%",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"failures": ("none: an error is 2 times its bound",)}, 1, "FAILED: none: an error"),
        ({"invalid": ("none: late",)}, 3, "INVALID: none: late"),
    ],
)
def test_what_failed_or_was_invalid_is_an_exit_code(
    changed: dict[str, Any],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    table: Ablation,
) -> None:
    monkeypatch.setattr(ablation, "ablate", lambda *_, **__: replace(table, **changed))
    assert run(monkeypatch) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("--option", "budget=1"), "no option 'budget'"),
        (("--option", "recent"), "KEY=VALUE"),
        (("--platform", "nowhere"), "unknown platform"),
        (("--mechanism", "nearnes"), "two-parts has no mechanism 'nearnes': did you mean 'nearness'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert wrong in capsys.readouterr().err
