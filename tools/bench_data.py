"""What the attention bench computes on: sizes, stored numbers, and where rows lie.

Numbers are normal, so that logits and weights spread as they do in a model, and seeded. K and V of a case are
`Sizes.working` bytes, at least four times the last-level cache: what is timed comes from memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.kernels.contract import CODE_RANGE, ITEMSIZE, value_nbytes
from tierloop.devices.kernels.definition import FP8_NUMBERS
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.states import top_node
from tierloop.runtime.dtypes import to_bytes
from tierloop.tools.roofline import huge_bytes

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

KV_HEADS = 8
SPLIT_TOKENS = 64
"""What runtime.blocks.KVShape takes by default."""
CODE_STEP = {"int8": 1 / 32, "fp8_e4m3": 1 / 64}
"""What one stands for in codes of normal numbers: four and seven standard deviations fit."""
_DISTINCT = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much the bench does; `quick` and `full` are what users get.

    Bytes of a case and of the read loop; rows that are checked; tries of a case, and seconds for more; seconds for
    each comparison, and the head_dims that are compared; k and length of topk; tokens of a segment that is clustered,
    and how many heads have one; tokens of the prefill that is measured; widths of a layer, its keys and its MLP.
    """

    working: int
    read: int
    check_rows: int
    tries: int
    case_s: float
    rival_s: float
    rival_dims: tuple[int, ...]
    topk: tuple[int, int]
    segment_tokens: int
    cluster_heads: int
    prefill_tokens: int
    hidden: tuple[int, int, int]

    @classmethod
    def quick(cls, cache_nbytes: int) -> Sizes:
        """Done in 40 s on two cores; `cache_nbytes` is the last-level cache."""
        working, read = _enough(cache_nbytes)
        return cls(working, read, 2048, 5, 0.05, 0.2, (128,), (1024, 1 << 16), 8192, 2, 64, (4096, 1024, 14336))

    @classmethod
    def full(cls, cache_nbytes: int) -> Sizes:
        """Done in about four minutes on two cores."""
        working, read = _enough(cache_nbytes)
        return cls(working, read, 4096, 15, 2.0, 1.0, (64, 128), (1024, 1 << 16), 8192, 8, 512, (4096, 1024, 14336))


def _enough(cache_nbytes: int) -> tuple[int, int]:
    """Bytes that a case and the read loop work on, so that they come from memory."""
    return max(128 << 20, 4 * cache_nbytes), max(512 << 20, 4 * cache_nbytes)


class Stored:
    """Normal numbers as a KV cache stores them: `keys` uint8 (half of `nbytes`), and `values` for a head_dim.

    Where they are codes, `key_scale` is what a key's code is to be multiplied with: a part of the queries.
    """

    def __init__(self, dtype: str, nbytes: int) -> None:
        self.dtype = dtype
        self.key_scale = CODE_STEP.get(dtype, 1.0)
        self.whole = huge_bytes(nbytes)
        self._half = nbytes // 2
        count = max(1, min(_DISTINCT, self._half // ITEMSIZE[dtype]))
        drawn = np.random.default_rng(1).standard_normal(2 * count, dtype=np.float32)
        for half, numbers in ((self.keys, drawn[:count]), (self.whole[self._half :], drawn[count:])):
            repeat_into(half, encode(numbers, dtype))

    @property
    def keys(self) -> Bytes:
        """The first half."""
        return self.whole[: self._half]

    def values(self, head_dim: int) -> Bytes:
        """V rows of `head_dim` elements; where they are codes, each with a scale of its own."""
        if self.dtype not in CODE_RANGE:
            return self.whole[self._half :]
        codes = self.whole[self._half :][: self._half // head_dim * head_dim].reshape(-1, head_dim)
        row = value_nbytes(self.dtype, head_dim)
        rows = huge_bytes(len(codes) * row).reshape(-1, row)
        rows[:, :head_dim] = codes
        scales = np.random.default_rng(2).uniform(0.5, 1.5, len(codes)).astype(np.float32) * np.float32(self.key_scale)
        rows[:, head_dim:] = scales.view(np.uint8).reshape(-1, 4)
        return rows.reshape(-1)


class Place(NamedTuple):
    """Where the rows of all heads lie: runs (n, 3), the storage row at which each begins, and rows in each."""

    runs: Int64
    first: Int64
    rows: int

    def operand(self, array: Bytes, row_nbytes: int) -> Operand:
        """A span for each run."""
        return (Segment(region(array), Spans.equal(self.first * row_nbytes, self.rows * row_nbytes)),)

    def storage_rows(self) -> Int64:
        """The storage row of every row, in the order of the runs."""
        return (self.first[:, None] + np.arange(self.rows)).ravel()


def place(heads: int, tokens: int, block: int = 0) -> Place:
    """`tokens` rows of each head, in one run, or in blocks of `block` tokens that lie in random order."""
    block = block or tokens
    count = heads * (tokens // block)
    order = np.random.default_rng(3).permutation(count) if block < tokens else np.arange(count)
    head, number = np.divmod(np.arange(count), tokens // block)
    runs = np.stack([np.zeros(count, dtype=np.int64), head, number * block], axis=1)
    return Place(runs, order * block, block)


def roots(heads: int, tokens: int) -> Int64:
    """One root for each head, int64 (heads, 4)."""
    level, index = top_node(-(-tokens // SPLIT_TOKENS))
    return np.array([[0, head, level, index] for head in range(heads)], dtype=np.int64)


def region(array: NDArray[np.generic]) -> Region:
    """A region whose bytes are those of a C-contiguous array."""
    flat = array.reshape(-1).view(np.uint8)
    return Region("bench", "bench", id(flat), flat.nbytes, view=flat)


def whole(array: NDArray[np.generic]) -> Operand:
    """An operand that is all of an array."""
    return (region(array).all(),)


def bytes_of(one: Region) -> Bytes:
    """What kernels are given as the bytes of a region."""
    assert one.view is not None
    return one.view


def encode(numbers: Float32, dtype: str) -> Bytes:
    """Normal numbers as stored bytes, rounded to the nearest; of codes, those of numbers / CODE_STEP."""
    if dtype == "int8":
        codes = np.clip(np.rint(numbers / np.float32(CODE_STEP[dtype])), -127, 127)
        return np.asarray(codes, dtype=np.int8).view(np.uint8)
    if dtype == "fp8_e4m3":
        known = FP8_NUMBERS[:0x7F]
        magnitude = np.searchsorted((known[1:] + known[:-1]) / 2, np.abs(numbers) / CODE_STEP[dtype])
        return np.where(numbers < 0, magnitude + 0x80, magnitude).astype(np.uint8)
    return to_bytes(numbers, dtype)


def repeat_into(target: Bytes, source: Bytes) -> None:
    """Fill an array with the bytes of another, over and over."""
    for start in range(0, target.nbytes, source.nbytes):
        target[start : start + source.nbytes] = source[: target.nbytes - start]
