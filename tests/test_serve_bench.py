"""`tierloop serve-bench`: what it serves, what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.arrival_trace import read
from tierloop.tools.serve_bench import serve_bench
from tierloop.tools.serving_workload import PHANTOM, REAL, Traffic, lengths

RunCli = Callable[..., tuple[int, str, str]]
SECOND = 10**9
FEW: dict[str, Any] = {"requests": 6, "short": "300:6", "long_share": 0.0}


def run(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    serve_bench(**(FEW | options), as_json=True)
    return dict(json.loads(capsys.readouterr().out))


# -- what it prints -------------------------------------------------------------------------------------------------


def test_the_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys)
    assert (shown["policy"], shown["requests"], shown["num_tokens"]) == ("paged", 6, 36)
    for metric in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert shown[metric]["p50"] <= shown[metric]["p95"] <= shown[metric]["p99"]
        assert shown[metric]["p50"] > 0
    assert shown["tokens_per_s"] == pytest.approx(36e9 / shown["elapsed_ns"])
    assert (shown["preemptions"], shown["losses"], shown["migrations"], shown["failures"]) == (0, 0, 0, {})
    assert (shown["provenance"], shown["clock"]) == ("extrapolated", "virtual")
    assert "2 layers stand for 32" in shown["notes"]
    assert [each["name"] for each in shown["served"]] == [f"request-{i}" for i in range(6)]
    assert shown["workload"]["prompt_tokens"] == 1800
    config = shown["manifest"]["config"]
    assert (config["model"], config["platform"]) == ("llama-3-8b-1048k", "nelssa-h100-4pnm")
    assert config["serving"]["rules"] == {
        "max_batch": 256,
        "step_tokens": 2048,
        "preemption": "recompute",
        "prefill_workers": 0,
        "recomputes": 1,
    }
    assert config["traffic"]["short"] == "300:6"


def test_several_policies_are_a_list_and_serve_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, policy=["paged", "cpu-attention", "paged"], platform="nelssa-h100")
    assert [each["policy"] for each in shown["results"]] == ["paged", "cpu-attention"]
    first, second = ([(r["name"], r["arrived_ns"]) for r in each["served"]] for each in shown["results"])
    assert first == second
    paged, cores = shown["results"]
    assert paged["tpot_ms"]["p50"] < cores["tpot_ms"]["p50"]


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = run(capsys, seed=3), run(capsys, seed=3), run(capsys, seed=4)
    assert first["served"] == again["served"]
    assert first["served"] != other["served"]


def test_tables_say_what_was_served_and_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    serve_bench(requests=8, short="300:6", long="4000:8", long_share=0.5, ttft_limit_ms=1e6)
    shown = capsys.readouterr().out
    for text in ("8 requests", "TTFT ms", "TPOT ms", "by kind of request", "short", "long", "8 of 8", "extrapolated"):
        assert text in shown
    serve_bench(requests=8, short="300:6", long="4000:8", long_share=0.5, kinds=False)
    assert "by kind" not in capsys.readouterr().out


def test_requests_within_limits_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, ttft_limit_ms=1e6, tpot_limit_ms=1e6)
    assert (shown["goodput"]["requests"], shown["goodput"]["share"]) == (6, 1.0)
    assert run(capsys, ttft_limit_ms=1e-3)["goodput"]["requests"] == 0


def test_a_request_that_does_not_fit_ends_with_1_and_the_others_are_shown(run_cli: RunCli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": n, "output_length": 4} for n in (300, 2_000_000, 400)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run_cli("serve-bench", "--trace", str(trace), "--json")
    assert code == 1
    shown = json.loads(out)
    assert list(shown["failures"]) == ["trace-1"]
    assert "2000000 tokens of trace-1 need" in shown["failures"]["trace-1"]
    assert [len(each["tokens"]) for each in shown["served"]] == [4, 0, 4]
    assert "1 of 3 requests were not served" in err
    assert any("longer than the 1,048,576" in note for note in shown["notes"])


def test_a_policy_without_room_is_refused_and_the_others_serve(capsys: pytest.CaptureFixture[str]) -> None:
    room = ["devices.gpu.capacity=17000000000"]
    shown = run(capsys, policy=["paged", "cpu-attention"], platform="nelssa-h100", overrides=room)
    paged, cores = shown["results"]
    assert "0 bytes for the KV cache" in paged["refused"]
    assert cores["requests"] == 6
    with pytest.raises(ConfigurationError, match=r"no policy serves on platform nelssa-h100: paged: .* 0 bytes"):
        run(capsys, platform="nelssa-h100", overrides=room)


def test_prompts_that_come_from_elsewhere_leave_the_gpu_to_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    long: dict[str, Any] = {"requests": 12, "short": "300:40", "long": "40000:4", "long_share": 0.3, "rate": 8.0}
    here, elsewhere = run(capsys, **long), run(capsys, **long, prefill_workers=4)
    assert elsewhere["itl_ms"]["p99"] < here["itl_ms"]["p99"]


def test_an_invalid_run_ends_with_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tierloop.devices.site import Site

    made = Site.__init__

    def late(self: Site, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self.invalid.append("a command was late")

    monkeypatch.setattr(Site, "__init__", late)
    with pytest.raises(typer.Exit) as end:
        run(capsys)
    assert end.value.exit_code == 3


# -- real models ----------------------------------------------------------------------------------------------------


def test_a_real_model_is_served_on_real_bytes(run_cli: RunCli, tiny_folder: Path) -> None:
    common = ("serve-bench", "--real", "--model", str(tiny_folder), "--requests", "3", "--short", "40-60:5", "--json")
    code, out, err = run_cli(*common, "--policy", "paged", "--policy", "cpu-attention")
    assert code == 0, err
    shown = json.loads(out)
    paged, cores = ([each["tokens"] for each in result["served"]] for result in shown["results"])
    assert paged == cores
    assert [len(tokens) for tokens in paged] == [5, 5, 5]
    assert len(set(map(tuple, paged))) > 1, "prompts differ"
    assert shown["results"][0]["provenance"] == "simulated"
    assert shown["manifest"]["config"]["real"]


def test_turns_and_pauses_are_served(run_cli: RunCli, tiny_folder: Path) -> None:
    common = ("serve-bench", "--real", "--model", str(tiny_folder), "--requests", "2", "--short", "40:4", "--json")
    code, out, err = run_cli(*common, "--turns", "3", "--think", "0.5")
    assert code == 0, err
    for each in json.loads(out)["served"]:
        asked, ended = [t["asked_ns"] for t in each["turns"]], [t["ended_ns"] for t in each["turns"]]
        assert [a - b for a, b in zip(asked[1:], ended, strict=False)] == [SECOND // 2] * 2


# -- the requests ---------------------------------------------------------------------------------------------------


def test_requests_are_saved_and_served_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    first = run(capsys, save_trace=file, requests=5, turns=2, think=0.1)
    serve_bench(trace=file, as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again["served"] == first["served"]
    assert again["manifest"]["config"]["traffic"]["trace"] == "saved.jsonl"
    serve_bench(trace=file, limit=2, trace_scale=0.5, as_json=True)
    fewer = json.loads(capsys.readouterr().out)
    assert [each["arrived_ns"] for each in fewer["served"]] == [
        round(each["arrived_ns"] / 2) for each in first["served"][:2]
    ]


def test_the_defaults_are_short_requests_and_a_few_long_ones() -> None:
    arrivals = Traffic().arrivals(PHANTOM, 0)
    kinds = Counter(each.kind for each in arrivals)
    assert len(arrivals) == 64
    assert 0 < kinds["long"] < 10
    assert {(each.kind, each.prompt_tokens, each.turns[0].output_tokens) for each in arrivals} == {
        ("short", 500, 50),
        ("long", 96_000, 200),
    }
    assert {each.kind for each in Traffic().arrivals(REAL, 0)} == {"short"}


def test_long_requests_have_a_stream_of_their_own() -> None:
    arrivals = Traffic(requests=20, rate=2.0, long_every=10.0, long_requests=3).arrivals(PHANTOM, 0)
    assert [each.at_ns for each in arrivals if each.kind == "long"] == [0, 10 * SECOND, 20 * SECOND]
    assert sum(each.kind == "short" for each in arrivals) == 20
    without = Traffic(requests=20, rate=2.0, long_share=0.0).arrivals(PHANTOM, 0)
    assert [each.at_ns for each in arrivals if each.kind == "short"] == [each.at_ns for each in without]


def test_bursts_come_together() -> None:
    arrivals = Traffic(requests=7, bursts=5.0, burst_size=3).arrivals(PHANTOM, 0)
    assert [each.at_ns // SECOND for each in arrivals] == [0, 0, 0, 5, 5, 5, 10]


@given(st.integers(1, 10**6), st.integers(0, 10**5), st.integers(1, 10**4), st.floats(0, 3).map(lambda x: round(x, 3)))
def test_lengths_are_what_their_text_says(least: int, more: int, output: int, sigma: float) -> None:
    made = lengths("--short", f"{least}-{least + more}:{output}", "short")
    assert (made.prompt.at(0.0), made.prompt.at(1 - 2**-53)) == (least, least + more)
    assert made.output.at(0.3) == output
    assert lengths("--short", f"{least}~{sigma}:1", "short").prompt.at(0.5) == least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ["stream-offload"]}, "policy stream-offload cannot serve"),
        ({"policy": ["pagd"]}, "unknown policy 'pagd'"),
        ({"option": ["paged.water=1"]}, "policy paged has no option 'water'"),
        ({"option": ["paged.watermark=2"]}, "paged: watermark is 2"),
        ({"option": ["all-gpu.x=2"]}, "policy 'all-gpu' is not among paged"),
        ({"model": "llama-3-8b-1048"}, "no shape of that name is known; did you mean"),
        ({"platform": "nelsa"}, "unknown platform 'nelsa'"),
        ({"platform": "demo-host"}, "cannot run on a virtual clock"),
        ({"overrides": ["devices.gqu.capacity=1"]}, "'gpu'"),
        ({"clock": "wall"}, "--clock and --dilation: shapes take virtual time"),
        ({"locality": "nowhere.json"}, "nowhere.json: no locality model"),
        ({"rate": 0.0}, "the rate is 0.0 requests/s"),
        ({"rate": float("nan")}, "the rate is nan"),
        ({"rate": 2.0, "bursts": 1.0}, "--rate and --bursts"),
        ({"burst_size": 2}, "--burst-size: needs --bursts"),
        ({"bursts": -1.0}, "--bursts -1.0: must be from 0"),
        ({"long_share": 1.5}, "--long-share 1.5"),
        ({"long_every": 1.0}, "--long-share and --long-every"),
        ({"long_requests": 2}, "--long-requests: needs --long-every"),
        ({"short": "500"}, "--short '500': PROMPT:OUTPUT is needed"),
        ({"short": "many:5"}, "--short: a length is a number of tokens"),
        ({"short": "5-1:5"}, "the least must not be above the most"),
        ({"short": "0:5"}, "is 0 tokens"),
        ({"long": "99999999999:1", "long_share": 0.5}, "--long: a length is a number"),
        ({"turns": 2000}, "turns are 2000"),
        ({"think": float("inf")}, "--think inf"),
        ({"limit": 3}, "--limit: is of a recorded trace"),
        ({"sort": True}, "--sort: is of a recorded trace"),
        ({"trace": Path("nowhere.jsonl")}, "--requests and --trace"),
        ({"max_batch": 10, "step_tokens": 5}, "step_tokens is 5; it must be at least max_batch"),
        ({"preemption": "kill"}, "preemption is 'kill'"),
        ({"recomputes": 1001}, "recomputes is 1001; it must be a whole number from 0 to 1,000"),
        ({"utilisation": 1.5}, "utilisation is 1.5"),
        ({"block_tokens": 100}, "block_tokens 100"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4'"),
        ({"weight_dtype": "int4"}, "weight_dtype 'int4'"),
        ({"layers": 1}, "1 layers are to stand for 32"),
        ({"ttft_limit_ms": 0.0}, "the limit of ttft_ms is 0.0"),
    ],
)
def test_wrong_input_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        serve_bench(**(FEW | options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trace of requests"),
        ('{"timestamp": 5, "input_length": 3, "output_length": 2}\n{"timestamp": 1, "input_length": 3}', "line 2"),
        ('{"timestamp": -5, "input_length": 3, "output_length": 2}', "line 1"),
        ('{"timestamp": 5, "input_length": 0, "output_length": 2}', "line 1"),
        ("Timestamp,Request tokens,Response tokens\n5,3,2\n4,3,2", "line 3"),
    ],
)
def test_a_trace_that_is_wrong_ends_with_2_and_names_the_line(
    run_cli: RunCli, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    code, out, err = run_cli("serve-bench", "--trace", str(file))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_trace_whose_times_fall_is_sorted_on_request(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("Timestamp,Request tokens,Response tokens\n5,30,2\n4,40,2\n")
    code, out, err = run_cli("serve-bench", "--trace", str(file), "--sort", "--json")
    assert code == 0, err
    assert [(each["arrived_ns"], each["prompt_tokens"]) for each in json.loads(out)["served"]] == [
        (0, 40),
        (SECOND, 30),
    ]


def test_a_saved_trace_is_whole_or_not_there(run_cli: RunCli, tmp_path: Path) -> None:
    code, out, err = run_cli("serve-bench", "--save-trace", "/proc/nowhere/trace")
    assert (code, out) == (2, "")
    assert "/proc/nowhere" in err
    file = tmp_path / "trace"
    code, _, err = run_cli("serve-bench", "--requests", "3", "--long-share", "0", "--save-trace", str(file))
    assert code == 0, err
    assert len(read(file)) == 3
