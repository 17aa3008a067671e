"""The layer-stepping decoder: drives a model's modules stage by stage, with a policy inside every layer.

Per layer and micro-batch: `qkv` (norm, projections, rotary positions), attention by the policy, `mlp` (output
projection and MLP); at the end `head` (norm, logits, argmax). Each stage is a `dense` launch on the device that runs
the modules, so its time is charged in every kind of time; what crosses to other devices (queries, rows, output) lies
in that device's memory and moves by commands. Where keys are codes, `qkv` multiplies the queries by the scales of their
request's keys, so that nobody else needs them. The host stays one layer ahead, and waits for the tokens of each step.

A step may have several *parts*, each with requests that take as many new tokens as each other: requests that decode
beside chunks of prompts. Projections, MLP and head are of all parts together and read the weights once; attention is
each part's own. A policy may ask for `waves` instead: the requests of a step are divided, and each wave goes through
its layers at its own pace, so that one's projections and MLP fill the time in which another waits for its rows. Weights
are read by each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
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


@dataclass(frozen=True, eq=False)
class Part:
    """Requests of a step with `q_len` new tokens each: the last ones, or those before position `ends[i]`.

    `next_token` says whether the token after them is wanted; after a chunk of a prompt it is not.
    """

    requests: Sequence[Request]
    q_len: int = 1
    ends: Sequence[int] | None = None
    next_token: bool = True

    @property
    def positions(self) -> Int64:
        """Of the new tokens: int64 (requests, q_len)."""
        ends = self.ends or [len(r.tokens) for r in self.requests]
        return np.array([range(end - self.q_len, end) for end in ends], dtype=np.int64)


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
            with suppress(DeviceError):  # commands may be under way; what went wrong is said, and not that
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
        (tokens,) = await self.advance([Part(list(requests), q_len)])
        return tokens

    async def advance(self, parts: Sequence[Part]) -> list[list[int]]:
        """A step of several parts; the next tokens of each, appended, and none of a part that wants none.

        Raises the failure of the first request where no other is left.
        """
        tokens, _ = await self._step(parts)
        for part, mine in zip(parts, tokens, strict=True):
            for request, token in zip(part.requests, mine, strict=part.next_token):
                if request.failure is None:
                    request.tokens.append(token)
        return tokens

    async def score(self, requests: Sequence[Request], targets: Sequence[int]) -> list[float]:
        """A step in which the next tokens are given: appends them, returns their log probabilities (natural)."""
        _, logits = await self._step([Part(list(requests))])
        for request in requests:
            if request.failure is not None:
                raise request.failure
        assert logits is not None, "a phantom run has no probabilities"
        for request, target in zip(requests, targets, strict=True):
            request.tokens.append(target)
        scored: list[float] = log_probabilities(logits, targets).tolist()
        return scored

    async def _step(self, parts: Sequence[Part]) -> tuple[list[list[int]], Float32 | None]:
        everybody = [request for part in parts for request in part.requests]
        rows = sum(len(part.requests) * part.q_len for part in parts)
        assert 0 < rows <= self._max_rows, "more rows than the decoder was made for"
        await self._policy.step_begins(everybody)
        waves = self._waves(parts)
        spawn = self._engine.loop.spawn
        tasks = [spawn(self._wave(wave)) for wave in waves]
        found = [await task for task in tasks]
        if all(request.failure is not None for request in everybody):
            raise everybody[0].failure or AssertionError
        logits = [mine for _, mine in found if mine is not None]
        tokens = [mine for each, _ in found for mine in each]
        if len(waves) > 1:  # what was divided is one part again
            tokens = [[token for mine in tokens[: len(waves)] for token in mine], *tokens[len(waves) :]]
        return tokens, np.concatenate(logits) if logits else None

    def _waves(self, parts: Sequence[Part]) -> list[list[_Part]]:
        """The parts of the step as they go through the layers together; waves divide the first of them."""
        count = min(self._policy.waves, len(parts[0].requests))
        borders = [len(parts[0].requests) * wave // count for wave in range(count + 1)]
        ends = parts[0].ends
        divided = [
            replace(parts[0], requests=parts[0].requests[a:b], ends=None if ends is None else ends[a:b])
            for a, b in pairwise(borders)
        ]
        waves: list[list[_Part]] = [[] for _ in range(count)]
        before: list[Request] = []
        row = 0
        for number, part in enumerate([*divided, *parts[1:]]):
            positions = part.positions
            tokens = [r.tokens[p[0] : p[-1] + 1] for r, p in zip(part.requests, positions.tolist(), strict=True)]
            activations = self._modules.begin(tokens, positions)
            mine = _Part(number, list(before), list(part.requests), row, positions, activations, part.next_token)
            waves[min(number, count - 1)].append(mine)
            before += part.requests
            row += mine.rows
        return waves

    async def _wave(self, parts: list[_Part]) -> tuple[list[list[int]], Float32 | None]:
        """Some requests of a step, through all layers; others may go through theirs at the same time."""
        ended: list[list[Completion]] = [[]]
        for layer in range(self._engine.shape.num_layers):
            ended.append(await self._layer(layer, parts, ended[-1]))
            for completion in ended[-LAYERS_AHEAD - 1]:
                await completion
        return await self._head(parts, ended[-1])

    async def _layer(self, layer: int, parts: list[_Part], after: list[Completion]) -> list[Completion]:
        places = [self._segments(layer, part) for part in parts]
        functions = [self._projecting(layer, part) for part in parts]
        rows = sum(part.rows for part in parts)
        writes = tuple((place,) for four in places for place in four[:3])
        cost = self._modules.projections[layer]
        ready = self._launch("qkv", cost, rows, (), writes, _one_after_the_other(functions, 0, 3), after)
        batches = []
        for part, (queries, keys, values, output) in zip(parts, places, strict=True):
            nobody: list[None] = [None] * len(part.requests)
            batches.append(
                Batch(
                    part.requests,
                    part.positions,
                    queries,
                    keys,
                    values,
                    output,
                    ready,
                    self._modules.scale,
                    [*nobody],
                    [*nobody],
                    [*nobody],
                    self._predictor(part, after),
                    part.before,
                    part.number,
                )
            )
        for batch in batches:
            await self._policy.layer_input(layer, batch)
        if len(batches) == 1:
            attended = await self._policy.attend(layer, batches[0])
        else:
            tasks = [self._engine.loop.spawn(self._policy.attend(layer, batch)) for batch in batches]
            attended = [completion for task in tasks for completion in await task]
        functions = [self._finishing(layer, part, batch) for part, batch in zip(parts, batches, strict=True)]
        reads = tuple((four[3],) for four in places)
        cost = self._modules.finishes[layer]
        return [self._launch("mlp", cost, rows, reads, (), _one_after_the_other(functions, 1, 0), attended)]

    def _projecting(self, layer: int, part: _Part) -> Function | None:
        """What fills a part's queries and new rows."""
        activations = part.activations
        if activations is None:
            return None

        def project(_: list[Bytes], writes: list[Bytes]) -> None:
            part.projected = activations.project(layer)
            projected, new_keys, new_values = part.projected
            for request, mine in zip(part.requests, new_keys, strict=True):
                request.blocks.counted(layer, mine)
            for array, rows in zip(
                writes, (folded(layer, part.requests, projected), new_keys, new_values), strict=True
            ):
                array[:] = rows.reshape(-1).view(np.uint8)

        return project

    def _finishing(self, layer: int, part: _Part, batch: Batch) -> Function | None:
        """What takes a part's attention output through the rest of the layer."""
        activations = part.activations
        if activations is None:
            return None

        def finish(reads: list[Bytes], _: list[Bytes]) -> None:
            self._record(layer, batch, part, reads[0])
            activations.finish(layer, reads[0])

        return finish

    async def _head(self, parts: list[_Part], after: list[Completion]) -> tuple[list[list[int]], Float32 | None]:
        """The next tokens of each part, as the device gives them, and the logits behind them."""
        asking = [part for part in parts if part.next_token]
        if not asking:
            for completion in after:
                await completion
            return [[] for _ in parts], None
        found: list[Float32] = []
        functions = [_reading_off(part, found) for part in asking]
        first = len(asking[0].before)
        count = sum(len(part.requests) for part in asking)
        place = self._stage.at(self._stage.nbytes - 8 * (self._max_rows - first), 8 * count)
        offsets = np.cumsum([0, *(8 * len(part.requests) for part in asking)]).tolist()
        writes = tuple((place.region.at(place.spans.array[0, 0] + a, b - a),) for a, b in pairwise(offsets))
        done = self._launch(
            "head", self._modules.head_cost, count, (), writes, _one_after_the_other(functions, 0, 1), after
        )
        into = np.zeros(8 * count, dtype=np.uint8)
        await self._engine.read(place, into, [done])
        said = iter(into.view(np.int64).tolist())
        tokens = [[next(said) for _ in part.requests] if part.next_token else [] for part in parts]
        return tokens, np.concatenate(found) if found else None

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

    def _segments(self, layer: int, part: _Part) -> tuple[Segment, Segment, Segment, Segment]:
        offset = layer * self._max_rows * sum(self._sizes)
        segments = []
        for size in self._sizes:
            segments.append(self._stage.at(offset + part.row * size, part.rows * size))
            offset += self._max_rows * size
        queries, keys, values, output = segments
        return queries, keys, values, output

    def _predictor(self, part: _Part, after: list[Completion]) -> Callable[[int, Segment], Prediction]:
        activations = part.activations

        def predict(layer: int, target: Segment) -> Prediction:
            prediction = Prediction(target)

            def queries(_: list[Bytes], writes: list[Bytes]) -> None:
                assert activations is not None, "there are numbers"
                prediction.queries = folded(layer, part.requests, activations.queries(layer))
                writes[0][:] = prediction.queries.reshape(-1).view(np.uint8)

            cost, function = self._modules.queries[layer], None if activations is None else queries
            prediction.ready = self._launch("predict", cost, part.rows, (), ((target,),), function, after)
            return prediction

        return predict

    def _record(self, layer: int, batch: Batch, step: _Part, output: Bytes) -> None:
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


@dataclass
class _Part:
    """One part of a step, while it goes through the layers; `before` are those whose rows lie before its own."""

    number: int
    before: list[Request]
    requests: list[Request]
    row: int
    positions: Int64
    activations: Activations | None
    next_token: bool
    projected: tuple[Float32, ...] = ()

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return self.positions.size


def _reading_off(part: _Part, found: list[Float32]) -> Function | None:
    """What fills a part's next tokens, and keeps the logits."""
    activations = part.activations
    if activations is None:
        return None

    def head(_: list[Bytes], writes: list[Bytes]) -> None:
        found.append(activations.logits())
        writes[0][:] = found[-1].argmax(axis=-1).astype(np.int64).view(np.uint8)

    return head


def _one_after_the_other(functions: Sequence[Function | None], reads: int, writes: int) -> Function | None:
    """One function for the operands of all, so many for each; None where there are no numbers."""
    if len(functions) == 1:
        return functions[0]
    if any(function is None for function in functions):
        return None

    def all_of_them(given: list[Bytes], filled: list[Bytes]) -> None:
        for number, function in enumerate(functions):
            assert function is not None, "there are numbers"
            function(given[number * reads : (number + 1) * reads], filled[number * writes : (number + 1) * writes])

    return all_of_them


def folded(layer: int, requests: Sequence[Request], queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """Queries float32 (n, q_len, q heads, head_dim) as policies take them, each by the table of its request."""
    if all(r.blocks.scales is None for r in requests):
        return queries
    return np.stack([r.blocks.folded(layer, mine) for r, mine in zip(requests, queries, strict=True)])
