"""The constants of NELSSA's equations as the devices of a platform estimate them, before anything runs.

Nobody tells a policy its bandwidths. The slope of what `attend` would take over more and more rows is one over BW_GPU,
that over clusters strewn over a near memory one over BW_eff; what is left at no rows, with the copies of queries and
states and the choice of clusters, is the communication of a layer. Each is asked of the device that would carry it out
(`Device.estimate`), with regions of the right size that are given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from tierloop.devices.commands import Command, Copy, Launch, Read
from tierloop.devices.kernels.contract import ITEMSIZE, Attend, DType, Merge, Score, Topk
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.states import cover
from tierloop.runtime.blocks import K, V
from tierloop.runtime.crossover import Constants
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.near_partition import NearDevice

ROWS = 16_384
"""Rows of each KV head that are asked about, at most: enough to leave what a launch costs by itself behind."""


def estimate_constants(
    engine: Engine,
    devices: Sequence[NearDevice],
    selection_ratio: float,
    cluster_tokens: int,
    centroid_dtype: DType,
) -> Constants:
    """For one request at a time, its KV heads divided evenly over the lanes' devices; see the top of the file."""
    return _Estimates(engine, devices, selection_ratio, cluster_tokens, centroid_dtype).constants()


class _Estimates:
    def __init__(
        self, engine: Engine, devices: Sequence[NearDevice], ratio: float, cluster_tokens: int, centroid_dtype: DType
    ) -> None:
        self._engine = engine
        self._devices = devices
        self._ratio = ratio
        self._cluster = cluster_tokens
        self._centroid_dtype = centroid_dtype
        shape = engine.shape
        self._heads = -(-shape.num_kv_heads // len(devices))
        """KV heads of the device that has the most."""
        row = shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))
        least = min(max(engine.room(m), 0) for m in (engine.dense.memory, *(device.memory for device in devices)))
        self._rows = max(min(ROWS, least // 4 // row), 8 * cluster_tokens) // cluster_tokens * cluster_tokens

    def constants(self) -> Constants:
        """What the devices say."""
        engine, shape = self._engine, self._engine.shape
        token = shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))
        few, many = self._rows // 2, self._rows
        gpu = [self._attend(engine.dense, engine.dense.memory, shape.num_kv_heads, rows, 1.0) for rows in (few, many)]
        near = [
            [self._attend(each.lane, each.memory, self._heads, rows, self._ratio) for rows in (few, many)]
            for each in self._devices
        ]
        gpu_rate = token * (many - few) * 1e9 / max(gpu[1] - gpu[0], 1)
        picked = self._picked(many) - self._picked(few)
        of_device = token // shape.num_kv_heads * self._heads * self._cluster * picked
        rates = [of_device * 1e9 / max(each[1] - each[0], 1) for each in near]
        slowest = int(np.argmin(rates))
        launch = max(near[slowest][0] - of_device / picked * self._picked(few) * 1e9 / rates[slowest], 0.0)
        # The GPU's own launch is there in both branches.
        alone = max(gpu[0] - token * few * 1e9 / gpu_rate, 0.0)
        comm = shape.num_layers * max(launch + self._copies() + self._choice() - alone, 0.0)
        names = ", ".join(each.lane.device.info.name for each in self._devices)
        return Constants(
            kv_nbytes=token * shape.num_layers,
            gpu_bytes_per_s=max(gpu_rate, 1.0),
            pnm_bytes_per_s=max(rates[slowest], 1.0),
            comm_ns=comm,
            selection_ratio=self._ratio,
            cluster_tokens=self._cluster,
            num_devices=len(self._devices),
            element_nbytes=ITEMSIZE[shape.dtype],
            centroid_element_nbytes=ITEMSIZE[self._centroid_dtype],
            sources={
                "kv_nbytes": f"{shape.num_layers} layers of {token} B",
                "gpu_bytes_per_s": f"estimated by {engine.dense.device.info.name}: attend over {few} to {many} rows",
                "pnm_bytes_per_s": f"estimated by {names}: clusters of {self._cluster} rows, the slowest of them",
                "comm_ns": "estimated by the devices: launch, queries, states, choice of clusters, per layer",
                "selection_ratio": "the policy's budget",
                "cluster_tokens": "the policy's option",
                "num_devices": "the policy's devices",
            },
        )

    def _picked(self, rows: int) -> int:
        """Clusters of a KV head that are taken."""
        return max(round(rows // self._cluster * self._ratio), 1)

    def _attend(self, lane: Lane, memory: str, heads: int, rows: int, ratio: float) -> int:
        """ns of attention over rows of so many KV heads: all of them, or clusters strewn over them."""
        shape = self._engine.shape
        if ratio < 1:
            count = self._picked(rows)
            starts = np.arange(count, dtype=np.int64) * (rows // self._cluster) // count * self._cluster
            sizes = np.full(count, self._cluster, dtype=np.int64)
        else:
            starts, sizes = np.zeros(1, dtype=np.int64), np.full(1, rows, dtype=np.int64)
        head = np.repeat(np.arange(heads, dtype=np.int64), len(starts))
        first, size = np.tile(starts, heads), np.tile(sizes, heads)
        runs = np.stack((np.zeros_like(head), head, first), axis=1)
        nodes = cover([0, max(rows // shape.split_tokens - 1, 0)], [])
        roots = np.array([(0, h, *node) for h in range(heads) for node in nodes], dtype=np.int64)
        args = Attend(
            shape.dtype, 1, heads, shape.group, 1, shape.head_dim, shape.head_dim_v, 1.0, shape.split_tokens, runs,
            np.array([[rows]], dtype=np.int64), roots,
        )  # fmt: skip
        sizes_of = [shape.row_nbytes(side) for side in (K, V)]
        with self._space(memory, heads * rows * sum(sizes_of)) as region, self._states(lane, heads) as states:
            sides = []
            for side in (K, V):
                start = side * heads * rows * sizes_of[K]
                spans = np.stack((start + (head * rows + first) * sizes_of[side], size * sizes_of[side]), axis=1)
                sides.append((Segment(region, Spans(spans)),))
            with self._space(lane.memory, heads * shape.group * shape.head_dim * 4) as queries:
                place = states.at(0, self._engine.state_nbytes(len(roots)))
                command = Launch(args, ((queries.all(),), sides[0], sides[1]), ((place,),))
                return lane.device.estimate(command, lane.queue).duration_ns

    def _copies(self) -> int:
        """ns of the queries' way to the near devices, and of their states' way back.

        Copies that go through one queue come one after another: devices begin as their queries come, so each further
        one costs the longer of its two.
        """
        engine, shape = self._engine, self._engine.shape
        home, queries = engine.dense.memory, self._heads * shape.group * shape.head_dim * 4
        states = engine.state_nbytes(self._heads)
        queues: dict[object, list[tuple[int, int]]] = {}
        for there in (each.lane.memory for each in self._devices):
            mover = engine.mover(home, there)
            key = there if mover is None else (mover.device.info.name, mover.queue)
            queues.setdefault(key, []).append((self._copy(home, there, queries), self._copy(there, home, states)))
        return max(sum(first) + sum(max(way) for way in later) for first, *later in queues.values())

    def _copy(self, source: str, target: str, nbytes: int) -> int:
        """ns of a copy, through the host's memory where nobody reaches both."""
        engine = self._engine
        hops = [source, target] if engine.mover(source, target) is not None else [source, engine.host, target]
        total = 0
        for here, there in pairwise(hops):
            lane = engine.mover(here, there)
            if lane is None:
                continue
            with self._space(here, nbytes) as first, self._space(there, nbytes) as second:
                total += lane.device.estimate(Copy(first.all(), second.all()), lane.queue).duration_ns
        return total

    def _choice(self) -> int:
        """ns of scoring few centroids, sorting them, and reading which are best; and of merging states."""
        engine, shape, lane = self._engine, self._engine.shape, self._engine.dense
        heads = shape.num_kv_heads
        runs = np.array([(0, h, 0) for h in range(heads)], dtype=np.int64)
        score = Score(
            1, heads, shape.group, shape.head_dim, "mean", "softmax", runs, self._centroid_dtype,  # type: ignore[arg-type]  # a float type
        )  # fmt: skip
        row = shape.head_dim * ITEMSIZE[self._centroid_dtype]
        roots = np.array([(0, h, 0, 0) for h in range(heads)], dtype=np.int64)
        merge = Merge(1, heads, shape.group, 1, shape.head_dim_v, roots)
        with (
            self._space(lane.memory, heads * shape.group * shape.head_dim * 4) as queries,
            self._space(lane.memory, heads * row) as centroids,
            self._space(lane.memory, heads * 4) as scores,
            self._space(lane.memory, heads * 8) as indices,
            self._space(lane.memory, engine.state_nbytes(heads)) as states,
            self._space(lane.memory, heads * shape.group * shape.head_dim_v * 4) as output,
        ):
            rows = Segment(centroids, Spans.equal(np.arange(heads, dtype=np.int64) * row, row))
            topk = Topk(1, np.ones(heads, dtype=np.int64))
            port = engine.port("read", lane.memory)
            asked: list[tuple[Lane, Command]] = [
                (lane, Launch(score, ((queries.all(),), (rows,)), ((scores.all(),),))),
                (lane, Launch(topk, ((scores.all(),),), ((indices.all(),),))),
                (port, Read(indices.all(), np.zeros(heads * 8, dtype=np.uint8))),
                (lane, Launch(merge, ((states.all(),),), ((output.all(),),))),
            ]
            return sum(each.device.estimate(command, each.queue).duration_ns for each, command in asked)

    @contextmanager
    def _states(self, lane: Lane, heads: int) -> Iterator[Region]:
        with self._space(lane.memory, self._engine.state_nbytes(64 * heads)) as region:
            yield region

    @contextmanager
    def _space(self, memory: str, nbytes: int) -> Iterator[Region]:
        region = self._engine.scratch(memory, nbytes)
        try:
            yield region
        finally:
            self._engine.drop(region)
