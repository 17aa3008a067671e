"""Busy time per stage: who marks a completion says what its time is counted as.

An observer of the platform's site. `dense` launches are counted under their label by themselves; a command that nobody
marked is not counted. Times are those of the platform's clock, not scaled back, and sums: stages that run at the same
time count both.
"""

from __future__ import annotations

from tierloop.devices.commands import Launch
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense


class StageTimes:
    """`ns` and `commands` per stage since the last `reset`."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self.commands: dict[str, int] = {}
        self._marked: dict[int, tuple[Completion, str]] = {}

    def mark(self, completion: Completion, stage: str) -> Completion:
        """Count a command under a stage when it ends; returns it."""
        if completion.done:
            self._count(completion, stage)
        else:
            self._marked[id(completion)] = completion, stage
        return completion

    def __call__(self, completion: Completion) -> None:
        """A command of the platform has ended."""
        held = self._marked.pop(id(completion), None)
        if held is not None:
            self._count(completion, held[1])
        elif isinstance(completion.command, Launch) and isinstance(completion.command.args, Dense):
            self._count(completion, completion.command.args.label)

    def reset(self) -> None:
        """Begin a new account; what is under way counts where it ends."""
        self.ns.clear()
        self.commands.clear()

    def _count(self, completion: Completion, stage: str) -> None:
        if completion.started_ns < 0:
            return
        self.ns[stage] = self.ns.get(stage, 0) + completion.ended_ns - completion.started_ns
        self.commands[stage] = self.commands.get(stage, 0) + 1
