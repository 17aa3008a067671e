"""Attention mass: what the last queries of a prompt give to each cluster of its entries.

SnapKV's vote, as KVDrive warms its tiers up with it (importance-guided warm-up): the softmax weights of the last
queries over all positions that they see, summed over those queries and over the query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierloop.runtime.centroids import Members

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class AttentionMass:
    """A function for a `dense` launch, with what it needs: keys as stored, float32 (heads, tokens, head_dim); queries
    of the last n positions, float32 (n, q heads, head_dim); the clusters of each KV head.

    Sums are float64 and what is delivered is float32: the order in which a library adds hardly ever shows.
    """

    def __init__(
        self, chunk_tokens: int, members: Sequence[Members], queries: Float32, keys: Float32, scale: float
    ) -> None:
        self._chunk, self._members = chunk_tokens, members
        self._queries, self._keys, self._scale = queries, keys, scale

    def store(self, _: list[Bytes], writes: list[Bytes]) -> None:
        """float32 (heads, clusters): the mean of a cluster's entries, 0 where it has none."""
        means = []
        for head, held in enumerate(self._members):
            of_entry = self._of_entries(head)
            labels = np.repeat(np.arange(len(held.sizes)), held.sizes)
            sums = np.bincount(labels, of_entry[held.positions], minlength=len(held.sizes))
            means.append(sums / np.maximum(held.sizes, 1))
        writes[0][:] = np.concatenate(means).astype(np.float32).view(np.uint8)

    def _of_entries(self, head: int) -> NDArray[np.float64]:
        """What the queries of one KV head give to each entry, summed over queries and group."""
        tokens, group = self._keys.shape[1], self._queries.shape[1] // len(self._keys)
        keys = self._keys[head].astype(np.float64)
        total = np.zeros(tokens)
        first = tokens - len(self._queries)
        for number, query in enumerate(self._queries):
            seen = first + number + 1
            mine = query[head * group : (head + 1) * group].astype(np.float64)
            logits = self._scale * (mine @ keys[:seen].T)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            total[:seen] += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
        return np.add.reduceat(total, np.arange(0, tokens, self._chunk))
