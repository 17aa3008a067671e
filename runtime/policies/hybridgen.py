"""HybridGen: attention shared by CPU and GPU at the level of logits, over tiered host memory (arXiv 2604.18529).

The newest rows stay on the GPU, older ones go to the host: keys to local DRAM, values to CXL memory. In every layer the
cores scan the host's keys, choose K rows of each KV head, and send their logits and V rows to the GPU, which joins them
with its own in logical order; keys never cross the link. The cores work one layer ahead: the query of layer i + 1 is
predicted from the input of layer i, since inputs of successive layers are alike. A feedback scheduler moves K and the
timing by what the last steps took (runtime/feedback.py).

Timing. `prev`: rows and logits by the predicted query. `prev-select`: rows by the predicted query, logits by the true
one. `current`: both by the true one. Layers up to `predict_from` are `current`, whatever the timing: the inputs of the
first layers are not alike (cosine 0.01 from layer 0 to 1 and 0.83 from 1 to 2 on SmolLM2). Where K covers all host rows
everything is `current`, and the result is that of dense attention. Steps of more than one token per request attend over
all rows where they lie.

Where the paper is silent, or this deviates:

- Which cheap selector it uses is not known. Here the cores scan the keys of all host rows, or of the newest
  `scan_tokens`, and take the best of each KV head by the largest logit over its query group; with the predicted query
  the logits of the scan are those that are sent. (A third-party port takes the best of each query head.)
- The predicted query is formed where the modules run, not on the CPU: the weights are there, and the query that crosses
  the link instead of the layer's input has the same size.
- V rows are gathered by the cores into host memory and cross the link as one piece; `values` = "direct" leaves the
  gathering to the copy engine.
- Demotion is by whole blocks, and page interleaving by blocks too.
- The paper starts with K = K_min. Here K starts as `budget` of the host's rows, or as `k`.
- Without `logit_parallelism` the chosen keys cross the link as well, nothing is done ahead, and the GPU attends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar

import numpy as np

from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.regions import Segment
from tierloop.runtime.blocks import K, V
from tierloop.runtime.engine import Engine
from tierloop.runtime.feedback import KINDS, TIMINGS, FeedbackScheduler, Kind, Setting, Times, Timing
from tierloop.runtime.in_place import InPlaceAttention
from tierloop.runtime.kv_mapping import MAPPINGS, far_memory, homes
from tierloop.runtime.logit_parallel import (
    COMBINE,
    GATHER,
    GPU_LOGITS,
    LOGITS,
    SELECT,
    SLOTS,
    TRANSFER,
    Chosen,
    LogitsCalculator,
    Scan,
    TokenConcatenator,
)
from tierloop.runtime.loop import Task
from tierloop.runtime.policy import Batch, Prediction, Request, number, share_above_zero, switched_off, whole_numbers
from tierloop.runtime.recent import RecentOnGpu
from tierloop.runtime.workspace import Workspace

VALUES = ("gather", "direct")
ON_GPU = ("qkv", "predict", "append", GPU_LOGITS, COMBINE, "mlp")
ON_CPU = (SELECT, "decide", LOGITS, GATHER)
"""Stages that the feedback scheduler takes as T_gpu and T_cpu. Choosing is part of T_cpu: the scan makes the logits."""
Ahead = tuple[list[Scan], Chosen]


@dataclass
class _Pace:
    """A request's scheduler, and what holds in this step."""

    scheduler: FeedbackScheduler
    setting: Setting
    history: list[tuple[int, str, float]] = field(default_factory=list)
    """K, timing and load of each step."""


def times_of(stage_ns: Mapping[str, int]) -> Times:
    """Busy ns by stage as the feedback scheduler takes them."""
    gpu, cpu = (sum(stage_ns.get(stage, 0) for stage in stages) for stages in (ON_GPU, ON_CPU))
    return Times(gpu, cpu, stage_ns.get(TRANSFER, 0), 0)


class HybridGen(RecentOnGpu):
    """Attends `budget` (0 to 1) of the host's rows of each KV head, or `k` of them, and all rows on the GPU."""

    name: ClassVar[str] = "hybridgen"
    exact: ClassVar[bool] = False
    mechanisms: ClassVar[tuple[str, ...]] = ("logit_parallelism", "scheduler", "mapping")

    def __init__(
        self,
        engine: Engine,
        budget: float = 0.1,
        k: int | None = None,
        k_min: int = 64,
        k_max: int | None = None,
        gpu_share: float = 0.1,
        scheduler: Kind = "full",
        timing: Timing = "prev",
        mapping: str = "auto",
        weights: Mapping[str, int] | None = None,
        scan_tokens: int = 0,
        predict_from: int = 3,
        values: str = "gather",
        noise: float = 0.0,
        seed: int = 0,
        step: float = 0.2,
        epsilon: float = 0.1,
        smoothing: float = 0.05,
        every: int = 4,
        without: Sequence[str] = (),
    ) -> None:
        self.without = switched_off(type(self), without)
        for option, value, allowed in (
            ("scheduler", scheduler, KINDS),
            ("timing", timing, TIMINGS),
            ("mapping", mapping, MAPPINGS),
            ("values", values, VALUES),
        ):
            if value not in allowed:
                raise ConfigurationError(f"hybridgen: {option} {value!r}: {nearest(str(value), list(allowed))}")
        share_above_zero(self.name, budget)
        whole_numbers(
            self.name,
            {
                "k_min": (k_min, 1),
                "scan_tokens": (scan_tokens, 0),
                "predict_from": (predict_from, 0),
                "seed": (seed, 0),
                "every": (every, 1),
            },
        )
        for option, rows in (("k", k), ("k_max", k_max)):
            if rows is None:
                continue
            whole_numbers(self.name, {option: (rows, 1)})
            if rows < k_min:
                raise ConfigurationError(f"hybridgen: {option} is {rows}, below k_min, which is {k_min}")
        number("hybridgen: noise", noise, 0, 1)
        cores = engine.runner("logits", engine.host)
        if cores is None or cores.executor.kind != "cores":
            raise ConfigurationError(
                f"hybridgen: no CPU executor of platform {engine.platform.name} computes logits of "
                f"{engine.shape.dtype} rows on {engine.host}"
            )
        if "mapping" in self.without:
            mapping, weights = "interleave" if far_memory(engine, cores) else "dram", None
        super().__init__(engine, gpu_share, homes(self.name, engine, cores, mapping, weights))
        for memory in {m for turn in self._homes for m in turn}:
            if not cores.reaches(memory):
                raise ConfigurationError(f"hybridgen: {cores.device.info.name} does not reach {memory}")
        gpu = engine.runner("logits", engine.dense.memory)
        if gpu is None or "combine" not in gpu.executor.kernels:
            raise ConfigurationError(
                f"hybridgen: {engine.dense.device.info.name} runs the modules, but not logits and combine over "
                f"{engine.shape.dtype} rows"
            )
        self._budget, self._k_min = budget, int(k_min)
        self._k, self._k_max = (None if rows is None else int(rows) for rows in (k, k_max))
        self._scheduler: Kind = "fixed" if "scheduler" in self.without or (budget == 1 and k is None) else scheduler
        for option, share in (("step", step), ("epsilon", epsilon), ("smoothing", smoothing)):
            number(f"hybridgen: {option}", share, 0)
        self._reaction = {"step": step, "epsilon": epsilon, "smoothing": smoothing, "every": every}
        self._timing = timing
        self._scan_tokens = int(scan_tokens)
        self._pace(self._k_min, self._k_min)  # its arguments are checked there
        self._predict_from = int(predict_from)
        self._direct = values == "direct"
        self._noise, self._seed = noise, int(seed)
        self._work = Workspace(engine, SLOTS)
        self._calculator = LogitsCalculator(engine, cores, self._work, self.shape.block_tokens)
        self._concatenator = TokenConcatenator(engine, gpu, self._work)
        self._in_place = InPlaceAttention(engine)
        self._ahead: dict[tuple[int, tuple[str, ...]], Task[Ahead]] = {}
        self._before: dict[str, int] = {}
        self._history: dict[str, list[tuple[int, str, float]]] = {}

    # -- a request's life -----------------------------------------------------------------------------------------

    async def admit(self, request: Request) -> None:
        if self._k is not None and self._k > request.max_tokens:
            raise ConfigurationError(
                f"hybridgen: k is {self._k}, more than the context of {request.name}, which is {request.max_tokens}"
            )
        await super().admit(request)
        wants = self._wants(request)
        self._work.reserve(wants)
        request.state["wants"] = wants
        rows = self.border(request, 0) * self.shape.block_tokens
        request.state["pace"] = pace = self._pace(self._most(request), self._first_k(rows))
        self._history[request.name] = pace.history

    async def release(self, request: Request) -> None:
        wants = request.state.get("wants")
        await super().release(request)
        if wants is not None:
            self._work.give_back(wants)

    def _most(self, request: Request) -> int:
        """The largest K that the request can come to have."""
        rows = self.most_host_rows(request)
        first = self._first_k(rows)
        if self._scheduler == "fixed":
            return min(first, rows)
        return min(self._k_max if self._k_max is not None else max(4 * first, self._k_min), rows)

    def _pace(self, k_max: int, k: int) -> _Pace:
        scan = self._scan_tokens if self._scheduler == "port" else 0
        try:
            scheduler = FeedbackScheduler(
                self._k_min,
                k_max,
                max(k, self._k_min),
                self._timing,
                kind=self._scheduler,
                scan=scan,
                **self._reaction,  # type: ignore[arg-type]  # each is of its argument's type
            )
        except ValueError as error:
            raise ConfigurationError(f"hybridgen: {error}") from error
        return _Pace(scheduler, scheduler.setting)

    def _first_k(self, rows: int) -> int:
        """K to begin with for that many host rows."""
        return self._k if self._k is not None else max(ceil(self._budget * rows), self._k_min)

    def _wants(self, request: Request) -> dict[str, tuple[str, int]]:
        """Bytes of working space per layer under way."""
        shape, host, gpu = self.shape, self.engine.host, self.engine.dense.memory
        heads, most = shape.num_kv_heads, self._most(request)
        scanned = self.most_host_rows(request)
        own = (self.resident(request) + 1) * shape.block_tokens
        queries = heads * shape.group * shape.head_dim * 4
        wants = {
            "queries": (host, queries),
            "predicted": (gpu, queries),
            "scores": (host, heads * scanned * shape.group * 4),
            "indices": (host, heads * most * 8),
            "picked": (host, heads * most * shape.group * 4),
            "values": (host, heads * most * shape.row_nbytes(V)),
            "values arriving": (gpu, heads * most * shape.row_nbytes(V)),
            "logits": (gpu, heads * (most + own) * shape.group * 4),
            "states": (gpu, self.engine.state_nbytes(heads)),
        }
        if "logit_parallelism" in self.without:
            wants["keys"] = host, heads * most * shape.row_nbytes(K)
            wants["keys arriving"] = gpu, heads * most * shape.row_nbytes(K)
        return wants

    # -- a step -----------------------------------------------------------------------------------------------------

    async def layer_input(self, layer: int, batch: Batch) -> None:
        if layer == 0 and batch.q_len == 1:
            self._begin_step(batch)
        following, timing = layer + 1, self._timing_of(batch)
        if (
            layer >= self._predict_from
            and following < self.shape.num_layers
            and batch.q_len == 1
            and timing != "current"
            and "logit_parallelism" not in self.without
            and not all(self._scan(r, following).whole(self.shape.block_tokens) for r in batch.requests)
        ):
            assert batch.predict is not None, "a decoder that calls layer_input predicts"
            # Submitted at once: behind this layer's attention in the GPU's queue it would come too late.
            target = self._work.at("predicted", following, batch.queries.spans.nbytes)
            prediction = batch.predict(following, target)
            queries, ready = self._calculator.queries(following, target, [prediction.ready])
            ahead = self._work_ahead(following, batch, timing, prediction, queries, ready)
            self._ahead[following, tuple(r.name for r in batch.requests)] = self.engine.loop.spawn(ahead)

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        if batch.q_len > 1:
            return await self._attend_in_place(layer, batch)
        ahead = self._ahead.pop((layer, tuple(r.name for r in batch.requests)), None)
        for request in batch.requests:
            await self.settle(request, layer)
        self.open_blocks(layer, batch)
        appended = self.engine.stages.mark(self.append(layer, batch), "append")
        scans, chosen = await ahead if ahead is not None else (await self._scans(layer, batch), None)
        calculator = self._calculator
        if chosen is None:
            queries, ready = calculator.queries(layer, batch.queries, [batch.ready])
            sending = "logit_parallelism" not in self.without
            chosen = await calculator.choose(layer, batch, scans, queries, ready, sending)
            chosen = self._spoilt(layer, batch, scans, chosen)
            calculator.send_rows(layer, batch, chosen, V, self._direct)
            if sending:
                calculator.send_scanned(layer, scans, chosen)
            else:
                calculator.send_rows(layer, batch, chosen, K, self._direct)
        elif not chosen.has_logits:
            queries, ready = calculator.queries(layer, batch.queries, [batch.ready])
            calculator.send_logits(layer, batch, chosen, queries, ready)
        self._account(batch, scans, chosen)
        done = self._concatenator.attend(layer, batch, [s.last for s in scans], chosen, appended)
        for request in batch.requests:
            self.demote(request, layer, [appended])
        return done

    def _begin_step(self, batch: Batch) -> None:
        """Set K and timing of every request by what the step before took."""
        now = self.engine.stages.ns
        took = {stage: ns - before if ns >= (before := self._before.get(stage, 0)) else ns for stage, ns in now.items()}
        self._before = dict(now)
        times = times_of(took)
        for request in batch.requests:
            pace: _Pace = request.state["pace"]
            if pace.history:
                rows = self.next_border(request, 0) * self.shape.block_tokens
                pace.setting = pace.scheduler.decide(times, min(rows, self._most(request)))
            pace.history.append((pace.setting.k, pace.setting.timing, pace.scheduler.load))

    def _timing_of(self, batch: Batch) -> Timing:
        """The most accurate timing that a request of the batch asks for."""
        return max((r.state["pace"].setting.timing for r in batch.requests), key=TIMINGS.index)

    def report(self) -> dict[str, Any]:
        return {
            name: {"k": [k for k, _, _ in steps], "timing": [t for _, t, _ in steps], "load": [x for _, _, x in steps]}
            for name, steps in self._history.items()
        }

    async def _work_ahead(
        self, layer: int, batch: Batch, timing: Timing, prediction: Prediction, queries: Segment, ready: Completion
    ) -> Ahead:
        """Choose a layer's host rows by a predicted query and start to send them."""
        scans = await self._scans(layer, batch)
        chosen = await self._calculator.choose(layer, batch, scans, queries, ready, timing == "prev")
        chosen = self._spoilt(layer, batch, scans, chosen)
        self._calculator.send_rows(layer, batch, chosen, V, self._direct)
        if timing == "prev":
            self._calculator.send_scanned(layer, scans, chosen)
            chosen.prediction = prediction
        return scans, chosen

    async def _attend_in_place(self, layer: int, batch: Batch) -> list[Completion]:
        for request in batch.requests:
            await self.settle(request, layer)
            await self.make_room(request, layer, batch.q_len)
        self.open_blocks(layer, batch)
        appended = self.engine.stages.mark(self.append(layer, batch), "append")
        done = self._in_place.attend(layer, batch, appended)
        for request in batch.requests:
            self.demote(request, layer, [appended])
        return done

    async def _scans(self, layer: int, batch: Batch) -> list[Scan]:
        """What is looked at of each request: its host rows, once what was demoted last is among them."""
        for request in batch.requests:
            await self.settle(request, layer)
        return [self._scan(request, layer) for request in batch.requests]

    def _scan(self, request: Request, layer: int) -> Scan:
        last = self.next_border(request, layer)
        rows = last * self.shape.block_tokens
        setting: Setting = request.state["pace"].setting
        wanted = min(self._first_k(rows) if self._scheduler == "fixed" else setting.k, self._most(request))
        tokens = setting.scan if self._scheduler == "port" else self._scan_tokens
        first = max(last - -(-tokens // self.shape.block_tokens), 0) if tokens and wanted < rows else 0
        return Scan(first, last, wanted)

    def _spoilt(self, layer: int, batch: Batch, scans: Sequence[Scan], chosen: Chosen) -> Chosen:
        """Replace the share `noise` of what was chosen by other rows, to see what wrong predictions cost."""
        if not self._noise or chosen.everything:
            return chosen
        heads, positions = self.shape.num_kv_heads, list(chosen.positions)
        for i, scan in enumerate(scans):
            for head in range(heads):
                mine = positions[i * heads + head]
                chance = np.random.default_rng([self._seed, layer, int(batch.positions[i, 0]), i, head])
                first, last = scan.first * self.shape.block_tokens, scan.last * self.shape.block_tokens
                others = np.setdiff1d(np.arange(first, last), mine, assume_unique=True)
                count = min(round(self._noise * len(mine)), len(others))
                kept = chance.choice(mine, len(mine) - count, replace=False)
                positions[i * heads + head] = np.sort(np.append(kept, chance.choice(others, count, replace=False)))
        return Chosen(positions, heads, chosen.layout, False, chosen.scanned)

    def _account(self, batch: Batch, scans: Sequence[Scan], chosen: Chosen) -> None:
        """Tell the oracle which rows are attended, and which logits come from a prediction."""
        if all(scan.whole(self.shape.block_tokens) for scan in scans):
            return
        heads = self.shape.num_kv_heads
        for i, scan in enumerate(scans):
            of_host = chosen.positions[i * heads : (i + 1) * heads]
            own = np.arange(scan.last * self.shape.block_tokens, int(batch.positions[i, -1]) + 1)
            batch.attended_rows[i] = [np.concatenate((mine, own)) for mine in of_host]
            if chosen.prediction is not None:
                batch.predicted[i] = of_host, chosen.prediction
