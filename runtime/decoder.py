"""The layer-stepping decoder: drives a model's modules stage by stage, with a policy inside every layer.

Per layer and micro-batch: `qkv` (norm, projections, rotary positions), attention by the policy, `mlp` (output
projection and MLP); at the end `head` (norm, logits, argmax). Each stage is a `dense` launch on the device that runs
the modules, so its time is charged in every kind of time; what crosses to other devices (queries, rows, output) lies
in that device's memory and moves by commands. Where keys are codes, `qkv` multiplies the queries by the scales of their
request's keys, so that nobody else needs them. The host stays one layer ahead, and waits for the tokens of each step.
A policy may ask for `waves`: the requests of a step are then divided, and each part goes through its layers at its own
pace, so that one's projections and MLP fill the time in which another waits for its rows. Weights are read by each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.regions import Segment
from tierloop.runtime.bounds import log_probabilities
from tierloop.runtime.engine import Engine
from tierloop.runtime.oracle import Recorder
from tierloop.runtime.policy import Batch, Policy, Predicted, Prediction, Request
from tierloop.runtime.stages import Activations, Float32, Prefill, StageCost, Stages

Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Function = Callable[[list[Bytes], list[Bytes]], None]
ACTIVATION_ITEM = 4
LAYERS_AHEAD = 1
"""Layers that are submitted before the one before them has ended. Further ahead, one burst of submissions at the start
of a step would keep the clock's thread from noticing what falls due meanwhile."""


class Decoder:
    """Decodes requests with one model, engine and policy; at most `max_rows` new tokens (requests · q_len) per step."""

    def __init__(
        self, modules: Stages, engine: Engine, policy: Policy, max_rows: int = 1, recorder: Recorder | None = None
    ) -> None:
        self._modules = modules
        self._engine = engine
        self._policy = policy
        self._max_rows = max_rows
        self._recorder = recorder
        shape = engine.shape
        self._sizes = (
            shape.num_kv_heads * shape.group * shape.head_dim * 4,
            shape.num_kv_heads * shape.head_dim * 4,
            shape.num_kv_heads * shape.head_dim_v * 4,
            shape.num_kv_heads * shape.group * shape.head_dim_v * 4,
        )
        self._stage = engine.scratch(engine.dense.memory, shape.num_layers * max_rows * sum(self._sizes) + 8 * max_rows)

    async def adopt(self, request: Request, prefill: Prefill) -> None:
        """Admit a request whose prompt is prefilled and place its rows. Raises TierTooSmall, with nothing kept.

        A policy that has kept the request from an earlier run gives it the tokens that it had then.
        """
        request.table = self._engine.table(request.max_tokens)
        try:
            await self._policy.admit(request)
            for layer, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
                await self._policy.place(request, layer, keys, values)
                queries = request.blocks.folded(layer, prefill.queries[layer])
                await self._policy.prefilled(request, layer, queries)
        except BaseException:
            await self._policy.release(request)
            raise
        if self._recorder is not None and len(request.tokens) <= request.prompt_tokens + 1:
            scales = request.blocks.scales
            self._recorder.admitted(request.name, prefill, None if scales is None else scales.values)

    async def step(self, requests: Sequence[Request], q_len: int = 1) -> list[int]:
        """Run the last `q_len` tokens of each request through the model; returns the next token of each, appended.

        Where there are no numbers (a phantom run) every next token is 0. A request that failed (`Request.failure`)
        keeps its tokens, and is to be released; the others go on. Raises its failure where no other is left.
        """
        tokens, _ = await self._step(list(requests), q_len)
        for request, token in zip(requests, tokens, strict=True):
            if request.failure is None:
                request.tokens.append(token)
        return tokens

    async def score(self, requests: Sequence[Request], targets: Sequence[int]) -> list[float]:
        """A step in which the next tokens are given: appends them, returns their log probabilities (natural)."""
        _, logits = await self._step(list(requests), 1)
        for request in requests:
            if request.failure is not None:
                raise request.failure
        assert logits is not None, "a phantom run has no probabilities"
        for request, target in zip(requests, targets, strict=True):
            request.tokens.append(target)
        scored: list[float] = log_probabilities(logits, targets).tolist()
        return scored

    async def _step(self, requests: list[Request], q_len: int) -> tuple[list[int], Float32 | None]:
        assert 0 < len(requests) * q_len <= self._max_rows, "more rows than the decoder was made for"
        waves = min(self._policy.waves, len(requests))
        borders = [len(requests) * wave // waves for wave in range(waves + 1)]
        spawn = self._engine.loop.spawn
        tasks = [spawn(self._wave(requests[:a], requests[a:b], q_len)) for a, b in pairwise(borders)]
        found = [await task for task in tasks]
        if all(request.failure is not None for request in requests):
            raise requests[0].failure or AssertionError
        logits = [mine for _, mine in found if mine is not None]
        return [token for tokens, _ in found for token in tokens], np.concatenate(logits) if logits else None

    async def _wave(
        self, before: list[Request], requests: list[Request], q_len: int
    ) -> tuple[list[int], Float32 | None]:
        """Some requests of a step, through all layers; others may go through theirs at the same time."""
        positions = np.array([range(len(r.tokens) - q_len, len(r.tokens)) for r in requests], dtype=np.int64)
        activations = self._modules.begin([r.tokens[-q_len:] for r in requests], positions)
        step = _Step(before, requests, positions, activations)
        ended: list[list[Completion]] = [[]]
        for layer in range(self._engine.shape.num_layers):
            ended.append(await self._layer(layer, step, ended[-1]))
            for completion in ended[-LAYERS_AHEAD - 1]:
                await completion
        return await self._head(step, ended[-1])

    async def _layer(self, layer: int, step: _Step, after: list[Completion]) -> list[Completion]:
        queries, keys, values, output = self._segments(layer, step)

        def qkv(activations: Activations, writes: list[Bytes]) -> None:
            step.projected = activations.project(layer)
            projected, new_keys, new_values = step.projected
            for request, mine in zip(step.requests, new_keys, strict=True):
                request.blocks.counted(layer, mine)
            for array, rows in zip(
                writes, (folded(layer, step.requests, projected), new_keys, new_values), strict=True
            ):
                array[:] = rows.reshape(-1).view(np.uint8)

        cost = self._modules.projections[layer]
        function = step.writing(qkv)
        ready = self._launch("qkv", cost, step.rows, (), ((queries,), (keys,), (values,)), function, after)
        count = len(step.requests)
        batch = Batch(
            step.requests,
            step.positions,
            queries,
            keys,
            values,
            output,
            ready,
            self._modules.scale,
            [None] * count,
            [None] * count,
            [None] * count,
            self._predictor(step, after),
            step.before,
        )
        await self._policy.layer_input(layer, batch)
        attended = await self._policy.attend(layer, batch)

        def mlp(activations: Activations, reads: list[Bytes]) -> None:
            self._record(layer, batch, step, reads[0])
            activations.finish(layer, reads[0])

        cost = self._modules.finishes[layer]
        return [self._launch("mlp", cost, step.rows, ((output,),), (), step.reading(mlp), attended)]

    async def _head(self, step: _Step, after: list[Completion]) -> tuple[list[int], Float32 | None]:
        """The next tokens, as the device gives them, and the logits behind them."""
        count = len(step.requests)
        place = self._stage.at(self._stage.nbytes - 8 * (self._max_rows - len(step.before)), 8 * count)
        found: list[Float32] = []

        def head(activations: Activations, writes: list[Bytes]) -> None:
            found.append(activations.logits())
            writes[0][:] = found[0].argmax(axis=-1).astype(np.int64).view(np.uint8)

        cost = self._modules.head_cost
        done = self._launch("head", cost, count, (), ((place,),), step.writing(head), after)
        into = np.zeros(8 * count, dtype=np.uint8)
        await self._engine.read(place, into, [done])
        return into.view(np.int64).tolist(), found[0] if found else None

    def _launch(
        self,
        label: str,
        cost: StageCost,
        rows: int,
        reads: tuple[Operand, ...],
        writes: tuple[Operand, ...],
        function: Function | None,
        after: Sequence[Completion],
    ) -> Completion:
        activations = rows * ACTIVATION_ITEM * self._modules.hidden * 2
        args = Dense(label, cost.flops_per_token * rows, cost.weight_nbytes, activations, function)
        return self._engine.launch(self._engine.dense, args, reads, writes, after)

    def _segments(self, layer: int, step: _Step) -> tuple[Segment, Segment, Segment, Segment]:
        offset = layer * self._max_rows * sum(self._sizes)
        first = len(step.before) * step.positions.shape[1]
        segments = []
        for size in self._sizes:
            segments.append(self._stage.at(offset + first * size, step.rows * size))
            offset += self._max_rows * size
        queries, keys, values, output = segments
        return queries, keys, values, output

    def _predictor(self, step: _Step, after: list[Completion]) -> Callable[[int, Segment], Prediction]:
        def predict(layer: int, target: Segment) -> Prediction:
            prediction = Prediction(target)

            def queries(activations: Activations, writes: list[Bytes]) -> None:
                prediction.queries = folded(layer, step.requests, activations.queries(layer))
                writes[0][:] = prediction.queries.reshape(-1).view(np.uint8)

            cost = self._modules.queries[layer]
            function = step.writing(queries)
            prediction.ready = self._launch("predict", cost, step.rows, (), ((target,),), function, after)
            return prediction

        return predict

    def _record(self, layer: int, batch: Batch, step: _Step, output: Bytes) -> None:
        if self._recorder is None:
            return
        shape = self._engine.shape
        outputs = output.view(np.float32).reshape(len(batch.requests), batch.q_len, -1, shape.head_dim_v)
        queries, keys, values = step.projected
        for i, request in enumerate(batch.requests):
            self._recorder.rows(request.name, layer, keys[i], values[i])
            self._recorder.attended(
                request.name,
                layer,
                batch.positions[i],
                queries[i],
                outputs[i],
                batch.attended[i],
                batch.attended_rows[i],
                _predicted(batch, i),
            )


def _predicted(batch: Batch, i: int) -> Predicted | None:
    held = batch.predicted[i]
    if held is None:
        return None
    positions, prediction = held
    assert prediction.queries is not None, "a prediction is used when it has been made"
    return Predicted(positions, prediction.queries[i, 0])


class _Step:
    """One step of a batch, while it goes through the layers; `before` are those whose rows lie before its own."""

    def __init__(
        self, before: list[Request], requests: list[Request], positions: Int64, activations: Activations | None
    ) -> None:
        self.before = before
        self.requests = requests
        self.positions = positions
        self.projected: tuple[Float32, ...] = ()
        self._activations = activations

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return self.positions.size

    def writing(self, compute: Callable[[Activations, list[Bytes]], None]) -> Function | None:
        """What a `dense` launch calls to fill its outputs; None where there are no numbers."""
        activations = self._activations
        return None if activations is None else lambda _, writes: compute(activations, writes)

    def reading(self, compute: Callable[[Activations, list[Bytes]], None]) -> Function | None:
        """What a `dense` launch calls with its inputs."""
        activations = self._activations
        return None if activations is None else lambda reads, _: compute(activations, reads)


def folded(layer: int, requests: Sequence[Request], queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Queries float32 (n, q_len, q heads, head_dim) as policies take them, each by the table of its request."""
    if all(r.blocks.scales is None for r in requests):
        return queries
    return np.stack([r.blocks.folded(layer, mine) for r, mine in zip(requests, queries, strict=True)])
