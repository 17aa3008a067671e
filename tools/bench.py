"""`tierloop bench`: what emulation costs on this machine, each number as a ratio to its limit, all in one run.

Absolute speed says little on a shared machine; ratios of things that ran side by side do. Nothing is timed before it
was run once (compilation), and every figure is the best or the median of several tries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Copy, Launch
from tierloop.devices.device import Device
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import Attend, DType
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import wait, write_bytes
from tierloop.tools import options
from tierloop.tools.bench_policies import PLATFORM, SHARE_LIMIT, WINDOW_LIMIT, policy_costs
from tierloop.tools.bench_serving import SHARE_LIMIT as SERVING_LIMIT
from tierloop.tools.bench_serving import serving_cost
from tierloop.tools.console import progress, results, say
from tierloop.tools.exits import FAILED

if TYPE_CHECKING:
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.models import Model
    from tierloop.runtime.prefill import Dense
    from tierloop.runtime.workloads import Workload

SPAN_COUNTS = (1, 4096)
COMMAND_LIMIT_NS = 10_000
SPAN_LIMIT_NS = 20
STEP_LIMIT = 1.5
DTYPES: dict[DType, int] = {"float32": 4, "bfloat16": 2}
_ROWS = 64 * 1024
_HEADS, _GROUP, _HEAD_DIM, _SPLIT = 4, 4, 64, 64


@dataclass(frozen=True)
class Figure:
    """One number, and how it stands to its limit: a ratio above 1 exceeds it. `limit` 0: nothing is promised."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    note: str = ""

    @property
    def within(self) -> bool:
        """Whether the limit is kept."""
        return self.limit == 0 or self.ratio <= 1


def bench(
    context: typer.Context,
    model: options.ModelSource = "smollm2-135m",
    prompt_tokens: options.PromptTokens = 4096,
    tokens: options.NewTokens = 6,
    cache: options.Cache = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if a limit is exceeded.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """What emulation costs on this machine, as ratios. Takes a minute; close other programs first.

    `bench attention` measures the attention kernels instead.

    Exit codes: 0 good, 1 a limit was exceeded (with --strict) or an attention output was wrong, 2 the input was wrong.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    with results(as_json) as shown:
        say("emulated commands")
        figures = command_figures()
        say("attention kernel")
        figures += attend_figures()
        say("decode step")
        figures += step_figures(model, prompt_tokens, tokens, cache)
        shown.json({"figures": [{**asdict(figure), "within": figure.within} for figure in figures]})
        table = Table(header_style="bold")
        for heading in ("what", "value", "limit", "ratio", ""):
            table.add_column(heading, justify="left" if heading in ("what", "") else "right")
        for figure in figures:
            limit = f"{figure.limit:,.3g} {figure.unit}" if figure.limit else ""
            mark = figure.note if figure.within else f"ABOVE ITS LIMIT {figure.note}"
            table.add_row(figure.name, f"{figure.value:,.3g} {figure.unit}", limit, f"{figure.ratio:.2f}", mark)
        shown.show(table)
    if strict and not all(figure.within for figure in figures):
        raise typer.Exit(FAILED)


def _refuse_options(context: typer.Context) -> None:
    """Options of `bench` itself mean nothing to what stands after it. Raises ConfigurationError."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and str(context.get_parameter_source(parameter.name)).endswith("COMMANDLINE")
    ]
    if given:
        name = context.invoked_subcommand
        raise ConfigurationError(f"bench {given[0]} … {name}: options of `bench {name}` stand after `{name}`")


def command_figures() -> list[Figure]:
    """Python cost of one emulated copy on the virtual clock: in a memory, over a link, with and without its bytes."""
    from tierloop.devices.registry import open_platform

    figures = []
    with open_platform("demo", clock="virtual") as platform:
        device, queue, near, far = _copier(platform)
        for where, source in (("within a memory", near), ("over a link", far)):
            for count in SPAN_COUNTS:
                limit = COMMAND_LIMIT_NS + SPAN_LIMIT_NS * count
                what = f"emulated copy {where}, {count:,} span{'s' if count > 1 else ''}"
                cost = _command_cost(platform, device, queue, source, near, count, phantom=True)
                figures.append(Figure(f"{what}, modelled only", cost / 1000, "µs", limit / 1000, cost / limit))
                cost = _command_cost(platform, device, queue, source, near, count, phantom=False)
                figures.append(Figure(f"{what}, bytes moved", cost / 1000, "µs", 0, cost / limit))
    return figures


def _copier(platform: Platform) -> tuple[Device, int, str, str]:
    """An emulated executor that copies, its queue, its own memory and another that it reaches."""
    for device, executor in platform.executors():
        own = [memory.name for memory in device.info.memories]
        reached = [path.memory for path in executor.paths if path.memory not in own]
        if "copy" in executor.verbs and own and reached and device.info.provenance == "emulated":
            return device, executor.queues[0], own[0], reached[0]
    raise AssertionError(f"no executor of platform {platform.name} copies between two memories")


def _command_cost(
    platform: Platform, device: Device, queue: int, source: str, target: str, count: int, phantom: bool
) -> float:
    """ns per command, best of 20 batches."""
    nbytes = 4096
    ends = []
    for memory in (source, target):
        region = platform.memory_owner(memory).alloc(count * nbytes, memory, phantom)
        ends.append(Segment(region, Spans.equal(np.arange(count, dtype=np.int64) * nbytes, nbytes)))
    command = Copy(ends[0], ends[1])
    rounds = 100 if count == 1 or phantom else 3

    def batch() -> None:
        wait(platform.clock, [device.submit(command, queue) for _ in range(rounds)])

    batch()
    best = min(_timed(batch) for _ in range(20)) / rounds
    for segment in ends:
        platform.free(segment.region)
    return best


def attend_figures() -> list[Figure]:
    """Bytes of KV per second through the cpu driver's attention, against what the memory can be read at."""
    from tierloop.devices.registry import entry

    read_limit = memory_read_rate()
    figures = [Figure("memory read, two threads", read_limit / 1e9, "GB/s", 0, 1.0)]
    for dtype, itemsize in DTYPES.items():
        clock = WallClock()
        device: Device = entry("devices", "cpu")("cpu", Site(clock=clock), {})
        try:
            rate = _attend_rate(clock, device, dtype, itemsize)
        finally:
            device.close()
        name = f"attend, {dtype}, group {_GROUP}, head_dim {_HEAD_DIM}"
        figures.append(Figure(name, rate / 1e9, "GB/s", 0, rate / read_limit, "of the memory read"))
    return figures


def _timed(call: Callable[[], Any]) -> int:
    begun = time.perf_counter_ns()
    call()
    return max(1, time.perf_counter_ns() - begun)


def memory_read_rate() -> float:
    """Bytes/s at which two threads read 256 MiB, best of seven."""
    halves = np.array_split(np.ones(32 << 20, dtype=np.uint64), 2)
    with ThreadPoolExecutor(2) as pool:
        best = min(_timed(lambda: list(pool.map(np.bitwise_or.reduce, halves))) for _ in range(7))
    return sum(half.nbytes for half in halves) * 1e9 / best


def step_figures(model_source: str, prompt_tokens: int, tokens: int, cache: Any) -> list[Figure]:
    """Wall time of a decode step on `demo`, bytes moved included, against the same step of plain transformers.

    And what policies cost in it beside numerics and the emulation of commands.
    """
    from tierloop.devices.registry import open_platform
    from tierloop.runtime.compare import PolicyRequest, compare
    from tierloop.runtime.models import load_model
    from tierloop.runtime.prefill import generate_dense
    from tierloop.runtime.workloads import needle_prompt

    tokens = max(tokens, 4)
    model = load_model(model_source, cache)
    workload = needle_prompt(model, prompt_tokens, new_tokens=tokens)
    plain, ours = _Steps(), _Steps()
    with progress() as shown:

        def advance_plain(done: int) -> None:
            plain(done)
            shown("plain transformers", done, tokens)

        dense = generate_dense(model, workload.token_ids, tokens, advance_plain)

        def advance(stage: str, done: int, total: int) -> None:
            ours(done)
            shown(stage, done, total)

        def fresh(_: PolicyRequest) -> Platform:
            return open_platform("demo", clock="virtual")

        compare(
            model,
            workload,
            fresh,
            [PolicyRequest("split-all")],
            num_tokens=tokens,
            oracle=False,
            dense=dense,
            progress=advance,
        )
    ratio = ours.median_ns() / plain.median_ns()
    note = f"split-all {ours.median_ns() / 1e6:.0f} ms, plain {plain.median_ns() / 1e6:.0f} ms"
    step = Figure(
        "virtual-clock decode step of demo : plain transformers", ratio, "×", STEP_LIMIT, ratio / STEP_LIMIT, note
    )
    return [step, *_policy_figures(model, workload, dense, tokens), _serving_figure(model)]


def _serving_figure(model: Model) -> Figure:
    """The serving loop's own code per step, as a share of the step's numerics."""
    cost = serving_cost(model)
    share = cost.own_ns / cost.numerics_ns
    note = f"{cost.own_ns / 1e6:.2f} ms a step of {cost.numerics_ns / 1e6:.0f} ms numerics, 8 requests"
    return Figure("serving loop: its own code", share, "of numerics", SERVING_LIMIT, share / SERVING_LIMIT, note)


def _policy_figures(model: Model, workload: Workload, dense: Dense, tokens: int) -> list[Figure]:
    """Each policy's own code per step, as a share of the step's numerics."""
    from tierloop.devices.registry import open_platform

    with open_platform(PLATFORM, clock="virtual") as platform:
        device, queue, near, far = _copier(platform)
        command_ns = _command_cost(platform, device, queue, far, near, 1, phantom=True)
    figures = []
    for name, cost in policy_costs(model, workload, dense, tokens, command_ns).items():
        numerics = f"of {cost.numerics_ns / 1e6:.0f} ms numerics"
        note = f"{cost.own_ns / 1e6:.1f} ms a step {numerics}, {cost.commands} commands"
        share = cost.own_ns / cost.numerics_ns
        figures.append(Figure(f"{name}: its own code", share, "of numerics", SHARE_LIMIT, share / SHARE_LIMIT, note))
        if cost.windows_ns:
            share, note = cost.windows_ns / cost.numerics_ns, f"{cost.windows_ns / 1e6:.2f} ms a step {numerics}"
            ratio = share / WINDOW_LIMIT
            figures.append(Figure(f"{name}: keeping windows", share, "of numerics", WINDOW_LIMIT, ratio, note))
    return figures


class _Steps:
    """Times between calls that say one more token is there."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._last = -1

    def __call__(self, done: int) -> None:
        if done > self._last:
            self._last = done
            self._times.append(time.perf_counter_ns())

    def median_ns(self) -> float:
        """The median step, without the first, which holds the prefill or the placement."""
        steps = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        return float(statistics.median(steps[1:]))


def _attend_rate(clock: WallClock, device: Device, dtype: DType, itemsize: int) -> float:
    """Bytes of K and V per second, best of five launches over 64 Ki rows of each of four heads."""
    row = _HEAD_DIM * itemsize
    sizes = {
        "queries": _HEADS * _GROUP * _HEAD_DIM * 4,
        "keys": _HEADS * _ROWS * row,
        "values": _HEADS * _ROWS * row,
    }
    level = (_ROWS // _SPLIT - 1).bit_length()
    roots = np.array([[0, head, level, 0] for head in range(_HEADS)], dtype=np.int64)
    runs = np.array([[0, head, 0] for head in range(_HEADS)], dtype=np.int64)
    positions = np.array([[_ROWS - 1]], dtype=np.int64)
    args = Attend(dtype, 1, _HEADS, _GROUP, 1, _HEAD_DIM, _HEAD_DIM, _HEAD_DIM**-0.5, _SPLIT, runs, positions, roots)
    regions: dict[str, Region] = {name: device.alloc(nbytes) for name, nbytes in sizes.items()}
    states = device.alloc(len(roots) * _GROUP * (2 + _HEAD_DIM) * 4)
    noise = np.random.default_rng(0)
    for name, nbytes in sizes.items():
        numbers = noise.standard_normal(nbytes // 4, dtype=np.float32)
        write_bytes(clock, device, regions[name].all(), numbers.view(np.uint8))
    heads = Spans.equal(np.arange(_HEADS, dtype=np.int64) * _ROWS * row, _ROWS * row)
    command = Launch(
        args,
        ((regions["queries"].all(),), (Segment(regions["keys"], heads),), (Segment(regions["values"], heads),)),
        ((states.all(),),),
    )

    def launch() -> None:
        wait(clock, device.submit(command))

    launch()
    best = min(_timed(launch) for _ in range(5))
    return (sizes["keys"] + sizes["values"]) * 1e9 / best
