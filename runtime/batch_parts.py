"""Some requests of a batch as a batch of its own: its segments are spans of the whole one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.policy import Batch


def part_of(batch: Batch, which: Sequence[int]) -> Batch:
    """Some requests of a batch, by their numbers, as a batch."""
    if list(which) == list(range(len(batch.requests))):
        return batch
    n = len(batch.requests)

    def some(segment: Segment) -> Segment:
        size = segment.spans.nbytes // n
        return Segment(segment.region, Spans.equal(np.array([offset_of(segment, i, size) for i in which]), size))

    return replace(
        batch,
        requests=[batch.requests[i] for i in which],
        positions=batch.positions[list(which)],
        queries=some(batch.queries),
        new_keys=some(batch.new_keys),
        new_values=some(batch.new_values),
        output=some(batch.output),
        attended=[None] * len(which),
        attended_rows=[None] * len(which),
        predicted=[None] * len(which),
    )


def offset_of(segment: Segment, i: int, size: int) -> int:
    """Where the i-th of equal parts of a segment begins, which is one span or has one for each of them."""
    spans = segment.spans.array
    return int(spans[0, 0]) + i * size if len(spans) == 1 else int(spans[i, 0])
