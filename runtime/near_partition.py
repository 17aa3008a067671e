"""How a request's KV cache is divided over several near-memory devices: by head, token, request or sequence.

A *segment* is `segment_tokens` consecutive rows, the unit in which keys are clustered; a device has some segments of
some KV heads. By head (NELSSA's choice) each device has all rows of its heads, so there is nothing to merge across
devices and all do the same work; by sequence, a range of consecutive segments of all heads; by token, every n-th
segment of all heads; by request, everything of a request. A segment is the grain of "token" because one root of the
merge tree would otherwise be returned for every split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.engine import Lane

Int64 = NDArray[np.int64]
PARTITIONS = ("head", "token", "request", "sequence")


@dataclass(frozen=True, eq=False)
class NearDevice:
    """A memory that rows lie on, and who attends over it: queries and states lie on the memory of the lane's device."""

    memory: str
    lane: Lane


@dataclass(frozen=True, eq=False)
class Share:
    """What one device has of a request: KV heads, neighbours, and segments, ascending; int64 each, never empty."""

    device: int
    heads: Int64
    segments: Int64


def divide(kind: str, num_devices: int, num_heads: int, num_segments: int, busiest_last: list[int]) -> list[Share]:
    """The shares of a request over devices 0 … num_devices − 1; those without any are left out.

    `busiest_last` are the devices in the order in which a whole request would be given to them. Raises
    ConfigurationError for another kind, and for more devices than KV heads where each head has one device.
    """
    heads, segments = np.arange(num_heads), np.arange(num_segments)
    if kind == "head":
        if num_devices > num_heads:
            raise ConfigurationError(
                f"{num_devices} devices cannot divide {num_heads} KV heads among them, each at least one; name at most "
                f"{num_heads} of them, or choose another partition: {', '.join(PARTITIONS[1:])}"
            )
        return [Share(d, mine, segments) for d, mine in enumerate(np.array_split(heads, num_devices))]
    if kind == "sequence":
        cut = [(d, mine) for d, mine in enumerate(np.array_split(segments, num_devices)) if len(mine)]
    elif kind == "token":
        cut = [(d, segments[d::num_devices]) for d in range(min(num_devices, num_segments))]
    elif kind == "request":
        cut = [(busiest_last[0], segments)]
    else:
        raise ConfigurationError(f"partition is {kind!r}; it must be one of {', '.join(PARTITIONS)}")
    return [Share(d, heads, mine) for d, mine in cut]
