"""What the kernels are meant to reach, case by case. The bench shows whether they do, and does not fail if not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SDPA = {"float32": (8, 2), "bfloat16": (20, 4), "float16": (40, 10)}
"""Times as fast as torch's attention: with enable_gqa, and with the group as query length."""


class Target(NamedTuple):
    """A column and the number that it should not fall below, or, with `at_most`, not exceed."""

    column: str
    wanted: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{self.column} {'≤' if self.at_most else '≥'} {self.wanted:g}"

    def met(self, row: Mapping[str, object]) -> bool:
        """Whether the row reaches it; a column that is missing is not reached."""
        value = row.get(self.column)
        if not isinstance(value, (int, float)):
            return False
        return value <= self.wanted if self.at_most else value >= self.wanted


def targets(kernel: str, dtype: str | None, group: int | None) -> list[Target]:
    """The targets of a case; none for most."""
    if kernel in ("score mean", "score minmax"):
        return [Target("read_fraction", 0.8)]
    if kernel == "topk":
        return [Target("time_us", 80, at_most=True)]
    if kernel == "cluster":
        return [Target("prefill_share", 0.02, at_most=True)]
    if kernel == "attend rows":
        return [Target("ratio_gather", 2)]
    if not kernel.startswith("attend"):
        return []
    found = []
    if group == 1 and dtype in SDPA:
        found.append(Target("read_fraction", 0.85 if dtype == "float32" else 0.75))
    if group in (4, 8):
        found.append(Target("roofline_fraction", 0.75 if group == 4 else 0.6))
    if kernel == "attend" and group != 1 and dtype in SDPA:
        gqa, reshaped = SDPA[dtype]
        found += [Target("ratio_torch_sdpa_gqa", gqa), Target("ratio_torch_sdpa_reshaped", reshaped)]
    return found
