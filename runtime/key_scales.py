"""The scales of a request's keys, where keys are codes: float32 for each layer, KV head and channel.

They are found once, from the prompt's keys, and hold for the whole life of the request: the largest magnitude of the
channel over the prompt, times `MARGIN`, becomes the largest code. Keys that come later may be beyond it and are stored
as the largest code then; `clipped` counts their elements. One copy lies on the device that runs the modules, which
stores new keys by it.

No kernel that attends takes scales: they are part of the queries (devices/kernels/contract.py). q·(s∘code) =
(q∘s)·code, so queries are multiplied by the scales of their KV head once, in float32, by who computes them. From there
on everything is in that one space: means and centroids of codes are scored by the same queries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.regions import Region, Segment
from tierloop.runtime.dtypes import scales_of

Float32 = NDArray[np.float32]

MARGIN = 1.5
"""Room for later keys above the largest of the prompt.

Measured on SmolLM2-135M with two English texts, 400 tokens as the prompt and the next 400 fed in chunks of 50. The mean
KL divergence of the next token from that of a float32 cache was, for int8, 6.7e-3 and 1.9e-3 without room, 6.3e-4 and
2.6e-4 with 1.5, and 6.3e-4 and 6.0e-4 with 2, whose steps are coarser; for fp8_e4m3, whose steps grow with the number,
8.7e-3 and 3.8e-3, 2.8e-3 and 2.4e-3, 2.6e-3 and 1.9e-3. Room is for what comes later: of three prompts of 900 to 1,000
tokens with 48 generated ones, the tokens of one left those of float32 earlier with 1.5 than with 1.
"""
BEYOND = {"int8": 127.5, "fp8_e4m3": 464.0}
"""The largest code and half the step below it: more than this cannot be stored as exactly as smaller numbers."""


class KeyScales:
    """Scales of one request: `values` float32 [layer, kv head, channel], 1 until a layer's prompt is measured."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, region: Region) -> None:
        self.values: Float32 = np.ones((num_layers, num_kv_heads, head_dim), dtype=np.float32)
        self.clipped = 0
        self.region = region
        self._dtype = dtype

    @staticmethod
    def nbytes(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that `region` must have."""
        return num_layers * num_kv_heads * head_dim * 4

    def measure(self, layer: int, keys: Float32) -> None:
        """Find a layer's scales from the prompt's keys: float32 (kv heads, tokens, head_dim)."""
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.abs(keys).max(axis=1, initial=0).astype(np.float32) * np.float32(MARGIN)
        self.values[layer] = scales_of(largest, self._dtype)
        self.count(layer, keys)

    def fold(self, layer: int, queries: Float32) -> Float32:
        """Queries for codes: float32 (..., q heads, head_dim) times the scales of their KV head."""
        scales = self.values[layer]
        folded: Float32 = queries * np.repeat(scales, queries.shape[-2] // len(scales), axis=0)
        return folded

    def count(self, layer: int, keys: Float32) -> None:
        """Count the elements beyond the codes of keys that are stored: float32 (kv heads, tokens, head_dim)."""
        limit = self.values[layer][:, None] * np.float32(BEYOND[self._dtype])
        self.clipped += int((np.abs(keys) > limit).sum())

    def place(self, layer: int) -> Segment:
        """Where the device that stores new keys has a layer's scales: float32 (kv heads, head_dim)."""
        nbytes = self.values[layer].nbytes
        return self.region.at(layer * nbytes, nbytes)
