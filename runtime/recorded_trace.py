"""A recorded selection as a trace of rankings, to play windows on (window_simulation.py).

A policy that goes by clusters asks which clusters are best; how it grouped its entries into clusters is in the record
too. So its ranking of entries is known as far as the clusters reach that it was given.
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.centroids import Members
from tierloop.runtime.chunk_index import expand
from tierloop.runtime.selection import SelectionRecord

Int64 = NDArray[np.int64]


def recorded_trace(
    record: SelectionRecord, label: str = "select 0", clusters: str | None = "clusters 0"
) -> list[Int64]:
    """The rankings of each step, int64 (layers, heads, m), of the request that leads the batch of a question.

    `label` and `clusters` are labels of questions and groupings as a record has them, with requests by number. With
    clusters, a candidate stands for its entries, numbered from the first one that was clustered; with None for itself.
    Layers that were never asked about are left out. Raises ConfigurationError.
    """
    heads = record.origin.shape.num_kv_heads
    asked = {
        (step, layer): kept
        for (step, layer, name, number), kept in record.answers.items()
        if (name, number) == (label, 0)
    }
    steps, layers = (sorted({key[i] for key in asked}) for i in (0, 1))
    if not asked or len(asked) != len(steps) * len(layers):
        raise ConfigurationError(
            f"the recorded selection has {len(asked)} questions {label!r} about {len(layers)} layers in {len(steps)} "
            "steps; a trace needs one about each layer in each step"
        )
    grown = {layer: _clusters(record, layer, clusters, heads) for layer in layers} if clusters is not None else {}
    trace = []
    for step in steps:
        ranked = []
        for layer in layers:
            kept = asked[step, layer]
            if len(kept.answer) < heads:
                raise ConfigurationError(f"{label} of step {step} is about {len(kept.answer)} lists; heads are {heads}")
            answer = kept.answer[:heads]
            if clusters is not None:
                known = int(kept.lengths[0])
                if known not in grown[layer]:
                    raise ConfigurationError(f"{label} of step {step}, layer {layer}: nobody has made {known} clusters")
                members = grown[layer][known]
                answer = expand(members, answer, max(len(m.positions) for m in members))
            ranked.append(answer)
        longest = max(int((answer >= 0).sum(axis=1).max()) for answer in ranked)
        padded = np.full((len(layers), heads, longest), -1, dtype=np.int64)
        for row, answer in zip(padded, ranked, strict=True):
            width = min(longest, answer.shape[1])
            row[:, :width] = answer[:, :width]
        trace.append(padded)
    return trace


def _clusters(record: SelectionRecord, layer: int, label: str, heads: int) -> dict[int, list[Members]]:
    """A layer's clusters as they grew: the members of each head, by how many clusters there were."""
    made = {
        (step, nth): groups
        for (step, of_layer, name, nth), groups in record.groups.items()
        if (of_layer, name) == (layer, label)
    }
    grown: dict[int, list[Members]] = {0: [Members() for _ in range(heads)]}
    first = known = 0
    for _, groups in sorted(made.items(), key=lambda pair: pair[0]):
        if len(groups.labels) != heads:
            raise ConfigurationError(f"{label} of layer {layer} are of {len(groups.labels)} lists; heads are {heads}")
        members = [copy(before) for before in grown[known]]
        for mine, labels in zip(members, groups.labels, strict=True):
            mine.add(labels.astype(np.int64), first, groups.groups)
        first, known = first + groups.labels.shape[1], known + groups.groups
        grown[known] = members
    return grown
