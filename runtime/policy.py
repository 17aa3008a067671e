"""Policies: where KV rows live and who attends over them. A policy reads like its paper.

A policy is a class with coroutines that the decoder calls in this order, all on one loop:

1. `admit(request)`: take space for the whole request, or raise TierTooSmall; nothing is kept of a refused request.
2. for each layer `place(request, layer, keys, values)`: put the prompt's rows where they belong, then
   `prefilled(request, layer, queries)` with the prompt's last queries (for policies that rank rows by them).
3. each step `step_begins(requests)`, between two steps: what must not change within one changes here. Then, for each
   layer and each part of the step: `layer_input(layer, batch)` when the layer's input is known, early enough to work
   one layer ahead; then `attend(layer, batch)`, which stores the batch's new rows, attends, leaves the output in
   `batch.output` and returns the completions that the layer's second half has to come after.
4. `observe(completion)` for every command of the platform as it ends; `release(request)` when it is over.

A policy that `serves` (runtime/serving.py) is given requests without a prompt that is placed: `admit`, then `grow`
before each step in which a request gets longer, its prompt among it, in steps of several tokens; `prompt_is_stored`
when the last of them is over. One that takes space as requests grow may be told to `swap_out` and `swap_in`.

State belongs to a request, in `request.state`, and goes with it. The numbers depend on the selected rows only: never on
placement, schedule or the order in which devices finish.

Where keys are codes, every query that a policy sees has the scales of its request's keys in it already, in `prefilled`,
`Batch.queries` and `Batch.predict` alike; so rows of codes, and means of them, are scored and attended as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Cancelled, ConfigurationError, DeviceError, Unsupported, nearest
from tierloop.devices.kernels.contract import CODE_RANGE, Append, Codes, Quantize
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import BlockTable, K, Pool, V
from tierloop.runtime.dtypes import keys_to_bytes, values_to_bytes
from tierloop.runtime.engine import Engine
from tierloop.runtime.loop import all_of

Int64 = NDArray[np.int64]


@dataclass
class Request:
    """A sequence being served. `max_tokens` bounds prompt and generated tokens together."""

    name: str
    tokens: list[int]
    max_tokens: int
    prompt_tokens: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    table: BlockTable | None = None
    model: str = ""
    """Fingerprint of the model's weights, where somebody knows it: what is kept of the request is of this model."""
    is_served: bool = False
    """Whether the serving loop sees to it that the request has room when it grows (runtime/serving.py)."""
    in_steps: bool = False
    """Whether its prompt goes through the model in steps, and is not placed."""
    migrations: int = 0
    """How often its rows have moved to another device for good, while it was served."""
    failure: DeviceError | None = None
    """What ended this request alone, in the middle of a step; its tokens are those from before."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)

    def fail(self, error: DeviceError) -> None:
        """End the request alone; what it failed with first stays, by its cause where the command was only cancelled."""
        cause = error.__cause__ if isinstance(error, Cancelled) else None
        self.failure = self.failure or (cause if isinstance(cause, DeviceError) else error)

    @property
    def blocks(self) -> BlockTable:
        """The request's block table. Raises RuntimeError before `admit`."""
        if self.table is None:
            raise RuntimeError(f"request {self.name} was not admitted")
        return self.table


@dataclass(eq=False)
class Prediction:
    """A layer's queries predicted from an earlier layer's input, as kernels take them.

    `target` is the segment that they are written to, `ready` the completion that makes it valid; `queries` float32
    (n, q_len, q heads, head_dim) are there when it has ended, and stay None where there are no numbers.
    """

    target: Segment
    ready: Completion = field(init=False)
    queries: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Predicted:
    """Rows whose logits were taken with a predicted query: positions of each KV head, queries (q heads, head_dim)."""

    positions: list[Int64]
    queries: NDArray[np.float32]


@dataclass
class Batch:
    """A micro-batch in one layer.

    Segments lie on the memory of the device that runs the modules: `queries` float32 (n, q_len, q heads, head_dim);
    `new_keys` and `new_values` float32 (n, kv heads, q_len, head_dim); `output` float32 (n, q_len, q heads,
    head_dim_v). `ready` is the completion that makes queries and rows valid; `positions` int64 (n, q_len) are the
    logical positions of the new tokens. `attended` may name, per request, the blocks of each KV head that were attended
    (None: all of them), for the oracle; `attended_rows` likewise the positions, where rows are chosen and not blocks.
    `predicted` names, per request, the positions of each KV head whose logits were taken with a prediction.
    """

    requests: list[Request]
    positions: Int64
    queries: Segment
    new_keys: Segment
    new_values: Segment
    output: Segment
    ready: Completion
    scale: float
    attended: list[list[Int64] | None] = field(default_factory=list)
    attended_rows: list[list[Int64] | None] = field(default_factory=list)
    predicted: list[tuple[list[Int64], Prediction] | None] = field(default_factory=list)
    predict: Callable[[int, Segment], Prediction] | None = None
    """A layer's queries, predicted from this layer's input where the modules run, into a segment there."""
    before: Sequence[Request] = ()
    """Requests of the same step that go through the layers beside these (waves and parts), and come before them."""
    part: int = 0
    """Which of the batches of the step this is: what is kept for a layer until its commands end is kept for each."""

    @property
    def q_len(self) -> int:
        """New tokens per request in this step."""
        return int(self.positions.shape[1])


class Policy:
    """Base of all policies: storing new rows is shared; where things go and who attends is each policy's own.

    `exact` says that every row is attended, so the tokens must equal dense attention. Options are keyword arguments
    with defaults, checked by `make`.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    mechanisms: ClassVar[tuple[str, ...]] = ()
    """What can be switched off by itself: names for the option `without`, where a policy has it."""

    serves: ClassVar[bool] = False
    """Whether prompts can come as steps of several tokens, and `admit` does without `place` and `prefilled`."""

    waves: int = 1
    """Into how many parts the requests of a step are divided, each of which goes through the layers on its own.

    With more than one, hooks are called for several layers at a time, for different requests.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shape = engine.shape

    async def admit(self, request: Request) -> None:
        """Take space for the request. Raises TierTooSmall."""
        raise NotImplementedError

    async def place(self, request: Request, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Store the prompt's rows of one layer: float32 (kv heads, tokens, head_dim) each."""
        table = request.blocks
        count = keys.shape[1]
        for side in (K, V):
            for head in range(self.shape.num_kv_heads):
                for pool, blocks in self.layout(request, layer, side, head, np.arange(self.shape.num_blocks(count))):
                    if len(blocks):
                        table.put(layer, side, head, blocks, pool)
        table.length[layer] = count
        writes = self.measure(request, layer, keys)
        writes += [w for side, rows in ((K, keys), (V, values)) for w in self._write_rows(request, layer, side, rows)]
        await all_of(writes)
        table.seal(layer)

    def measure(self, request: Request, layer: int, keys: NDArray[np.float32]) -> list[Completion]:
        """Where keys are codes, take their scales from the prompt's keys and store them with the modules."""
        scales = request.blocks.scales
        if scales is None or self.engine.phantom:
            return []
        scales.measure(layer, keys)
        return [
            self.engine.write(
                scales.place(layer), np.ascontiguousarray(scales.values[layer]).view(np.uint8).reshape(-1)
            )
        ]

    async def prefilled(self, request: Request, layer: int, queries: NDArray[np.float32]) -> None:
        """The prompt's last queries of one layer: float32 (n, q heads, head_dim)."""

    def grow(self, request: Request, num_tokens: int) -> None:
        """Take what the request needs to hold `num_tokens`, where `admit` has not. Raises TierTooSmall."""

    def could_hold(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens could be admitted with nobody else there, as far as the policy knows."""
        return True

    def is_ready(self, request: Request) -> bool:
        """Whether the next chunk of the request's prompt may come; where not, rows are still on their way elsewhere."""
        return True

    async def something_moved(self) -> None:
        """Returns when some of what `is_ready` waits for is over."""

    def frees(self, request: Request) -> bool:
        """Whether taking the request's space away gives others much room to grow: such requests are preempted first."""
        return True

    def free_nbytes(self) -> dict[str, int]:
        """Bytes by memory that requests could still take, where the policy knows."""
        return {}

    async def prompt_is_stored(self, request: Request) -> None:
        """The prompt went through the model in steps; returns when its rows are where they belong."""

    async def swap_out(self, request: Request) -> None:
        """Move the request out of the way, to the host's memory. Raises TierTooSmall, Unsupported."""
        raise Unsupported(self.name, "swap", "the policy takes all space at admission, and nobody is preempted")

    async def swap_in(self, request: Request) -> None:
        """Bring a request back that was moved out of the way. Raises TierTooSmall, and it stays where it is."""
        raise Unsupported(self.name, "swap", "the policy swaps nobody out")

    async def step_begins(self, requests: Sequence[Request]) -> None:
        """A step of these requests is about to begin, and none is under way."""

    async def layer_input(self, layer: int, batch: Batch) -> None:
        """A layer's input is known; work for this layer or the next may start."""

    async def attend(self, layer: int, batch: Batch) -> list[Completion]:
        """Store the new rows, attend, leave the output; returns what the next stage comes after."""
        raise NotImplementedError

    async def release(self, request: Request) -> None:
        """The request is over: give its space back."""
        if request.table is not None:
            request.table.release()
            if request.table.scales is not None:
                self.engine.drop(request.table.scales.region)
            request.table = None
        request.state.clear()

    def placement(self, request: Request) -> dict[str, int]:
        """Bytes of the request's rows by memory, each copy of them counted."""
        return request.blocks.nbytes_by_memory()

    def tiers(self) -> list[str]:
        """Memories that the policy was told to keep rows on; a result says so where none has come there."""
        return []

    def observe(self, completion: Completion) -> None:
        """A command of the platform has ended."""

    def report(self) -> dict[str, Any]:
        """What the policy did that no command shows, as plain data for the result: its own settings over time."""
        return {}

    def layout(self, request: Request, layer: int, side: int, head: int, blocks: Int64) -> list[tuple[Pool, Int64]]:
        """Which pool takes which of these new blocks; together they are `blocks`."""
        raise NotImplementedError

    # -- shared by policies ------------------------------------------------------------------------------------------

    def open_blocks(self, layer: int, batch: Batch) -> None:
        """Give places to blocks that the batch's new rows reach first, and count the rows as held."""
        for request, positions in zip(batch.requests, batch.positions, strict=True):
            table = request.blocks
            first, last = int(positions[0]), int(positions[-1])
            assert first == int(table.length[layer]), "rows are appended in order"
            have, need = table.num_blocks(layer), self.shape.num_blocks(last + 1)
            if need > have:
                fresh = np.arange(have, need)
                for side in (K, V):
                    for head in range(self.shape.num_kv_heads):
                        for pool, blocks in self.layout(request, layer, side, head, fresh):
                            if len(blocks):
                                table.put(layer, side, head, blocks, pool)
            table.length[layer] = last + 1

    def append(self, layer: int, batch: Batch, after: list[Completion] | None = None) -> Completion:
        """Store the batch's new rows in their blocks, by the executor that computed them."""
        keys, values = self._places_of_new_rows(layer, batch)
        done = self.store_rows(layer, batch, keys, values, after)
        for request in batch.requests:
            request.blocks.seal(layer)
        return done

    def _places_of_new_rows(self, layer: int, batch: Batch) -> tuple[Operand, Operand]:
        """Where the batch's new rows go, K and V: head-major, the requests one after the other."""
        if batch.q_len == 1:
            places = [
                r.blocks.new_row(layer, p) for r, (p,) in zip(batch.requests, batch.positions.tolist(), strict=True)
            ]
            pools = {place[0] if place else None for place in places}
            (pool, *others) = pools
            if pool is not None and not others:  # they are all in one place: one segment, and not one for each row
                offsets = np.concatenate([place[1] for place in places if place], axis=1)
                keys, values = (
                    Segment(pool.region, Spans.equal(offsets[side], self.shape.row_nbytes(side))) for side in (K, V)
                )
                return (keys,), (values,)
        targets: list[list[Segment]] = [[], []]
        for side in (K, V):
            for request, positions in zip(batch.requests, batch.positions, strict=True):
                targets[side].extend(request.blocks.row_segments(layer, side, int(positions[0]), batch.q_len))
        return tuple(targets[K]), tuple(targets[V])

    def store_rows(
        self, layer: int, batch: Batch, keys: Operand, values: Operand, after: list[Completion] | None = None
    ) -> Completion:
        """Convert the new rows into their places: head-major, the requests one after the other."""
        engine, shape, dtype = self.engine, self.shape, self.shape.dtype
        after = [batch.ready, *(after or [])]
        if dtype not in CODE_RANGE:
            reads = ((batch.new_keys, batch.new_values),)
            return engine.launch(engine.dense, Append(dtype), reads, ((*keys, *values),), after)
        codes: Codes = dtype  # type: ignore[assignment]  # CODE_RANGE has them all
        held = [r.blocks.scales for r in batch.requests]
        scales = tuple(s.place(layer) for s in held if s is not None)
        assert len(scales) == len(held), "requests whose keys are codes have scales"
        which = np.repeat(np.arange(len(held) * shape.num_kv_heads, dtype=np.int64), batch.q_len)
        of_keys = Quantize(codes, shape.head_dim, "channel", which)
        first = engine.launch(engine.dense, of_keys, ((batch.new_keys,), scales), (keys,), after)
        of_values = Quantize(codes, shape.head_dim_v, "row")
        return engine.launch(engine.dense, of_values, ((batch.new_values,),), (values,), [*after, first])

    def splits(self, blocks: Int64, length: int) -> Int64:
        """Split ids that hold rows of the given blocks: int64, ascending."""
        per_block = self.shape.block_tokens // self.shape.split_tokens
        ids = (blocks[:, None] * per_block + np.arange(per_block)).ravel()
        return np.asarray(ids[ids * self.shape.split_tokens < length], dtype=np.int64)

    def stored_rows(self, request: Request, layer: int, side: int, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Rows (heads, tokens, elements) of K or V as they are stored: uint8 (heads, tokens, bytes of a row)."""
        dtype, held = self.shape.dtype, request.blocks.scales
        if side == K:
            stored = keys_to_bytes(rows, dtype, None if held is None else held.values[layer])
        else:
            stored = values_to_bytes(rows, dtype)
        return stored.reshape(*rows.shape[:2], -1)

    def _write_rows(self, request: Request, layer: int, side: int, rows: NDArray[np.float32]) -> list[Completion]:
        """Write a layer's K or V rows from the host into the blocks that have places.

        Full blocks go from where the framework left them, or from their one conversion, without another copy: a command
        for each stretch of neighbouring blocks of a head in one pool. What does not fill whole units of a medium is
        padded with zeros first. In a phantom run only media that remember where they were written (drives) are, from
        buffers that nobody touches.
        """
        shape, table = self.shape, request.blocks
        heads, count, _ = rows.shape
        stored: NDArray[np.uint8] | None = None
        if not self.engine.phantom:
            stored = self.stored_rows(request, layer, side, rows)
        full, block_nbytes = count // shape.block_tokens, shape.block_tokens * shape.row_nbytes(side)
        done = []
        for head in range(heads):
            pools = table.pool[layer, side, head, : shape.num_blocks(count)]
            offsets = table.offset[layer, side, head]
            borders = np.flatnonzero(np.concatenate(([True], pools[1:] != pools[:-1], [True])))
            for first, last in pairwise(borders.tolist()):
                if pools[first] < 0:
                    continue
                pool = table.pools[int(pools[first])]
                if stored is None and pool.grid == 1:
                    continue
                whole = min(last, full) if block_nbytes % pool.grid == 0 else first
                if whole > first:
                    data = (
                        np.zeros((whole - first) * block_nbytes, dtype=np.uint8)
                        if stored is None
                        else stored[head, first * shape.block_tokens : whole * shape.block_tokens].reshape(-1)
                    )
                    target = Segment(pool.region, Spans.equal(offsets[first:whole], block_nbytes))
                    done.append(self.engine.write(target, data))
                if last > whole:
                    padded = np.zeros((last - whole, pool.slot_nbytes), dtype=np.uint8)
                    if stored is not None:
                        rest = stored[head, whole * shape.block_tokens : last * shape.block_tokens]
                        for block in range(last - whole):
                            part = rest[block * shape.block_tokens : (block + 1) * shape.block_tokens].reshape(-1)
                            padded[block, : len(part)] = part
                    target = Segment(pool.region, Spans.equal(offsets[whole:last], pool.slot_nbytes))
                    done.append(self.engine.write(target, padded.reshape(-1)))
        return done


LARGEST = 2.0**62
"""Numbers from outside lie below this, whatever they count: more would not fit arrays of positions and sizes."""


def number(what: str, value: Any, low: float, high: float = math.inf) -> float:
    """A finite number from outside within [low, high]. Raises ConfigurationError that names what it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{what} is {value!r}; it must be a number")
    if not low <= value <= min(high, LARGEST):
        limit = f"at least {low:g}" if math.isinf(high) and value < low else f"from {low:g} to {min(high, LARGEST):g}"
        raise ConfigurationError(f"{what} is {value}; it must be {limit}")
    return value


def whole_numbers(policy: str, options: Mapping[str, tuple[Any, float] | tuple[Any, float, float]]) -> None:
    """Check options by name, each with the least that is allowed, and the most where there is one.

    Raises ConfigurationError that names the option.
    """
    for option, (value, low, *high) in options.items():
        if number(f"{policy}: {option}", value, low, *high) != int(value):
            raise ConfigurationError(f"{policy}: {option} is {value}; it must be a whole number")


def share_above_zero(policy: str, budget: Any) -> None:
    """Check the option `budget`. Raises ConfigurationError unless it is above 0 and at most 1."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ConfigurationError(f"{policy}: budget is {budget!r}; it must be a number")
    if not 0 < budget <= 1:
        raise ConfigurationError(f"{policy}: budget is {budget:g}; it must be above 0 and at most 1")


def switched_off(kind: type[Policy], without: Any) -> frozenset[str]:
    """The option `without` of a policy with mechanisms. Raises ConfigurationError unless it lists some of them."""
    if isinstance(without, str) or not isinstance(without, Sequence):
        raise ConfigurationError(f"{kind.name}: without is {without!r}; it must be a list of mechanisms")
    for name in without:
        if name not in kind.mechanisms:
            raise ConfigurationError(f"{kind.name}: without {name!r}: {nearest(str(name), list(kind.mechanisms))}")
    return frozenset(without)


def check_options(kind: type[Policy], options: dict[str, Any]) -> None:
    """Raises ConfigurationError for an option that the policy does not have."""
    known = [p for p in inspect.signature(kind.__init__).parameters if p not in ("self", "engine")]
    for option in options:
        if option not in known:
            raise ConfigurationError(f"policy {kind.name} has no option {option!r}: {nearest(option, known)}")


def make(kind: type[Policy], engine: Engine, options: dict[str, Any]) -> Policy:
    """Build a policy with options from outside. Raises ConfigurationError for an unknown option."""
    check_options(kind, options)
    return kind(engine, **options)
