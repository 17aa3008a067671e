"""What a policy's own code costs a decode step, against the step's numerics: one figure for each policy.

The same decode twice: on real bytes, and replayed without them. The replay does everything but numerics, so the
difference of a step is the numerics; what is left of the replay without the cost of emulating its commands, measured in
the same run, is the decoder's and the policy's own. Of a policy with windows, what keeping those takes is measured
apart: the recorded rankings are played through them again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.platform import Platform

if TYPE_CHECKING:
    from tierloop.runtime.models import Model
    from tierloop.runtime.prefill import Dense as DenseRun
    from tierloop.runtime.selection import SelectionRecord
    from tierloop.runtime.workloads import Workload

POLICIES = ("cpu-attention", "topk-blocks", "hybridgen", "kvdrive")
PLATFORM = "hybridgen-a100-cxl"
SHARE_LIMIT = 0.1
WINDOW_LIMIT = 0.05
WINDOWED = "kvdrive"


@dataclass(frozen=True)
class PolicyCost:
    """ns of a step: a policy's own code, the numerics, and keeping its windows (0: it has none); commands of a step."""

    own_ns: float
    numerics_ns: float
    commands: int
    windows_ns: float = 0.0


class _Ends:
    """When each step ended, on this machine's clock: an observer of a platform."""

    def __init__(self) -> None:
        self._times: list[int] = []

    def __call__(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Launch) and isinstance(command.args, Dense) and command.args.label == "head":
            self._times.append(time.perf_counter_ns())

    def best_ns(self) -> float:
        """The shortest step; the first, which lies behind the placement, is not one."""
        return float(min(b - a for a, b in zip(self._times, self._times[1:], strict=False)))


def policy_costs(
    model: Model,
    workload: Workload,
    dense: DenseRun,
    num_tokens: int,
    command_ns: float,
    policies: Sequence[str] = POLICIES,
) -> dict[str, PolicyCost]:
    """By policy, each the best of its steps."""
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.compare import PolicyRequest, compare
    from tierloop.runtime.phantom import run_phantom
    from tierloop.runtime.selection import ReplayedSelection

    found = {}
    for name in policies:
        real, replayed = _Ends(), _Ends()
        selections: list[SelectionRecord] = []

        def fresh(_: PolicyRequest, ends: _Ends = real) -> Platform:
            platform = open_platform(PLATFORM, clock="virtual")
            platform.site.observers.append(ends)
            return platform

        wanted = PolicyRequest(name)
        compare(
            model,
            workload,
            fresh,
            [wanted],
            num_tokens=num_tokens,
            oracle=False,
            dense=dense,
            selections=selections,
        )
        origin = selections[0].origin
        assert origin.stages is not None, "a recorded run says what its stages cost"
        with fresh(wanted, replayed) as platform:
            result = run_phantom(
                origin.stages,
                origin.shape,
                platform,
                wanted,
                context=origin.prompt_tokens,
                steps=origin.steps,
                decisions=ReplayedSelection(selections[0]),
                model=origin.model,
            )
        commands = sum(use.commands for use in result.devices.values()) // origin.steps
        own = max(replayed.best_ns() - commands * command_ns, 0.0)
        windows = _windows_ns(selections[0]) if name == WINDOWED else 0.0
        found[name] = PolicyCost(own, max(real.best_ns() - replayed.best_ns(), 1.0), commands, windows)
    return found


def _windows_ns(record: SelectionRecord) -> float:
    """ns of the shortest step of what the windows of a recorded run do: what is missing, admit it, evict."""
    import numpy as np

    from tierloop.runtime.recorded_trace import recorded_trace
    from tierloop.runtime.windows import Windows
    from tierloop.tools.window_sizes import recorded_k

    trace = recorded_trace(record)
    layers, heads, _ = trace[0].shape
    k = recorded_k(record.origin)
    most = 1 + max(int(step.max()) for step in trace)
    best = float("inf")
    for _ in range(3):
        windows = Windows(layers, heads, most, np.full((layers, heads), 2 * k, dtype=np.int64), "la")
        for number, step in enumerate(trace):
            ranked = [np.ascontiguousarray(step[layer]) for layer in range(layers)]
            begun = time.perf_counter_ns()
            for layer in range(layers):
                of, entries = windows.missing(layer, ranked[layer][:, :k])
                windows.admit(layer, of, entries, entries, number)
                windows.evict(layer, ranked[layer], k, number)
            best = min(best, time.perf_counter_ns() - begun)
    return best
