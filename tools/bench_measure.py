"""The measurements of `tierloop bench attention`, in the order in which they are made, and what comes out of them.

Every case is run once, then timed several times; the median counts. The read rate is sampled between the
cases, and the loops that compute are measured at the start and at the end of the run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tierloop.devices.commands import Launch
from tierloop.devices.kernels import warm_up
from tierloop.devices.kernels.contract import ITEMSIZE, value_nbytes
from tierloop.devices.regions import Region
from tierloop.tools import bench_rivals
from tierloop.tools.bench_cases import DTYPES, Case, attention_cases
from tierloop.tools.bench_cluster import LONG_TOKENS, NUM_LAYERS, cluster_case, prefill_shares
from tierloop.tools.bench_data import Bytes, Sizes, Stored, bytes_of
from tierloop.tools.bench_more_cases import more_cases
from tierloop.tools.bench_targets import targets
from tierloop.tools.roofline import Limits, Machine, Work, seconds

Run = Callable[[Launch, Callable[[Region], Bytes], int], object]
"""`tierloop.devices.kernels.run`."""
Progress = Callable[[str, int, int], None]

COLUMNS = ("kernel", "dtype", "group", "head_dim", "tokens", "gb_s", "roofline_fraction", "read_fraction",
           "ratio_torch_sdpa_gqa", "ratio_torch_sdpa_reshaped", "max_error_over_bound")  # fmt: skip
"""What every case of the JSON has, null where it has no meaning."""
_FEWEST_TRIES, _MOST_TRIES = 3, 50
_SPINNING_S = 0.3
"""How long threads of other libraries may go on looking for work after they had some."""
_SLOW = 10
"""A case that took this many times its seconds gets no more tries than the fewest."""


@dataclass
class Timed:
    """One case that was timed. `nbytes` 0: bytes say nothing about it; `work` None: nothing limits it but itself.

    `error` is infinite until the case has been checked.
    """

    named: dict[str, Any]
    time_s: float
    tries: int
    nbytes: int
    work: Work | None
    rows: int
    error: float = math.inf
    found: dict[str, float] = field(default_factory=dict)

    def row(self, limits: Limits) -> dict[str, Any]:
        """All columns of the case."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= self.named | {"max_error_over_bound": self.error}
        row |= {"time_us": self.time_s * 1e6, "ns_per_row": self.time_s * 1e9 / self.rows, "tries": self.tries}
        row |= dict.fromkeys(("gflop_s", "limit", "ratio_numpy", "ratio_gather", "prefill_share", "torch_tokens"))
        if self.nbytes:
            row["gb_s"] = self.nbytes / self.time_s / 1e9
        if self.work is not None:
            shortest, row["limit"] = limits.shortest_s(self.work)
            row["roofline_fraction"] = shortest / self.time_s
            if self.nbytes:
                row["read_fraction"] = self.nbytes / self.time_s / limits.read
            if self.work.flops:
                row["gflop_s"] = self.work.flops / self.time_s / 1e9
        row |= self.found
        wanted = [one for one in targets(row["kernel"], row["dtype"], row["group"]) if row[one.column] is not None]
        missed = [str(target) for target in wanted if not target.met(row)]
        met = not missed if wanted else None
        return row | {"target": ", ".join(map(str, wanted)) or None, "met": met, "missed": missed}


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    limits: Limits
    sizes: Sizes
    timed: tuple[Timed, ...]

    def rows(self) -> list[dict[str, Any]]:
        """The cases, with all their columns."""
        return [timed.row(self.limits) for timed in self.timed]

    def wrong(self) -> list[str]:
        """Cases whose result is not what the contract says."""
        return [
            " ".join(str(part) for part in timed.named.values() if part is not None)
            + f": error {timed.error:.3g} times its bound"
            for timed in self.timed
            if not timed.error <= 1
        ]

    def notes(self) -> list[str]:
        """How to read the comparisons."""
        limits, sizes = self.limits, self.sizes
        shares = [timed.found for timed in self.timed if "prefill_share" in timed.found]
        return [
            *(
                f"cluster takes {100 * found['prefill_share']:.2f} % of the prefill without attention's own products, "
                f"{100 * found['prefill_share_long']:.2f} % with those of {LONG_TOKENS:,} tokens"
                for found in shares
            ),
            f"read rate: median of {len(limits.reads)} samples between the cases, each over {sizes.read >> 20} MiB; "
            f"{limits.reads[0] / 1e9:.1f} GB/s at the start, {limits.reads[-1] / 1e9:.1f} GB/s at the end",
            "roofline: the longer of bytes / read rate and flops / peak + conversions / their rate + exp / its rate",
            f"torch: scaled_dot_product_attention on the same rows with {limits.threads} threads, per row; where that "
            "takes too long, over the first torch_tokens of each head",
            "NumPy: matmul, exp, matmul with the threads of its BLAS; for topk argpartition and a sort",
            "gather: a plain compiled loop on as many threads that copies the same rows to a dense array",
            f"prefill_share: cluster of {sizes.cluster_heads} × {sizes.segment_tokens} keys, scaled to 8 heads × "
            f"{NUM_LAYERS} layers, over a prefill of {NUM_LAYERS} times one Llama-3-8B layer's seven matmuls (torch, "
            f"float32, {sizes.prefill_tokens} tokens, scaled); attention's own products are left out. "
            f"prefill_share_long adds them for a prompt of {LONG_TOKENS:,} tokens, at the same FLOP/s",
            "max_error_over_bound: against float64 on the same stored bytes, a smaller slice, with the analytic bound; "
            "of kernels that are right to the bit or wrong, 0 or 1e300",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        limits = self.limits
        return {
            "read_gb_s": limits.read / 1e9,
            "read_gb_s_start": limits.reads[0] / 1e9,
            "read_gb_s_end": limits.reads[-1] / 1e9,
            "peak_gflop_s": limits.peak_flops / 1e9,
            "conversions_g_s": {name: rate / 1e9 for name, rate in limits.conversions.items()},
            "exponentials_g_s": limits.exponentials / 1e9,
            "threads": limits.threads,
            "working_nbytes": self.sizes.working,
            "cases": self.rows(),
            "wrong": self.wrong(),
            "notes": self.notes(),
        }


def measure(sizes: Sizes, threads: int, run: Run, progress: Progress) -> Report:
    """Do everything. `run` carries launches out, `progress` is told (stage, done, total)."""
    progress("kernels (compiled at first use)", 0, 1)
    warm_up()
    progress("limits of this machine", 0, 1)
    machine = Machine(threads, sizes.read)
    machine.sample_read()
    machine.sample_compute()
    progress("limits of this machine", 1, 1)
    bench = _Bench(sizes, machine, lambda launch: run(launch, bytes_of, threads))
    for dtype in DTYPES:
        store = Stored(dtype, sizes.working)
        bench.time_all(dtype, attention_cases(store, sizes), progress)
        if dtype == "float32":
            bench.time_all("other kernels", more_cases(store, sizes), progress)
            bench.time_all("cluster", [cluster_case(store, sizes)], progress)
    progress("limits of this machine, again", 0, 1)
    machine.sample_compute()
    machine.sample_read()
    progress("limits of this machine, again", 1, 1)
    return Report(machine.limits(), sizes, tuple(bench.timed))


@dataclass
class _Bench:
    sizes: Sizes
    machine: Machine
    run: Callable[[Launch], object]
    timed: list[Timed] = field(default_factory=list)

    def time_all(self, stage: str, cases: Iterable[Case], progress: Progress) -> None:
        """Time cases one after the other; only then check them and time what they are compared with.

        Threads of torch and NumPy spin for a while after their work, on the cores that the kernels need.
        """
        waiting = list(cases)
        time.sleep(_SPINNING_S)
        timed = []
        for done, case in enumerate(waiting):
            progress(stage, done, 2 * len(waiting))
            timed.append(self._time(case))
        for done, (case, one) in enumerate(zip(waiting, timed, strict=True)):
            progress(stage, len(waiting) + done, 2 * len(waiting))
            one.error = case.check(self.run)
            one.found |= self._compare(case, one)
        self.timed += timed
        progress(stage, 2 * len(waiting), 2 * len(waiting))

    def _time(self, case: Case) -> Timed:
        for launch in case.launches:
            self.run(launch)
        times: list[float] = []
        while self._again(times):
            launch = case.launches[len(times) % len(case.launches)]
            times.append(seconds(partial(self.run, launch)))
        before = self.machine.last_read
        near = (before + self.machine.sample_read(1)) / 2
        named = {name: getattr(case, name) for name in ("kernel", "dtype", "group", "head_dim", "tokens")}
        time_s = statistics.median(times)
        return Timed(named, time_s, len(times), case.nbytes, case.work, case.rows, found={"read_gb_s_near": near / 1e9})

    def _again(self, times: list[float]) -> bool:
        """Whether there is to be another try: `tries`, fewer of a slow case, more of a fast one."""
        spent, budget = sum(times), self.sizes.case_s
        if len(times) < self.sizes.tries:
            return len(times) < _FEWEST_TRIES or spent < _SLOW * budget
        return len(times) < _MOST_TRIES and spent < budget

    def _compare(self, case: Case, timed: Timed) -> dict[str, float]:
        """What others take for the same, as ratios to the time of the case."""
        parts, row_s = case.parts, timed.time_s / case.rows
        found: dict[str, float] = {}
        if case.kernel == "attend" and parts is not None:
            if parts.dtype not in bench_rivals.FLOAT_TYPES or parts.head_dim not in self.sizes.rival_dims:
                return found
            torch = bench_rivals.torch_row_s(parts, self.machine.threads, self.sizes.rival_s)
            found["ratio_torch_sdpa_gqa"] = torch["gqa"] / row_s
            found["ratio_torch_sdpa_reshaped"] = torch["reshaped"] / row_s
            found["torch_tokens"] = torch["tokens"]
            if parts.dtype == "float32":
                found["ratio_numpy"] = bench_rivals.numpy_row_s(parts, self.sizes.rival_s) / row_s
        elif case.kernel == "attend rows" and parts is not None:
            at, item = parts.where.first, ITEMSIZE[parts.dtype]
            copied = [
                bench_rivals.gather_s(self.machine, stored, at * nbytes, nbytes)
                for stored, nbytes in (
                    (parts.keys, parts.head_dim * item),
                    (parts.values, value_nbytes(parts.dtype, parts.head_dim)),
                )
            ]
            found["ratio_gather"] = sum(copied) / timed.time_s
        elif case.kernel == "gather":
            (region, spans), row = case.launches[0].reads[0][0], int(case.launches[0].reads[0][0].spans.array[0, 1])
            offsets = np.ascontiguousarray(spans.array[:, 0])
            found["ratio_gather"] = bench_rivals.gather_s(self.machine, bytes_of(region), offsets, row) / timed.time_s
        elif case.kernel == "topk":
            scores = bytes_of(case.launches[0].reads[0][0].region).view(np.float32)
            found["ratio_numpy"] = bench_rivals.numpy_topk_s(scores, self.sizes.topk[0]) / timed.time_s
        elif case.kernel == "cluster":
            found |= prefill_shares(timed.time_s, self.sizes, self.machine.threads)
        return found
