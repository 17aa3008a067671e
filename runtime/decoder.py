"""The layer-stepping decoder: drives a model's modules stage by stage, with a policy inside every layer.

Per layer and micro-batch: `qkv` (norm, projections, rotary positions), attention by the policy, `mlp` (output
projection and MLP); at the end `head` (norm, logits, argmax). Each stage is a `dense` launch on the device that runs
the modules, so its time is charged in every kind of time; what crosses to other devices (queries, rows, output) lies
in that device's memory and moves by commands. Where keys are codes, `qkv` multiplies the queries by the scales of their
request's keys, so that nobody else needs them. The host stays one layer ahead, and waits for the tokens of each step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Dense
from tierloop.devices.regions import Segment
from tierloop.runtime.engine import Engine
from tierloop.runtime.modules import Modules, StageCost
from tierloop.runtime.oracle import Recorder
from tierloop.runtime.policy import Batch, Policy, Request
from tierloop.runtime.prefill import Prefill

Int64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]
ACTIVATION_ITEM = 4
LAYERS_AHEAD = 1
"""Layers that are submitted before the one before them has ended. Further ahead, one burst of submissions at the start
of a step would keep the clock's thread from noticing what falls due meanwhile."""


class Decoder:
    """Decodes requests with one model, engine and policy; at most `max_rows` new tokens (requests · q_len) per step."""

    def __init__(
        self, modules: Modules, engine: Engine, policy: Policy, max_rows: int = 1, recorder: Recorder | None = None
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
        """Admit a request whose prompt is prefilled and place its rows. Raises TierTooSmall, with nothing kept."""
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
        if self._recorder is not None:
            scales = request.blocks.scales
            self._recorder.admitted(request.name, prefill, None if scales is None else scales.values)

    async def step(self, requests: Sequence[Request], q_len: int = 1) -> list[int]:
        """Run the last `q_len` tokens of each request through the model; returns the next token of each, appended."""
        assert 0 < len(requests) * q_len <= self._max_rows, "more rows than the decoder was made for"
        tokens = torch.tensor([r.tokens[-q_len:] for r in requests])
        positions = np.array([range(len(r.tokens) - q_len, len(r.tokens)) for r in requests], dtype=np.int64)
        shared = _Activations(self._modules, tokens, positions)
        ended: list[list[Completion]] = [[]]
        for layer in range(self._engine.shape.num_layers):
            ended.append(await self._layer(layer, list(requests), positions, shared, ended[-1]))
            for completion in ended[-LAYERS_AHEAD - 1]:
                await completion
        return await self._head(list(requests), shared, ended[-1])

    async def _layer(
        self, layer: int, requests: list[Request], positions: Int64, shared: _Activations, after: list[Completion]
    ) -> list[Completion]:
        queries, keys, values, output = self._segments(layer, positions.size)
        rows = positions.size

        def qkv(_: list[Bytes], writes: list[Bytes]) -> None:
            shared.projected = shared.project(layer)
            projected, new_keys, new_values = shared.projected
            for request, mine in zip(requests, new_keys, strict=True):
                request.blocks.counted(layer, mine)
            for array, rows in zip(writes, (folded(layer, requests, projected), new_keys, new_values), strict=True):
                array[:] = rows.reshape(-1).view(np.uint8)

        cost = self._modules.projections[layer]
        ready = self._launch("qkv", cost, rows, (), ((queries,), (keys,), (values,)), qkv, after)
        batch = Batch(
            requests,
            positions,
            queries,
            keys,
            values,
            output,
            ready,
            self._modules.scale,
            [None] * len(requests),
            [None] * len(requests),
            self._predictor(shared, requests, rows, after),
        )
        await self._policy.layer_input(layer, batch)
        attended = await self._policy.attend(layer, batch)

        def mlp(reads: list[Bytes], _: list[Bytes]) -> None:
            self._record(layer, batch, shared, reads[0])
            shared.finish(layer, reads[0])

        cost = self._modules.finishes[layer]
        return [self._launch("mlp", cost, rows, ((output,),), (), mlp, attended)]

    async def _head(self, requests: list[Request], shared: _Activations, after: list[Completion]) -> list[int]:
        count = len(requests)
        place = self._stage.at(self._stage.nbytes - 8 * self._max_rows, 8 * count)

        def head(_: list[Bytes], writes: list[Bytes]) -> None:
            writes[0][:] = shared.next_tokens().view(np.uint8)

        done = self._launch("head", self._modules.head_cost, count, (), ((place,),), head, after)
        into = np.empty(8 * count, dtype=np.uint8)
        await self._engine.read(place, into, [done])
        tokens: list[int] = into.view(np.int64).tolist()
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        return tokens

    def _launch(
        self,
        label: str,
        cost: StageCost,
        rows: int,
        reads: tuple[Operand, ...],
        writes: tuple[Operand, ...],
        function: Callable[[list[Bytes], list[Bytes]], None],
        after: Sequence[Completion],
    ) -> Completion:
        activations = rows * ACTIVATION_ITEM * self._modules.core.config.hidden_size * 2
        args = Dense(label, cost.flops_per_token * rows, cost.weight_nbytes, activations, function)
        return self._engine.launch(self._engine.dense, args, reads, writes, after)

    def _segments(self, layer: int, rows: int) -> tuple[Segment, Segment, Segment, Segment]:
        offset = layer * self._max_rows * sum(self._sizes)
        segments = []
        for size in self._sizes:
            segments.append(self._stage.at(offset, rows * size))
            offset += self._max_rows * size
        queries, keys, values, output = segments
        return queries, keys, values, output

    def _predictor(
        self, shared: _Activations, requests: list[Request], rows: int, after: list[Completion]
    ) -> Callable[[int], Awaitable[NDArray[np.float32]]]:
        async def project(layer: int) -> NDArray[np.float32]:
            found: list[NDArray[np.float32]] = []

            def predict(_: list[Bytes], __: list[Bytes]) -> None:
                found.append(folded(layer, requests, shared.project(layer)[0]))

            await self._launch("predict", self._modules.projections[layer], rows, (), (), predict, after)
            return found[0]

        return project

    def _record(self, layer: int, batch: Batch, shared: _Activations, output: Bytes) -> None:
        if self._recorder is None:
            return
        shape = self._engine.shape
        outputs = output.view(np.float32).reshape(len(batch.requests), batch.q_len, -1, shape.head_dim_v)
        queries, keys, values = shared.projected
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
            )


def folded(layer: int, requests: Sequence[Request], queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Queries float32 (n, q_len, q heads, head_dim) as policies take them, each by the table of its request."""
    if all(r.blocks.scales is None for r in requests):
        return queries
    return np.stack([r.blocks.folded(layer, mine) for r, mine in zip(requests, queries, strict=True)])


class _Activations:
    """The activations of one step, in the framework's tensors; touched by one stage at a time."""

    def __init__(self, modules: Modules, tokens: torch.Tensor, positions: Int64) -> None:
        self._modules = modules
        with torch.inference_mode():
            self._hidden = modules.embed(tokens)
            self._rotary = modules.rotary(self._hidden, torch.from_numpy(positions))
        self.projected: tuple[NDArray[np.float32], ...] = ()

    def project(self, layer: int) -> tuple[NDArray[np.float32], ...]:
        """Queries (n, q_len, heads, d), keys and values (n, kv heads, q_len, d), float32 C order."""
        with torch.inference_mode():
            queries, keys, values = self._modules.project(layer, self._hidden, self._rotary)
            return tuple(t.float().contiguous().numpy() for t in (queries.transpose(1, 2), keys, values))

    def finish(self, layer: int, output: Bytes) -> None:
        """Take the attention output (n, q_len, heads, d_v), float32, through the rest of the layer."""
        with torch.inference_mode():
            attended = torch.from_numpy(output.view(np.float32).copy()).view(*self._hidden.shape[:2], -1)
            self._hidden = self._modules.finish(layer, self._hidden, attended.to(self._hidden.dtype))

    def next_tokens(self) -> Int64:
        """Greedy next token of each request: int64 (n,)."""
        with torch.inference_mode():
            tokens: Int64 = self._modules.logits(self._hidden).argmax(dim=-1).numpy()
        return tokens
