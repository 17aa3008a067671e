"""Decisions: what a policy learns from the devices and acts upon, in one place.

Who calls this: policies, through `Engine.decide`. Nothing else that depends on computed values may change what a policy
submits. So a run whose decisions are recorded can be replayed without its bytes, and takes exactly as long; and a run
that never had bytes can be given decisions by a model of locality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Question:
    """Which candidates of each list are chosen? One list for each request and KV head, in that order.

    An answer is int64 (lists, k): indices of candidates, best first, −1 where a list is shorter than k. Candidate c of
    a list stands for the `unit` token positions from first + c · unit on.
    """

    label: str
    layer: int
    requests: tuple[str, ...]
    """Names of the requests of the batch."""
    step: int
    """Position of the first new token of the first request."""
    lengths: Int64
    """Candidates of each list."""
    first: Int64
    """Position of candidate 0 of each list."""
    unit: int
    k: int


@dataclass(frozen=True)
class Grouping:
    """Which group does each candidate of a list belong to? One list for each KV head of one request.

    Labels are int64 (lists, candidates), each from 0 to below `groups`. A list may leave groups empty.
    """

    label: str
    layer: int
    request: str
    step: int
    """Tokens that the request's layer holds when it is grouped."""
    lists: int
    candidates: int
    groups: int


class Decisions(Protocol):
    """Who answers; the default takes what was read."""

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """The answer; `read` is that of the devices, None in a phantom run."""

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """The labels; `read` are those of the devices, None in a phantom run."""


class AsRead:
    """Decisions of a run with real bytes: the devices' own."""

    def answer(self, question: Question, read: Int64 | None) -> Int64:
        """What was read. Raises RuntimeError in a phantom run, which has to be given decisions."""
        if read is None:
            raise RuntimeError(f"{question.label} of layer {question.layer}: a phantom run needs decisions")
        return read

    def group(self, grouping: Grouping, read: Int64 | None) -> Int64:
        """What was read. Raises RuntimeError in a phantom run, which has to be given decisions."""
        if read is None:
            raise RuntimeError(f"{grouping.label} of layer {grouping.layer}: a phantom run needs decisions")
        return read
