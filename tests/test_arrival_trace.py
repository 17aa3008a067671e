"""Traces of requests from files: what is read is what was recorded, and what is wrong is named with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime import arrival_trace
from tierloop.runtime.arrival_trace import Columns, read, write
from tierloop.runtime.arrivals import LATEST_NS, MOST_TOKENS, Arrival, Turn

S = 10**9
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47]}

{"timestamp": 30535.5, "input_length": 1, "output_length": 7, "hash_ids": []}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,model-a,472,18,490,Conversation log
45,model-a,1087,230,1317,"Conversation, log"
118,GPT-4,417,276,693,Conversation log
"""
OWN = '{"format": "tierloop-arrivals", "version": 1}\n'


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def save(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return save


Save = Callable[[str | bytes], Path]


def arrivals(*given: tuple[int, int, int]) -> tuple[Arrival, ...]:
    return tuple(Arrival(f"trace-{i}", at_ns, (Turn(p, o),)) for i, (at_ns, p, o) in enumerate(given))


# -- formats --------------------------------------------------------------------------------------------------------


def test_json_lines_of_mooncake_are_in_milliseconds_from_the_first_request(saved: Save) -> None:
    assert read(saved(MOONCAKE)) == arrivals((0, 6955, 52), (3_053_000_000, 6472, 26), (3_053_500_000, 1, 7))


def test_csv_of_burstgpt_is_in_seconds_from_the_first_request(saved: Save) -> None:
    assert read(saved(BURSTGPT)) == arrivals((0, 472, 18), (40 * S, 1087, 230), (113 * S, 417, 276))


def test_csv_of_azure_has_dates_with_times_of_day(saved: Save) -> None:
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-17 18:15:50,396,109\n"
    assert read(saved(trace)) == arrivals((0, 374, 44), (86_403_319_410_000, 396, 109))


def test_dates_with_an_offset_are_the_moments_that_they_name(saved: Save) -> None:
    trace = "timestamp,prompt_tokens,output_tokens\n2024-05-10 00:00:01+00:00,1,1\n2024-05-10 02:00:02+02:00,1,1\n"
    assert [a.at_ns for a in read(saved(trace))] == [0, S]


def test_columns_and_unit_may_be_named(saved: Save) -> None:
    trace = "when, in ,out,timestamp\n1000,3,4,9\n1500.5,5,6.0,8\n"
    columns = Columns(time="When", prompt="in", output="out", unit="us")
    assert read(saved(trace), columns=columns, name="mine") == tuple(
        replace(a, name=f"mine-{i}") for i, a in enumerate(arrivals((0, 3, 4), (500_500, 5, 6)))
    )


def test_fields_of_json_lines_may_be_named_too(saved: Save) -> None:
    trace = '{"t": 1, "in": 3, "out": 4}\n{"t": 2.5, "in": 5, "out": 6}\n'
    columns = Columns("t", "in", "out", "s")
    assert read(saved(trace), columns=columns) == arrivals((0, 3, 4), (1_500_000_000, 5, 6))


@pytest.mark.parametrize("change", [lambda s: "\ufeff" + s, lambda s: s.replace("\n", "\r\n"), lambda s: s.rstrip()])
@pytest.mark.parametrize("content", [MOONCAKE, BURSTGPT])
def test_marks_and_ends_of_lines_change_nothing(saved: Save, content: str, change: Callable[[str], str]) -> None:
    wanted = read(saved(content))
    assert read(saved(change(content))) == wanted


names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12)
turns = st.builds(Turn, st.integers(1, 9999), st.integers(1, 9999), st.integers(0, LATEST_NS))


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    given = []
    times = sorted(draw(st.lists(st.integers(0, LATEST_NS), min_size=1, max_size=6)))
    for at_ns, name in zip(times, draw(st.sets(names, min_size=6, max_size=6)), strict=False):
        first, *more = draw(st.lists(turns, min_size=1, max_size=3))
        prompt = draw(st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
        first = Turn(len(prompt) if prompt else first.prompt_tokens, first.output_tokens)
        given.append(Arrival(name, at_ns, (first, *more), tuple(prompt) if prompt else None, draw(st.just("") | names)))
    return given


@given(workloads())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, given: list[Arrival]) -> None:
    path = tmp_path_factory.mktemp("written") / "trace.jsonl"
    write(path, given)
    assert read(path) == tuple(given)


def test_a_golden_file_of_our_own_is_read_for_ever(saved: Save) -> None:
    line = '{"name": "chat", "at_ns": 7, "turns": [{"prompt_tokens": 2, "output_tokens": 3}, '
    line += '{"prompt_tokens": 4, "output_tokens": 5, "after_ns": 6}], "kind": "short", "tokens": [1, 9]}\n'
    wanted = Arrival("chat", 7, (Turn(2, 3), Turn(4, 5, 6)), (1, 9), "short")
    path = saved(OWN + line)
    assert read(path) == (wanted,)
    write(path, [wanted])
    assert path.read_text() == OWN + line


# -- limit, scale, order --------------------------------------------------------------------------------------------


def test_a_limit_takes_the_first_and_looks_at_no_line_beyond(saved: Save) -> None:
    assert read(saved(BURSTGPT + "not a request\n"), limit=2) == arrivals((0, 472, 18), (40 * S, 1087, 230))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6).map(sorted), st.floats(1e-3, 1e3))
def test_scaled_times_are_the_exact_product_rounded(
    tmp_path_factory: pytest.TempPathFactory, times_ms: list[int], scale: float
) -> None:
    path = tmp_path_factory.mktemp("scaled") / "trace.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": {t}, "input_length": 1, "output_length": 1}}\n' for t in times_ms), encoding="ascii"
    )
    wanted = [round(Fraction(scale) * (t - times_ms[0]) * 10**6) for t in times_ms]
    assert [a.at_ns for a in read(path, scale=scale)] == wanted


def test_pauses_between_turns_are_scaled_with_the_arrivals(tmp_path: Path) -> None:
    write(tmp_path / "t", [Arrival("a", 100, (Turn(1, 1), Turn(1, 1, 40)))])
    assert read(tmp_path / "t", scale=0.5) == (Arrival("a", 50, (Turn(1, 1), Turn(1, 1, 20))),)


def test_falling_times_are_refused_with_their_line_and_taken_with_sort(saved: Save) -> None:
    path = saved("Timestamp,Request tokens,Response tokens\n9,1,1\n3,2,2\n9,3,3\n")
    with pytest.raises(ConfigurationError, match=r"line 3: it comes 6 s before .* sort=True"):
        read(path)
    assert [(a.name, a.at_ns, a.prompt_tokens) for a in read(path, sort=True)] == [
        ("trace-1", 0, 2), ("trace-0", 6 * S, 1), ("trace-2", 6 * S, 3)
    ]  # fmt: skip


def test_requests_without_tokens_are_refused_with_their_line_and_left_out_if_asked(saved: Save) -> None:
    path = saved(BURSTGPT + "120,GPT-4,100,0,100,API log\n121,GPT-4,0,0,0,API log\n122,GPT-4,7,8,15,API log\n")
    with pytest.raises(ConfigurationError, match=r"line 5: prompt and output are 100 and 0 tokens.*skip_empty=True"):
        read(path)
    assert [a.prompt_tokens for a in read(path, skip_empty=True)] == [472, 1087, 417, 7]


@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=20))
def test_the_same_requests_are_read_from_each_format(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("same")
    lines = [json.dumps({"timestamp": t, "input_length": p, "output_length": o}) for t, p, o in given]
    (folder / "lines").write_text("\n".join(lines))
    rows = [f"{t / 1000},{o},{p}" for t, p, o in given]
    (folder / "rows").write_text("\n".join(["Timestamp,Response tokens,Request tokens", *rows]))
    begin = datetime(2023, 11, 16, 23, 59, 59)
    dated = [f"{begin + timedelta(milliseconds=t)},{p},{o}" for t, p, o in given]
    (folder / "dates").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *dated]))
    one, *others = (read(folder / name, sort=True) for name in ("lines", "rows", "dates"))
    assert others == [one, one]
    assert one[0].at_ns == 0
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(one))


# -- what is refused ------------------------------------------------------------------------------------------------


def mooncake(**changed: Any) -> str:
    return MOONCAKE + json.dumps({"timestamp": 99_999, "input_length": 5, "output_length": 6} | changed)


def own(**changed: Any) -> str:
    return OWN + json.dumps({"name": "a", "at_ns": 0, "turns": [{"prompt_tokens": 1, "output_tokens": 1}]} | changed)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no trace of requests: there is nothing in it"),
        ("\n  \n", "line 2: there is nothing in it"),
        (b"\xff\xfeT\x00", r"line 1: it is not UTF-8 \(byte 0\)"),
        (MOONCAKE.encode() + b"\xc3(\n", "line 5: it is not UTF-8"),
        (MOONCAKE + "{", "line 5: it is not JSON"),
        (MOONCAKE + "[1]", "line 5: it is not a JSON object"),
        (MOONCAKE + '{"a": ' + "[" * 100_000, "line 5: it is not JSON"),
        (mooncake(timestamp=float("nan")), "line 5: it is not JSON: NaN is not a number"),
        (mooncake(timestamp=float("inf")), "Infinity is not a number"),
        (mooncake(timestamp=-1), "line 5: the time is -1; it must be from 0"),
        (mooncake(timestamp=10**20), "the time is 1000"),
        (MOONCAKE + '{"timestamp": 1e999999999, "input_length": 1, "output_length": 1}', "line 5: the time"),
        (MOONCAKE + f'{{"timestamp": 1{"0" * 5000}, "input_length": 1}}', "line 5: it is not JSON"),
        (mooncake(timestamp=None), "the time is None; it must be a number"),
        (mooncake(timestamp=True), "the time is True; it must be a number"),
        (mooncake(timestamp="soon"), "the time 'soon' is neither a number nor a date"),
        (mooncake(input_length=1.5), "the prompt is '1.5' tokens; it must be a whole number"),
        (mooncake(input_length=-4), "the prompt is -4 tokens"),
        (mooncake(output_length=MOST_TOKENS + 1), "the output is 16777217 tokens"),
        (mooncake(input_length=MOST_TOKENS), "the request has 16,777,222 tokens"),
        (mooncake(input_length=[3]), r"the prompt is \[3\]; it must be a number"),
        (mooncake(output_length=0), "skip_empty=True"),
        (mooncake(input_tokens=4), "there must be one field for the prompt .* and there are 2"),
        (
            MOONCAKE + '{"timestamp": 99999, "input_length": 5}',
            "line 5: there must be one field for the output .* and there are 0",
        ),
        ("a,b\n1,2\n", "line 1: there must be one field for the time .* and there are 0 among 'a', 'b'"),
        (BURSTGPT + "200,GPT-4,1,2\n", "line 5: it has 4 cells; the header has 6"),
        (BURSTGPT + "nan,GPT-4,1,2,3,x\n", "line 5: the time 'nan' is neither"),
        (BURSTGPT + "1_000,GPT-4,1,2,3,x\n", "line 5: the time '1_000' is neither"),
        (BURSTGPT + "200,GPT-4,,2,3,x\n", "line 5: the prompt is ''; it must be a number"),
        (BURSTGPT + '200,"GPT-4,1,2,3,x\n', "line 5: it is not CSV"),
        (BURSTGPT.splitlines()[0], "line 1: there is no request"),
        ("Timestamp,Request tokens,Response tokens\n1960-01-01,1,1\n", "line 2: the time is '1960-01-01'"),
        (OWN, "line 1: there is no request"),
        ('{"format": "tierloop-arrivals", "version": 2}\n', "line 1: it does not say tierloop-arrivals, version 1"),
        (own(name=5), "line 2: name of a request is 5; it must be of type str"),
        (own(name=""), "line 2: a request at 0 ns has a name of 0 characters"),
        (own(at_ns=0.5), "at_ns of a request is '0.5'; it must be of type int"),
        (own(at_ns=-1), "line 2: the arrival of a is -1 ns"),
        (own(turns=[]), "line 2: a has 0 turns"),
        (own(turns=[7]), "a turn is 7; it must be an object"),
        (own(turns=[{"prompt_tokens": 1}]), "a turn has no field 'output_tokens'"),
        (own(turns=[{"prompt_tokens": 1, "output_tokens": True}]), "output_tokens of a turn is True"),
        (own(turns=[{"prompt_tokens": 1, "output_tokens": 0}]), "the output of turn 0 is 0 tokens"),
        (own(priority=1), "a request has the field 'priority'; its fields are name, at_ns, turns, kind, tokens"),
        (own(tokens=[-1]), "tokens are not all whole numbers"),
        (own(tokens=[1, 2]), "brings 2 tokens for a prompt of 1"),
        (own() + own()[len(OWN) - 1 :], "line 3: there is another request named 'a'"),
        (own(at_ns=5) + own(name="b")[len(OWN) - 1 :], "line 3: it comes 5e-09 s before"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(saved: Save, content: str | bytes, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read(saved(content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none: no trace of requests: No such file"):
        read(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="no trace of requests: Is a directory"):
        read(tmp_path)


def test_a_folder_that_is_not_there_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the trace cannot be written: No such file"):
        write(tmp_path / "none" / "trace", arrivals((0, 1, 1)))


def test_more_requests_than_allowed_are_refused_with_the_line(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_trace, "MOST_REQUESTS", 2)
    path = saved(BURSTGPT)
    with pytest.raises(ConfigurationError, match=r"line 4: there are more than 2 requests; limit=N"):
        read(path)
    assert len(read(path, limit=2)) == 2


def test_a_line_without_end_is_refused(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_trace, "LONGEST_LINE", 200)
    with pytest.raises(ConfigurationError, match="line 5: it is longer than 200 bytes"):
        read(saved(mooncake(hash_ids=list(range(100)))))
    with pytest.raises(ConfigurationError, match="a request takes"):
        write(saved(""), [Arrival("a", 0, (Turn(100, 1),), tuple(range(100)))])


def test_scaling_a_time_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", [Arrival("a", LATEST_NS, (Turn(1, 1),))])
    with pytest.raises(ConfigurationError, match="the arrival of a is"):
        read(tmp_path / "t", scale=1.5)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 1e7])
def test_a_scale_that_is_none_is_refused(saved: Save, scale: float) -> None:
    with pytest.raises(ConfigurationError, match="the scale of times is"):
        read(saved(MOONCAKE), scale=scale)


def test_a_limit_or_a_unit_that_is_none_is_refused(saved: Save) -> None:
    with pytest.raises(ConfigurationError, match="the limit is 0 requests"):
        read(saved(MOONCAKE), limit=0)
    with pytest.raises(ConfigurationError, match="the unit of times is 'h'"):
        read(saved(MOONCAKE), columns=Columns(unit="h"))  # type: ignore[arg-type]


@given(st.binary(max_size=200) | st.text('{}[]",:0123456789.-eE\n timestampinput_length', max_size=120))
def test_a_file_of_anything_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes | str) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=str(path)):
        read(path)
