"""`tierloop reproduce`: its JSON, exit codes and errors, what a claim passes by, and that constants are frozen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.runtime.reproduction import Check, Claim, System, Table, at_least, constants_hash, digest, near, over
from tierloop.tools import reproduce as command
from tierloop.tools import reproducing, reproducing_hybridgen
from tierloop.tools.cli import app
from tierloop.tools.reproducing_hybridgen_constants import CONSTANTS, Constants, frozen

CLI = Callable[..., tuple[int, str, str]]
CONTRACT = {"id", "paper", "got", "interval", "passed", "provenance", "seed", "reason"}
SIZE = st.floats(-1e6, 1e6)


@pytest.fixture(autouse=True)
def registered() -> None:
    if all(known.name != "reproduce" for known in app.registered_commands):
        app.command("reproduce")(command.reproduce)


def system_of(**checks: Check) -> System:
    constants = {"locality": "smollm2-135m", "kv_dtype": "float16", "table": 512}
    tables = (Table("t", "what?", ({"n": 1, "x": 0.5, "provenance": "extrapolated", "reason": "guessed"},)),)
    given = {name: lambda _, check=check: check for name, check in checks.items()}
    return System("hybridgen", constants, given, {"q": lambda _: tables})


def check_of(name: str, got: float, claimed: tuple[float, float] = (1.0, 2.0)) -> Check:
    claim = Claim("between 1 and 2", claimed, got, over(got))
    return Check(name, "a number", (claim,), "simulated", 0, "as is")


# -- the command --------------------------------------------------------------------------------------------------


def test_json_has_the_fields_of_the_contract_and_a_skipped_check_is_no_failure(run_cli: CLI) -> None:
    code, out, _ = run_cli("reproduce", "hybridgen", "--check", "H5", "--check", "H2", "--no-questions", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"system", "constants_hash", "checks", "constants", "questions"} <= found.keys()
    assert found["system"] == "hybridgen"
    assert found["questions"] == []
    first, second = found["checks"]
    assert first.keys() >= CONTRACT
    assert second.keys() >= CONTRACT
    assert (first["id"], first["passed"], first["interval"][0]) == ("H2", True, pytest.approx(31_375.04))
    assert (second["id"], second["passed"], second["got"], second["interval"]) == ("H5", None, None, None)
    assert "InfiniGen" in second["reason"]
    assert "FlexGen" in second["reason"]


def test_the_hash_is_that_of_the_constants_that_are_printed(run_cli: CLI) -> None:
    hashes = []
    for seed in ("0", "0", "3"):
        code, out, _ = run_cli("reproduce", "hybridgen", "--check", "H2", "--no-questions", "--seed", seed, "--json")
        found = json.loads(out)
        assert code == 0
        assert found["constants_hash"] == constants_hash(found["constants"])
        assert found["checks"][0]["seed"] == int(seed)
        hashes.append(found["constants_hash"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_check_that_fails_is_exit_code_1_and_is_named(run_cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    made = system_of(A=check_of("A", 1.5), B=check_of("B", 3.0))
    monkeypatch.setattr(reproducing_hybridgen, "system", lambda: made)
    code, out, err = run_cli("reproduce", "hybridgen", "--json")
    found = json.loads(out)
    assert code == 1
    assert [c["passed"] for c in found["checks"]] == [True, False]
    assert found["questions"][0]["rows"] == [{"n": 1, "x": 0.5, "provenance": "extrapolated", "reason": "guessed"}]
    assert "FAILED: B: between 1 and 2: 3" in err
    code, out, _ = run_cli("reproduce", "hybridgen")
    assert code == 1
    assert "NO" in out
    assert "what?" in out
    assert "B: as is" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt",), "no reproduction of 'gpt'; known: hybridgen, kvdrive"),
        (("hybridgn",), "did you mean 'hybridgen'?"),
        (("hybridgen", "--check", "K3"), "hybridgen has no check 'K3'"),
    ],
)
def test_a_wrong_name_is_exit_code_2_with_the_names(arguments: tuple[str, ...], message: str, run_cli: CLI) -> None:
    code, out, err = run_cli("reproduce", *arguments, "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_hybridgen_has_its_nine_checks_in_order() -> None:
    found = reproducing.find_system("hybridgen")
    assert list(found.checks) == [f"H{number}" for number in range(1, 10)]
    assert found.chosen(["H9", "H1"]) == ["H1", "H9"]


# -- claims -------------------------------------------------------------------------------------------------------


@given(SIZE, SIZE, SIZE, SIZE)
def test_a_claim_passes_where_some_value_is_in_both_ranges(a: float, b: float, c: float, d: float) -> None:
    claimed, interval = over(a, b), over(c, d)
    ends = [*claimed, *interval]
    meets = any(claimed[0] <= x <= claimed[1] and interval[0] <= x <= interval[1] for x in ends)
    assert Claim("", claimed, c, interval).passed == meets


def test_claims_of_one_side_and_of_a_tolerance_end_where_they_say() -> None:
    assert Claim("", at_least(4), 5.0, over(0.2, 4.0)).passed
    assert not Claim("", at_least(4), 5.0, over(0.2, 3.99)).passed
    assert Claim("", near(100, 0.01), 99.0, over(99.0)).passed
    assert not Claim("", near(100, 0.01), 98.9, over(98.9)).passed


def test_a_check_shows_the_claim_that_failed_and_infinite_ends_are_null() -> None:
    good, bad = Claim("good", at_least(1), 2.0, over(2.0)), Claim("bad", at_least(3), 2.0, (2.0, math.inf))
    worse = Claim("worse", at_least(3), 2.0, over(2.0))
    found = Check("X", "x", (good, bad, worse), "simulated", 0).to_json()
    assert (found["paper"], found["passed"]) == ("worse", False)
    assert found["claims"][0]["claimed"] == [1, None]
    assert [claim["passed"] for claim in found["claims"]] == [True, True, False]


def test_a_table_refuses_an_extrapolated_row_that_does_not_say_why() -> None:
    with pytest.raises(AssertionError, match="extrapolated, and not why"):
        Table("t", "what?", ({"provenance": "extrapolated", "reason": ""},))


# -- constants ----------------------------------------------------------------------------------------------------


def test_every_constant_is_in_the_hash() -> None:
    before = constants_hash(frozen())
    assert {field.name for field in fields(Constants)} <= frozen().keys()
    for name in ("cpu_implied", "k_min", "mapping_claimed", "contexts", "budget"):
        value: Any = getattr(CONSTANTS, name)
        changed: dict[str, Any] = {name: tuple(v * 2 for v in value) if isinstance(value, tuple) else value * 2}
        assert constants_hash(frozen(replace(CONSTANTS, **changed))) != before
    assert constants_hash(frozen(replace(CONSTANTS, platform="hybridgen-h100-cxl"))) != before
    assert constants_hash(frozen()) == before


def test_the_digest_of_a_platform_covers_what_it_includes_and_its_profiles(tmp_path: Path) -> None:
    names = reproducing.platform_digests(["hybridgen-a100-cxl-5gflops"])
    assert {"platforms/hybridgen-a100-cxl.toml", "profiles/a100-80.toml", "profiles/cxl-a.toml"} <= names.keys()
    file = tmp_path / "x.toml"
    file.write_text("a = 1\n")
    before = digest([file])
    file.write_text("a = 2\n")
    assert digest([file]) != before
    assert before.keys() == digest([file]).keys()


def test_the_implied_cpu_rate_follows_from_the_figure_and_not_from_a_run() -> None:
    flops = 4 * 8192 * 5120 * 40
    streamed_s = 8192 * 819_200 / 25.6e9
    slowest, fastest = flops / CONSTANTS.aoc_most_s, flops / (CONSTANTS.aoc_over_aog * streamed_s)
    assert slowest <= CONSTANTS.cpu_implied <= fastest
