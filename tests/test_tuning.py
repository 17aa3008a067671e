"""Tuning: what is chosen on machines whose times are made up, what is tried, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.tuning import Candidates, Measured, evaluating_ns, fetching_ns, tune


class Machine:
    """Selecting takes longer with more centroids, evaluating with a larger window, fetching with a smaller one."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.ran: list[dict[str, Any]] = []

    def __call__(self, options: dict[str, Any]) -> Measured:
        self.ran.append(options)
        settings = {"centroids": 0, "window": 2.0, "micro_batch": 1} | options
        refused = self.changes.get("refuses", lambda _: None)(settings)
        if refused is not None:
            return Measured(refused=refused)
        select = self.changes.get("per_centroid", 0.1) * (settings["centroids"] or 8192)
        evaluate, fetch = 80 * settings["window"], 600 / settings["window"]
        launches = 40 / settings["micro_batch"] + 20 * settings["micro_batch"]
        total = select + max(evaluate, fetch) + launches
        stages = {"select": int(select), "evaluate": int(evaluate), "transfer": int(fetch), "gather": 7}
        return Measured(total, stages, "simulated")


SMALL = Candidates((10, 20, 40), (1, 2, 3, 4), (1, 2, 4))


def test_the_window_grows_until_evaluating_takes_as_long_as_fetching() -> None:
    machine = Machine()
    tuned = tune(machine, SMALL)
    windows = [t.options["window"] for t in tuned.trials if t.purpose == "window"]
    assert windows == [2, 3], "1 was run for the index, and 4 is not run: 3 · 80 is more than 600 / 3"
    assert tuned.options["window"] == 3
    assert any("window 3: the fastest; with 3, evaluating" in reason for reason in tuned.reasons)


def test_the_fastest_window_is_chosen_and_not_the_last() -> None:
    # 2.3: evaluating 184, fetching 261; 4: evaluating 320, fetching 150.
    tuned = tune(Machine(), Candidates((10,), (1, 2.3, 4, 8), (1,)))
    assert [t.options["window"] for t in tuned.trials if t.purpose == "window"] == [2.3, 4]
    assert tuned.options["window"] == 2.3


@pytest.mark.parametrize(("per_centroid", "chosen"), [(0.0, 40), (0.1, 40), (0.4, 20), (10.0, 10)])
def test_the_largest_index_that_is_as_fast_as_the_fastest_is_chosen(per_centroid: float, chosen: int) -> None:
    # 360 ns without the index, of which 2 % are 7: 30 more centroids take 3 at 0.1, 12 at 0.4, where 10 more take 4.
    tuned = tune(Machine(per_centroid=per_centroid), Candidates((10, 20, 40), (2,), (1,)))
    assert tuned.options["centroids"] == chosen


def test_the_fastest_micro_batch_is_chosen() -> None:
    tuned = tune(Machine(), SMALL)
    assert tuned.options["micro_batch"] == 1, "40 + 20 and 20 + 40 are the same, and 10 + 80 more"
    assert [t.options["micro_batch"] for t in tuned.trials if t.purpose == "micro_batch"] == [2, 4]


def test_nothing_is_run_twice_and_given_options_stay() -> None:
    machine = Machine()
    tuned = tune(machine, SMALL, {"budget": 0.1, "window": 1, "micro_batch": 1})
    assert len({json.dumps(options, sort_keys=True) for options in machine.ran}) == len(machine.ran)
    assert all(options["budget"] == 0.1 for options in machine.ran)
    assert tuned.options["budget"] == 0.1
    assert [t.options for t in tuned.trials] == machine.ran


def test_options_that_are_faster_than_all_that_was_tried_are_kept() -> None:
    given = {"centroids": 1, "window": 2.74, "micro_batch": 1}
    tuned = tune(Machine(), SMALL, given)
    assert tuned.options == given
    assert tuned.gain == 1
    assert tuned.reasons[-1] == "the given options are kept: nothing that was tried is faster"


def test_a_window_that_does_not_fit_ends_the_growth() -> None:
    machine = Machine(refuses=lambda o: "the GPU is too small" if o["window"] > 1.5 else None)
    tuned = tune(machine, SMALL)
    assert tuned.options["window"] == 1
    assert tuned.gain is None, "the window that the policy has anyway does not fit"
    assert any("2 cannot run: the GPU is too small" in reason for reason in tuned.reasons)
    assert 3 not in [options.get("window") for options in machine.ran]


def test_an_index_that_cannot_be_is_left_out() -> None:
    tuned = tune(Machine(refuses=lambda o: "only 25 chunks" if o["centroids"] > 25 else None), SMALL)
    assert tuned.options["centroids"] == 20


def test_where_nothing_can_run_the_reason_is_said() -> None:
    with pytest.raises(ConfigurationError, match="no centroids can run; 10: the machine is on fire"):
        tune(Machine(refuses=lambda _: "the machine is on fire"), SMALL)
    with pytest.raises(ConfigurationError, match="there are no windows to try"):
        Candidates(windows=())


def test_the_longest_stage_of_fetching_counts() -> None:
    stages = {"ssd": 5, "gather": 2, "transfer": 4, "unpack": 1, "evaluate": 3, "attend": 99}
    assert (fetching_ns(stages), evaluating_ns(stages)) == (5, 3)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([0, 10, 20]), st.sampled_from([2, 1, 3]), st.sampled_from([1, 2])),
        st.tuples(st.floats(1, 1e9), st.integers(0, 100), st.integers(0, 100)),
        min_size=18,
        max_size=18,
    )
)
def test_what_is_chosen_was_run_and_is_no_slower_than_what_was_given(
    times: dict[tuple[int, int, int], tuple[float, int, int]],
) -> None:
    def measure(options: dict[str, Any]) -> Measured:
        key = options.get("centroids", 0), options.get("window", 2), options.get("micro_batch", 1)
        ns, evaluate, transfer = times[key]
        return Measured(ns, {"evaluate": evaluate, "transfer": transfer})

    tuned = tune(measure, Candidates((10, 20), (1, 2, 3), (1, 2)))
    assert any(trial.options == tuned.options and trial.measured is tuned.measured for trial in tuned.trials)
    assert tuned.gain is not None
    assert tuned.gain >= 1


# -- the command ----------------------------------------------------------------------------------------------------

SHORT = (
    "tune", "kvdrive", "--platform", "kvdrive-l20", "--model", "llama-3-8b", "--context", "4096", "--batch", "2",
    "--steps", "1", "--warmup-steps", "1", "--option", 'persistent="none"',
)  # fmt: skip


def test_the_command_says_what_it_chose_and_all_that_it_tried(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run_cli(
        *SHORT, "--centroids", "128", "--centroids", "1000000", "--window", "1", "--window", "2", "--json"
    )
    shown = json.loads(out)
    assert code == 0
    assert shown["candidates"] == {
        "centroids": [128, 1000000],
        "windows": [1, 2],
        "micro_batches": [1, 2],
        "waves": [1, 2],
    }
    assert shown["options"]["centroids"] == 128
    assert shown["options"]["persistent"] == "none"
    assert shown["gain"] >= 1
    (refused,) = [t for t in shown["trials"] if t["measured"]["refused"]]
    assert "centroids is 1000000" in refused["measured"]["refused"]
    ran = [t["measured"] for t in shown["trials"] if t is not refused]
    assert {measured["provenance"] for measured in ran} == {"extrapolated"}
    assert all(measured["ns_per_token"] > 0 and measured["stages"]["select"] > 0 for measured in ran)
    assert shown["measured"]["ns_per_token"] == min(
        measured["ns_per_token"] for measured in ran if measured["ns_per_token"] <= ran[0]["ns_per_token"]
    )


def test_the_table_has_a_row_for_every_run(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run_cli(*SHORT, "--centroids", "128", "--window", "1", "--micro-batch", "1")
    assert code == 0
    for text in (
        "as given",
        "centroids 128: the largest within 2%",
        "window 1: the fastest",
        "micro_batch 1",
        "chosen:",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "all-gpu"), "policy all-gpu cannot be tuned: it has no centroids"),
        (("tune", "kvdrive", "--option", "budgett=1"), "did you mean 'budget'"),
        (("tune", "kvdrive", "--model", "llama-9"), "no shape of that name"),
        (("tune", "kvdrive", "--kv-dtype", "int3"), "--kv-dtype 'int3'"),
        (("tune", "kvdrive", "--locality", "nowhere.json"), "nowhere.json"),
        ((*SHORT, "--centroids", "99999"), "no centroids can run; 99999"),
    ],
)
def test_wrong_input_is_one_line(
    run_cli: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
