"""Attention logit parallelism, as HybridGen does it: logits of host rows on the cores, those of GPU rows on the GPU.

`LogitsCalculator` works where the keys are. It scans the host rows of each request with a query, picks the best of each
KV head, and sends their logits and their V rows to the GPU; keys never cross the link. `TokenConcatenator` works on the
GPU: it computes the logits of the GPU's rows, and everything is combined in logical order by one softmax. The order is
made by where each side writes: logits of a KV head come to lie end to end, host rows before GPU rows, since the host's
are the older ones.

Lists are numbered (request, KV head). Everything is ordered by completions; only the choice itself is awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tierloop.devices.commands import Operand
from tierloop.devices.completion import Completion
from tierloop.devices.kernels.contract import Combine, Gather, Logits, Topk
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans
from tierloop.runtime.blocks import K, Rows, V, join
from tierloop.runtime.decisions import Question
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.policy import Batch, Int64, Prediction, Request
from tierloop.runtime.workspace import Workspace

SLOTS = 3
"""Layers whose space is in use at once: the one that ends, the one that is attended, and the one worked on ahead."""
SELECT, LOGITS, GATHER, TRANSFER = "select", "cpu logits", "gather", "transfer"
GPU_LOGITS, COMBINE = "gpu logits", "combine"
"""Stages under which commands are counted."""


@dataclass(frozen=True)
class Scan:
    """The host rows of one request that are looked at, blocks [first, last), and how many are wanted of them."""

    first: int
    last: int
    wanted: int
    """Rows of each KV head; at least all of them means all, and nothing has to be chosen."""

    def whole(self, block_rows: int) -> bool:
        """Whether every host row of the request is wanted."""
        return not self.first and self.wanted >= self.last * block_rows


class Layout(NamedTuple):
    """Rows of each list: those of the host and, right after them, those of the GPU; int64 (lists,) each."""

    host: Int64
    gpu: Int64

    @property
    def num_rows(self) -> int:
        """All rows."""
        return int(self.host.sum() + self.gpu.sum())

    def starts(self) -> tuple[Int64, Int64]:
        """Where the host's and the GPU's rows of each list begin, counted in rows."""
        ends = np.cumsum(self.host + self.gpu)
        return ends - self.host - self.gpu, ends - self.gpu


@dataclass(eq=False)
class Chosen:
    """Host rows that take part in a layer: per list their positions, ascending, and what is on its way to the GPU."""

    positions: list[Int64]
    num_heads: int
    layout: Layout
    everything: bool
    """Every scanned row of every request was taken."""
    scanned: Completion | None = None
    arriving: list[Completion] = field(default_factory=list)
    """V rows (and keys, where those are sent) and logits, as far as they have been sent."""
    has_logits: bool = False
    prediction: Prediction | None = None
    """The query that the logits were taken with, where it was not the true one."""

    rows: Rows | None = None
    """Operands of the chosen rows, once somebody has needed them."""

    @cached_property
    def runs(self) -> tuple[Int64, Int64, Int64]:
        """Runs of neighbouring rows, int64 (n, 3); the rows of each; and the first run of each list, (lists + 1,)."""
        which = np.repeat(np.arange(len(self.positions)), self.layout.host)
        positions = np.concatenate(self.positions)
        new = np.ones(len(positions), dtype=bool)
        new[1:] = (positions[1:] != positions[:-1] + 1) | (which[1:] != which[:-1])
        starts = np.flatnonzero(new)
        of_run = which[starts]
        runs = np.stack((of_run // self.num_heads, of_run % self.num_heads, positions[starts]), axis=1)
        borders = np.searchsorted(of_run, np.arange(len(self.positions) + 1))
        return runs, np.diff(np.append(starts, len(positions))), borders


def logit_segment(work: Workspace, layer: int, layout: Layout, item: int, of_host: bool) -> Segment:
    """Where the logits of the host's or the GPU's rows come to lie, `item` bytes a row: one span per list."""
    work.at("logits", layer, layout.num_rows * item)
    region, base = work.place("logits", layer)
    starts, counts = layout.starts()[not of_host], layout.host if of_host else layout.gpu
    spans = np.stack((base + starts * item, counts * item), axis=1)
    return Segment(region, Spans(spans[counts > 0]))


def logits_of(engine: Engine, batch: Batch, runs: Int64) -> Logits:
    """Arguments of `logits` over the given runs."""
    shape = engine.shape
    return Logits(
        shape.dtype,
        len(batch.requests),
        shape.num_kv_heads,
        shape.group,
        batch.q_len,
        shape.head_dim,
        batch.scale,
        runs,
        batch.positions,
    )


def _stretches(first: Int64, lengths: Int64) -> list[Int64]:
    return [np.arange(f, f + n) for f, n in zip(first.tolist(), lengths.tolist(), strict=True)]


class LogitsCalculator:
    """The host's side: `lane` are the cores that reach keys and values.

    What is sent has a queue of its own where the cores have two: a scan that waits for the next layer's query would
    hold up what this layer needs.
    """

    def __init__(self, engine: Engine, lane: Lane, work: Workspace, block_rows: int) -> None:
        self._engine = engine
        self._lane = lane
        self._sender = Lane(lane.device, lane.executor, lane.executor.queues[-1])
        self._work = work
        self._block = block_rows

    def queries(self, layer: int, source: Segment, after: Sequence[Completion]) -> tuple[Segment, Completion]:
        """Queries from the GPU, in the cores' memory."""
        there = self._work.at("queries", layer, source.spans.nbytes)
        return there, self._mark(self._engine.copy(source, there, after), SELECT)

    async def choose(
        self, layer: int, batch: Batch, scans: Sequence[Scan], queries: Segment, ready: Completion, sending: bool
    ) -> Chosen:
        """Scan with the given queries, and choose; the logits of what was scanned stay where they are.

        Where all rows are wanted, and their logits are not (`sending` is false), nothing is scanned.
        """
        shape = self._engine.shape
        heads = shape.num_kv_heads
        rows = np.array([(s.last - s.first) * self._block for s in scans], dtype=np.int64)
        gpu = batch.positions[:, -1] + 1 - np.array([s.last * self._block for s in scans], dtype=np.int64)
        gpu = np.repeat(gpu, heads)
        if not rows.any():
            nothing = np.empty(0, dtype=np.int64)
            return Chosen([nothing] * len(gpu), heads, Layout(np.zeros_like(gpu), gpu), True)
        lengths = np.repeat(rows, heads)
        first = np.repeat([s.first * self._block for s in scans], heads).astype(np.int64)
        choosing = [s.wanted < n for s, n in zip(scans, rows.tolist(), strict=True)]
        if not sending and not any(choosing):
            return Chosen(_stretches(first, lengths), heads, Layout(lengths, gpu), True)
        held = enumerate(zip(batch.requests, scans, strict=True))
        operand = join([self._scanned(r, layer, i, s) for i, (r, s) in held if s.last > s.first])
        scores = self._work.at("scores", layer, int(lengths.sum()) * shape.group * 4)
        done = self._logits(batch, operand.runs, queries, operand.keys, (scores,), [ready], SELECT)
        if not any(choosing):
            return Chosen(_stretches(first, lengths), heads, Layout(lengths, gpu), True, done)
        best = await self._best(layer, batch, scans, lengths, first, choosing, done)
        positions = [
            np.arange(first[n], first[n] + lengths[n]) if n not in best else np.sort(best[n]) + first[n]
            for n in range(len(lengths))
        ]
        counts = np.array([len(p) for p in positions], dtype=np.int64)
        return Chosen(positions, heads, Layout(counts, gpu), False, done)

    async def _best(
        self,
        layer: int,
        batch: Batch,
        scans: Sequence[Scan],
        lengths: Int64,
        first: Int64,
        choosing: Sequence[bool],
        scanned: Completion,
    ) -> dict[int, Int64]:
        """By list: the best rows among those that were scanned. Requests that want as many rows are ranked together."""
        heads, item = self._engine.shape.num_kv_heads, self._engine.shape.group * 4
        groups: dict[int, list[int]] = {}
        for i, (scan, some) in enumerate(zip(scans, choosing, strict=True)):
            if some:
                groups.setdefault(scan.wanted, []).append(i)
        region, base = self._work.place("scores", layer)
        starts = base + (np.cumsum(lengths) - lengths) * item
        ranked, offset = [], 0
        for k, members in groups.items():
            lists = np.concatenate([np.arange(i * heads, (i + 1) * heads) for i in members])
            indices = self._work.at("indices", layer, len(lists) * k * 8, offset)
            offset += indices.spans.nbytes
            scores = Segment(region, Spans(np.stack((starts[lists], lengths[lists] * item), axis=1)))
            args = Topk(k, lengths[lists], self._engine.shape.group, "max")
            done = self._mark(self._engine.launch(self._lane, args, ((scores,),), ((indices,),), [scanned]), SELECT)
            names = tuple(batch.requests[i].name for i in members)
            step = int(batch.positions[members[0], 0])
            question = Question("topk", layer, names, step, lengths[lists], first[lists], 1, k)
            ranked.append((lists, indices, question, done))
        best: dict[int, Int64] = {}
        for lists, indices, question, done in ranked:
            answer = await self._engine.decide(indices, question, [done])
            best.update((n, row[row >= 0]) for n, row in zip(lists.tolist(), answer, strict=True))
        return best

    def send_scanned(self, layer: int, scans: Sequence[Scan], chosen: Chosen) -> None:
        """Send the logits of the scan for the chosen rows."""
        if not chosen.layout.host.any():
            return
        engine, item, heads = self._engine, self._engine.shape.group * 4, self._engine.shape.num_kv_heads
        scanned = np.repeat([(s.last - s.first) * self._block for s in scans], heads)
        first = np.repeat([s.first * self._block for s in scans], heads)
        begins = np.cumsum(scanned) - scanned - first
        runs, counts, _ = chosen.runs
        region, base = self._work.place("scores", layer)
        at = base + (begins[runs[:, 0] * heads + runs[:, 1]] + runs[:, 2]) * item
        source = Segment(region, Spans(np.stack((at, counts * item), axis=1)))
        assert chosen.scanned is not None, "rows were chosen by a scan"
        ready = chosen.scanned
        if not chosen.everything:
            picked = self._work.at("picked", layer, source.spans.nbytes)
            ready = self._mark(engine.launch(self._sender, Gather(), ((source,),), ((picked,),), [ready]), GATHER)
            source = picked
        self._send(layer, chosen, source, ready)

    def send_logits(self, layer: int, batch: Batch, chosen: Chosen, queries: Segment, ready: Completion) -> None:
        """Compute the logits of the chosen rows with the given queries, and send them."""
        if not chosen.layout.host.any():
            return
        rows = self._rows(layer, batch, chosen)
        picked = self._work.at("picked", layer, int(chosen.layout.host.sum()) * self._engine.shape.group * 4)
        done = self._logits(batch, rows.runs, queries, rows.keys, (picked,), [ready], LOGITS)
        self._send(layer, chosen, picked, done)

    def send_rows(self, layer: int, batch: Batch, chosen: Chosen, side: int, direct: bool = False) -> None:
        """Send the chosen rows of K or V to the GPU: gathered by the cores first, or by the copy engine itself."""
        if not chosen.layout.host.any():
            return
        engine, use = self._engine, ("keys", "values")[side]
        rows = self._rows(layer, batch, chosen)
        source = rows.keys if side == K else rows.values
        nbytes = int(chosen.layout.host.sum()) * engine.shape.row_nbytes(side)
        if not direct and not chosen.everything:
            gathered = self._work.at(use, layer, nbytes)
            done = self._mark(engine.launch(self._sender, Gather(), (source,), ((gathered,),)), GATHER)
            arriving = self._work.at(f"{use} arriving", layer, nbytes)
            chosen.arriving.append(self._mark(engine.copy(gathered, arriving, [done]), TRANSFER))
            return
        offset = 0
        for segment in source:
            arriving = self._work.at(f"{use} arriving", layer, segment.spans.nbytes, offset)
            offset += segment.spans.nbytes
            chosen.arriving.append(self._mark(engine.copy(segment, arriving), TRANSFER))

    def _send(self, layer: int, chosen: Chosen, source: Segment, ready: Completion) -> None:
        target = logit_segment(self._work, layer, chosen.layout, self._engine.shape.group * 4, of_host=True)
        chosen.arriving.append(self._mark(self._engine.copy(source, target, [ready]), TRANSFER))
        chosen.has_logits = True

    def _scanned(self, request: Request, layer: int, sequence: int, scan: Scan) -> Rows:
        """Operands of the scanned blocks; they do not change from step to step."""
        kept: dict[int, tuple[tuple[int, int, int], Rows]] = request.state.setdefault("scanned", {})
        key = (sequence, scan.first, scan.last)
        if layer not in kept or kept[layer][0] != key:
            heads = self._engine.shape.num_kv_heads
            blocks = np.tile(np.arange(scan.first, scan.last), heads)
            of_head = np.repeat(np.arange(heads), scan.last - scan.first)
            kept[layer] = key, request.blocks.rows(layer, of_head, blocks, sequence)
        return kept[layer][1]

    def _rows(self, layer: int, batch: Batch, chosen: Chosen) -> Rows:
        if chosen.rows is not None:
            return chosen.rows
        heads, parts = self._engine.shape.num_kv_heads, []
        for i, request in enumerate(batch.requests):
            mine = slice(i * heads, (i + 1) * heads)
            of_head = np.repeat(np.arange(heads), chosen.layout.host[mine])
            if len(of_head):
                parts.append(request.blocks.single_rows(layer, of_head, np.concatenate(chosen.positions[mine]), i))
        chosen.rows = join(parts)
        return chosen.rows

    def _logits(
        self,
        batch: Batch,
        runs: Int64,
        queries: Segment,
        keys: Operand,
        target: Operand,
        after: Sequence[Completion],
        stage: str,
    ) -> Completion:
        args = logits_of(self._engine, batch, runs)
        lane = self._lane if stage == SELECT else self._sender
        return self._mark(self._engine.launch(lane, args, ((queries,), keys), (target,), after), stage)

    def _mark(self, completion: Completion, stage: str) -> Completion:
        return self._engine.stages.mark(completion, stage)


class TokenConcatenator:
    """The GPU's side: `lane` runs `logits` and `combine` over the GPU's rows."""

    def __init__(self, engine: Engine, lane: Lane, work: Workspace) -> None:
        self._engine = engine
        self._lane = lane
        self._work = work

    def attend(
        self, layer: int, batch: Batch, borders: Sequence[int], chosen: Chosen, appended: Completion
    ) -> list[Completion]:
        """Join what the host has sent with the GPU's own rows, blocks from `borders` on; returns what comes after."""
        engine, shape, mark = self._engine, self._engine.shape, self._engine.stages.mark
        layout, item = chosen.layout, shape.group * 4
        own = [
            self._own(r, layer, i, border) for i, (r, border) in enumerate(zip(batch.requests, borders, strict=True))
        ]
        runs, values = self._in_order(layer, own, chosen, V)
        logits = self._work.at("logits", layer, layout.num_rows * item)
        if chosen.has_logits or not layout.host.any():
            mine = join(own)
            args, keys = logits_of(engine, batch, mine.runs), mine.keys
            target, after = logit_segment(self._work, layer, layout, item, of_host=False), [appended]
        else:
            args, keys = logits_of(engine, batch, runs), self._in_order(layer, own, chosen, K)[1]
            target, after = logits, [appended, *chosen.arriving]
        computed = engine.launch(self._lane, args, ((batch.queries,), keys), ((target,),), after)
        mark(computed, GPU_LOGITS)
        roots = engine.roots_of_all(batch.positions)
        states = self._work.at("states", layer, engine.state_nbytes(len(roots)))
        combine = Combine(shape.dtype, shape.group, 1, shape.head_dim_v, shape.split_tokens, runs, roots)
        reads = (logits,), values
        done = engine.launch(self._lane, combine, reads, ((states,),), [computed, appended, *chosen.arriving])
        merged = engine.merge([states], roots, batch.positions, batch.output, [mark(done, COMBINE)])
        return [mark(merged, COMBINE)]

    def _own(self, request: Request, layer: int, sequence: int, border: int) -> Rows:
        """The GPU's rows of a request; while no block moves or comes, only the last run of each head grows."""
        table, heads = request.blocks, self._engine.shape.num_kv_heads
        count, length = table.num_blocks(layer), int(table.length[layer])
        kept: dict[int, tuple[object, int, Rows]] = request.state.setdefault("own", {})
        key = (sequence, border, count, int(table.offset[layer, K, 0, border]))
        if layer in kept and kept[layer][0] == key:
            _, before, rows = kept[layer]
            if length == before:
                return rows
            last = np.append(rows.runs[1:, 1] != rows.runs[:-1, 1], True)
            grown = [
                (Segment(s.region, Spans(s.spans.array + np.outer(last, (0, (length - before) * row)))),)
                for row, (s,) in zip(map(self._engine.shape.row_nbytes, (K, V)), (rows.keys, rows.values), strict=True)
            ]
            rows = Rows(rows.runs, *grown)
        else:
            blocks = np.tile(np.arange(border, count), heads)
            rows = table.rows(layer, np.repeat(np.arange(heads), count - border), blocks, sequence)
        kept[layer] = key, length, rows
        return rows

    def _in_order(self, layer: int, own: list[Rows], chosen: Chosen, side: int) -> tuple[Int64, Operand]:
        """Runs and rows of K or V of all lists, the host's before the GPU's."""
        heads, row = self._engine.shape.num_kv_heads, self._engine.shape.row_nbytes(side)
        region, base, runs, of_list = (
            None,
            0,
            np.empty((0, 3), dtype=np.int64),
            np.zeros(len(chosen.positions) + 1, int),
        )
        sent = np.empty((0, 2), dtype=np.int64)
        if chosen.layout.host.any():
            runs, counts, of_list = chosen.runs
            region, base = self._work.place(("keys arriving", "values arriving")[side], layer)
            sent = np.stack((base + (np.cumsum(counts) - counts) * row, counts * row), axis=1)
        ordered: list[Int64] = []
        operand: list[Segment] = []
        for i, held in enumerate(own):
            (segment,) = held.keys if side == K else held.values
            borders = np.searchsorted(held.runs[:, 1], np.arange(heads + 1)).tolist()
            for head in range(heads):
                first, last = of_list[i * heads + head], of_list[i * heads + head + 1]
                if region is not None and last > first:
                    ordered.append(runs[first:last])
                    operand.append(Segment(region, Spans(sent[first:last])))
                mine = slice(borders[head], borders[head + 1])
                ordered.append(held.runs[mine])
                operand.append(Segment(segment.region, Spans(segment.spans.array[mine])))
        return np.concatenate(ordered), tuple(operand)
