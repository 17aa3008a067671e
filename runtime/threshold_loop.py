"""A closed loop over NELSSA's routing threshold: what attention has cost lately, and not what was estimated before.

A layer of the near branch takes about as long whatever the length of its requests (it is communication and a small
share of the rows), while dense attention takes longer with every row. The loop keeps the mean of both and aims at the
length at which a request would cost as much on either side; a change is at most an eighth at a time, so that one slow
step does not send requests away for good. The paper leaves the loop to future work; this one is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MEMORY = 0.05
"""How much of a mean the newest observation is, once there are many."""
LARGEST_CHANGE = 1.125
LEAST_OBSERVATIONS = 8
"""Branches of each kind that have to be seen before anything is changed."""


@dataclass
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(MEMORY, 1 / self.count)


@dataclass
class ThresholdLoop:
    """Knows the mean time of a row in dense attention, and of a request in the near branch of a layer."""

    _per_row: _Mean = field(default_factory=_Mean)
    _near: _Mean = field(default_factory=_Mean)

    def learn(self, ns: int, amount: int, is_near: bool) -> None:
        """A branch of a layer took `ns`, for `amount` rows (dense) or requests (near)."""
        (self._near if is_near else self._per_row).add(ns / max(amount, 1))

    def next(self, threshold: float) -> float:
        """The threshold from now on, in tokens."""
        if min(self._per_row.count, self._near.count) < LEAST_OBSERVATIONS or not math.isfinite(threshold):
            return threshold
        wanted = self._near.value / max(self._per_row.value, 1e-9)
        return min(max(wanted, threshold / LARGEST_CHANGE), threshold * LARGEST_CHANGE)
