"""`tierloop phantom`: what it prints, what it takes from a record, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.phantom_runs import record
from tests.tiny import tiny_workload
from tierloop.devices.errors import ConfigurationError
from tierloop.tools.phantom import phantom

SMALL = str(Path(__file__).parent / "platforms" / "small.toml")


def run(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    phantom(**options, as_json=True)
    return dict(json.loads(capsys.readouterr().out))


def test_a_model_that_is_not_here_is_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, model="opt-1.3b", policy="cpu-attention", context=4096, batch=2, steps=2)
    assert (shown["model"], shown["prompt_tokens"], shown["steps"]) == ("opt-1.3b", [4096, 4096], 2)
    assert len(shown["result"]["step_ns"]) == 2
    assert shown["result"]["provenance"] == "extrapolated"
    assert shown["result"]["stages"]["mlp"] > shown["result"]["stages"]["qkv"] > 0
    assert shown["result"]["devices"]["emu:dram"]["bytes_read"] >= 2 * 2 * 4096 * 196_608
    assert "at most" not in " ".join(shown["result"]["notes"]), "an exact policy asks no locality model"
    assert shown["manifest"]["config"]["policy"] == "cpu-attention"


def test_a_table_names_the_time_the_stages_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    room = ["devices.gpu.capacity=1e9"]
    phantom(model="smollm2-135m", platform="demo", policy="topk-blocks", context=1024, steps=1, overrides=room)
    shown = capsys.readouterr().out
    for text in ("smollm2-135m, 1 × 1,024 prompt tokens, topk-blocks", "simulated", "qkv", "link pcie", "locality"):
        assert text in shown


def test_selections_come_from_a_score_trace_where_the_locality_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    room: dict[str, Any] = {"platform": "demo", "overrides": ["devices.gpu.capacity=1e9"], "context": 1024, "steps": 2}
    shown = run(capsys, model="smollm2-135m", policy="topk-blocks", locality="kvdrive-draw", **room)
    assert shown["selection"] == "score trace kvdrive-draw"
    assert shown["result"]["provenance"] == "extrapolated"
    assert any("scores that rest on rates of recovery" in note for note in shown["result"]["notes"])
    again = run(capsys, model="smollm2-135m", policy="topk-blocks", locality="kvdrive-draw", **room)
    assert again["result"]["step_ns"] == shown["result"]["step_ns"]


def test_a_record_says_all_that_is_not_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorded = record("topk-blocks", [tiny_workload(210).token_ids], 4, budget=0.4)
    file = tmp_path / "run.npz"
    recorded.selection.save(file)
    shown = run(capsys, selection=file, platform=SMALL)
    assert shown["result"]["step_ns"] == list(recorded.step_ns)
    assert shown["options"] == {"budget": 0.4}
    later = run(capsys, selection=file, platform=SMALL, warmup_steps=1)
    assert later["result"]["step_ns"] == list(recorded.step_ns[1:])
    for changes, message in (
        ({"model": "llama-3-8b"}, "model: llama-3-8b is asked for, tiny is recorded"),
        ({"policy": "all-gpu"}, "policy: all-gpu is asked for"),
        ({"option": ["topk-blocks.budget=0.5"]}, "options"),
        ({"context": 100}, r"prompt tokens: \[100\] is asked for, \[210\]"),
        ({"kv_dtype": "int8"}, "shape: dtype: int8 is asked for"),
        ({"block_tokens": 64}, "shape: block_tokens: 64 is asked for"),
        ({"steps": 9}, "has 4 steps; 9 are asked for"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            phantom(selection=file, platform=SMALL, **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "llama-3"}, "no shape of that name is known; did you mean"),
        ({"selection": Path("a.npz"), "locality": "b"}, "a selection comes from one of them"),
        ({"selection": Path("nowhere.npz")}, "nowhere.npz: no recorded selection: there is no such file"),
        ({"locality": "nowhere.json"}, "nowhere.json: no locality model"),
        ({"kv_dtype": "int4"}, "--kv-dtype 'int4'"),
        ({"weight_dtype": "int4"}, "--weight-dtype 'int4'"),
        ({"context": 1 << 25}, "the context is 33554432"),
        ({"block_tokens": 100}, "block_tokens 100 must be a positive multiple"),
        ({"policy": "all-gpu", "context": 1 << 22}, "all-gpu on hybridgen-a100-cxl: emu:gpu is too small"),
        ({"model": "smollm2-135m", "platform": "demo"}, "269,030,016 bytes of weights are needed there"),
        ({"platform": "demo-host"}, "cannot run on a virtual clock"),
        ({"policy": "hybridge"}, "unknown policy 'hybridge'"),
    ],
)
def test_wrong_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        phantom(**options)
