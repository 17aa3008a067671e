"""How the compute checks get numbers out of a device: operands laid out over its memory, launches, results."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch, Operand
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.problems import Int64, Problem
from tierloop.devices.conformance.subject import Bytes, Lane, Subject
from tierloop.devices.info import Arithmetic, MemoryInfo
from tierloop.devices.kernels.contract import ITEMSIZE, Combine, Gather, KernelArgs, Logits, Merge, value_nbytes
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

Float32 = NDArray[np.float32]


def gather(source: Region, target: Region) -> Launch:
    """A kernel that copies a region into one of the same size."""
    return Launch(Gather(), ((source.all(),),), ((target.all(),),))


class Bench:
    """Runs kernels of one executor: lays operands out over its memory, launches, and fetches results."""

    def __init__(self, subject: Subject, lane: Lane, memory: MemoryInfo | None = None) -> None:
        self.subject = subject
        self.lane = lane
        self.memory = memory or subject.operand_memories(lane)[0]
        arithmetic = lane.device.info.arithmetic
        self.arithmetic = arithmetic or Arithmetic("unknown")
        self._regions: list[Region] = []

    def scattered(self, data: Bytes, sizes: Int64, memory: MemoryInfo | None = None) -> Operand:
        """Rows end to end, one span per size, lying out of order with gaps between them, in two regions."""
        half = len(sizes) // 2
        at, segments = 0, []
        for part in (sizes[:half], sizes[half:]):
            order = self.subject.rng.permutation(len(part))
            gaps = self.subject.rng.integers(0, 4, len(part)) * 4
            offsets = np.zeros(len(part), dtype=np.int64)
            place = 0
            for i in order.tolist():
                offsets[i] = place
                place += int(part[i] + gaps[i])
            region = self._region(place, memory)
            segment = Segment(region, Spans(np.stack([offsets, part.astype(np.int64)], axis=1)))
            nbytes = int(part.sum())
            self.subject.write(segment, data[at : at + nbytes])
            at += nbytes
            segments.append(segment)
        return tuple(segments)

    def whole(self, data: Bytes, memory: MemoryInfo | None = None) -> Operand:
        """The bytes in one span."""
        region = self._region(data.nbytes, memory)
        self.subject.write(region.at(0, data.nbytes), data)
        return (region.at(0, data.nbytes),)

    def target(self, nbytes: int, memory: MemoryInfo | None = None) -> Operand:
        """Room for a result, full of other bytes."""
        region = self._region(nbytes, memory)
        self.subject.write(region.at(0, nbytes), np.full(nbytes, 0xA5, dtype=np.uint8))
        return (region.at(0, nbytes),)

    def launch(self, args: KernelArgs, reads: tuple[Operand, ...], target: Operand) -> Bytes:
        """Launch, wait, make sure that the device did it, and fetch the result: uint8 (n,)."""
        self.completed(args, reads, target)
        return np.concatenate([self.subject.read(segment) for segment in target])

    def completed(self, args: KernelArgs, reads: tuple[Operand, ...], target: Operand) -> Completion:
        """Launch, wait, and make sure that the device did it."""
        return self.subject.run(self.lane, Launch(args, reads, (target,)))

    def free(self) -> None:
        """Give everything back."""
        for region in self._regions:
            self.subject.platform.free(region)
        self._regions.clear()

    def _region(self, nbytes: int, memory: MemoryInfo | None) -> Region:
        region = self.subject.alloc(max(-(-nbytes // 4) * 4, 4), memory or self.memory)
        self._regions.append(region)
        return region


def run_attend(bench: Bench, given: Problem, roots: Int64, values_on: MemoryInfo | None = None) -> Float32:
    args = given.attend(roots)
    reads, target = attend_operands(bench, given, roots, values_on)
    shape = (len(roots), args.q_len, args.group, 2 + args.head_dim_v)
    return bench.launch(args, reads, target).view(np.float32).reshape(shape)


def attend_operands(
    bench: Bench, given: Problem, roots: Int64, values_on: MemoryInfo | None = None
) -> tuple[tuple[Operand, ...], Operand]:
    s = given.shape
    reads = (
        bench.whole(as_bytes(given.queries)),
        bench.scattered(given.keys, row_sizes(given, s.head_dim)),
        bench.scattered(given.values, value_sizes(given), values_on),
    )
    return reads, bench.target(len(roots) * s.q_len * s.group * (2 + s.head_dim_v) * 4)


def run_logits(bench: Bench, given: Problem) -> Float32:
    s = given.shape
    args = Logits(
        s.dtype, s.num_sequences, s.num_kv_heads, s.group, s.q_len, s.head_dim, given.scale, given.runs,
        given.q_positions, *astuple(s.masks),
    )  # fmt: skip
    reads = bench.whole(as_bytes(given.queries)), bench.scattered(given.keys, row_sizes(given, s.head_dim))
    nbytes = int(given.lengths.sum()) * s.q_len * s.group * 4
    return bench.launch(args, reads, bench.target(nbytes)).view(np.float32)


def run_combine(bench: Bench, given: Problem, logits: Float32, roots: Int64) -> Float32:
    s = given.shape
    args = Combine(s.dtype, s.group, s.q_len, s.head_dim_v, s.split_tokens, given.runs, roots)
    reads = bench.whole(as_bytes(logits)), bench.scattered(given.values, value_sizes(given))
    shape = (len(roots), s.q_len, s.group, 2 + s.head_dim_v)
    return bench.launch(args, reads, bench.target(int(np.prod(shape)) * 4)).view(np.float32).reshape(shape)


def run_output(bench: Bench, given: Problem, parts: list[tuple[Problem, Int64]]) -> Float32:
    """Attend each part, merge the states of all: the output's bits."""
    s = given.shape
    states = np.concatenate([run_attend(bench, part, roots) for part, roots in parts])
    roots = np.concatenate([roots for _, roots in parts])
    args = Merge(s.num_sequences, s.num_kv_heads, s.group, s.q_len, s.head_dim_v, roots)
    nbytes = s.num_sequences * s.q_len * s.num_kv_heads * s.group * s.head_dim_v * 4
    return bench.launch(args, (bench.whole(as_bytes(states)),), bench.target(nbytes)).view(np.float32)


def row_sizes(given: Problem, dim: int) -> Int64:
    """Bytes of each run for rows of `dim` elements."""
    return given.lengths * dim * ITEMSIZE[given.shape.dtype]


def value_sizes(given: Problem) -> Int64:
    """Bytes of each run of V rows."""
    return given.lengths * value_nbytes(given.shape.dtype, given.shape.head_dim_v)


def as_bytes(array: NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(array, dtype=np.float32).reshape(-1).view(np.uint8)
