"""What has reached each tier: writes counted where they arrive, against the blocks that were to lie there.

Who calls this: whoever runs a policy puts a `TierWrites` among the observers of the platform before anything is placed,
and asks it at the end. Placing is counted where room is handed out (`Engine.blocks_placed`), writing where a command
has ended well, so a tier that is configured, accounted and never written shows as two numbers that do not agree:

- a *failure*, where at least `ENOUGH` blocks were placed on a memory and no command has ever written to it;
- a *remark*, where a policy was told to keep rows on a memory (`Policy.tiers`), at least `ENOUGH` blocks were placed in
  all, and none of them came there. A prompt that is short enough leaves tiers empty, so this alone is no failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tierloop.devices.completion import Completion

ENOUGH = 16
"""Blocks that are placed before a tier that nothing has reached is talked about."""


@dataclass(frozen=True)
class TierUse:
    """One memory: blocks that a policy has taken room for, commands that have written there, and their bytes."""

    blocks_placed: int = 0
    writes: int = 0
    bytes_written: int = 0


class TierWrites:
    """An observer of completions: who was written to, from when it was made."""

    def __init__(self) -> None:
        self._writes: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def __call__(self, completion: Completion) -> None:
        """One command has ended."""
        written = completion.traffic.written
        if written and completion.error is None:
            for memory, nbytes in written.items():
                self._writes[memory] += 1
                self._nbytes[memory] += nbytes

    def use(self, blocks_placed: Mapping[str, int]) -> dict[str, TierUse]:
        """Of every memory that has blocks or was written to, by name."""
        return {
            memory: TierUse(blocks_placed.get(memory, 0), self._writes[memory], self._nbytes[memory])
            for memory in sorted(blocks_placed.keys() | self._nbytes.keys())
        }


def unreached(use: Mapping[str, TierUse]) -> tuple[str, ...]:
    """Failures: memories that hold blocks by the account, and not one byte."""
    return tuple(
        f"nothing has reached {memory}: {tier.blocks_placed:,} blocks were placed there, no command has written to it"
        for memory, tier in use.items()
        if tier.blocks_placed >= ENOUGH and not tier.bytes_written
    )


def left_empty(use: Mapping[str, TierUse], tiers: Iterable[str]) -> list[str]:
    """Remarks: memories that a policy was told to keep rows on, and where none came."""
    placed = sum(tier.blocks_placed for tier in use.values())
    nothing = TierUse()
    return [
        f"NOTHING HAS REACHED {memory}: the policy was told to keep rows there; {placed:,} blocks were placed elsewhere"
        for memory in dict.fromkeys(tiers)
        if placed >= ENOUGH and use.get(memory, nothing) == nothing
    ]
