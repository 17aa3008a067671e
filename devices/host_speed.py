"""How fast this host can stand for emulated devices: measured once per process, in well under a second.

On the wall clock an emulated kernel really runs and an emulated transfer really moves its bytes. A device that is
faster than the host can only be emulated with all times stretched by a factor σ, the dilation. `smallest_dilation` says
how large it has to be: every device that computes or moves bytes may be busy all the time, so their demands on the host
add up. Counted are bytes (attention and decode are limited by bandwidth); work that is limited by arithmetic, such as a
prefill chunk, may need more, and then the run reports itself as invalid. `automatic_dilation` also leaves room for what
every command costs the host, however small it is: it is handed to a thread, and its end is handed back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Launch
from tierloop.devices.info import DeviceInfo, ExecutorInfo
from tierloop.devices.kernels import run, warm_up
from tierloop.devices.kernels.contract import Attend
from tierloop.devices.regions import Region

HEADROOM_PERCENT = 150
"""What `dilation = "auto"` takes of the smallest dilation: other programs and the runtime itself need the host too."""
HEADROOM = HEADROOM_PERCENT / 100
"""Paced accesses were seen to keep their rate on hosts that could do this many times as much."""
TYPICAL_COMMAND_NS = 50_000
"""What a command lasts in emulated time where there are many: decode of a 135M-parameter model on the demo's GPU has
150 of them in 8.4 ms."""
COMMANDS_AT_ONCE = 3
"""How many costs of commands fall together: the runtime submits the next ones while others end. On two cores, decode
over six devices overran by 9 to 14 % where 1 was counted (σ = 67 and 100), by less than 1 % at σ = 160."""
COMMAND_COST_PERCENT = 1
"""How much of its time a typical command may overrun by what it costs the host; runs are invalid at 5."""

_ROWS = 1 << 16
_HEAD_DIM = 64
_HAND_OVERS = 100
_TRIES = 25
"""The best of so many, 2 ms each: other programs take the core away for longer than that, but not every time."""

MOST_FOR_COMMANDS = 160
"""A host that is busy while it is measured would otherwise make a run of seconds last for minutes."""


@dataclass(frozen=True)
class HostSpeed:
    """Bytes/s of one thread: K and V rows read by attention, and bytes moved from place to place."""

    attend_bytes_per_s: int
    copy_bytes_per_s: int
    spare_cores: int
    """Cores that can work for emulated devices: one stays with the runtime."""
    command_ns: int = 0
    """What handing a command to a thread and its end back to the clock costs."""

    @property
    def traffic_bytes_per_s(self) -> int:
        """What the host's memory reads and writes together: a byte that is copied counts twice."""
        return 2 * self.copy_bytes_per_s


@cache
def host_speed() -> HostSpeed:
    """Measure this host (0.3 s; the first call in a new installation also compiles the kernels)."""
    warm_up()
    spare = max(len(os.sched_getaffinity(0)) - 1, 1) if hasattr(os, "sched_getaffinity") else 1
    return HostSpeed(_attend_speed(), _copy_speed(), spare, _command_cost())


def demands(info: DeviceInfo, speed: HostSpeed) -> float:
    """How many threads of this host one emulated device keeps busy at its own speed; σ is not looked at."""
    return max((_demand(executor, speed) * info.dilation for executor in info.executors), default=0.0)


def smallest_dilation(infos: Iterable[DeviceInfo], speed: HostSpeed) -> int:
    """The smallest σ at which this host can stand for all of these devices at once."""
    return max(-int(-sum(demands(info, speed) for info in infos) // speed.spare_cores), 1)


def automatic_dilation(smallest: int, speed: HostSpeed) -> int:
    """What `dilation = "auto"` takes where `smallest` is needed: 1 where the host keeps up, otherwise with headroom."""
    if smallest == 1:
        return 1
    for_commands = -(-speed.command_ns * COMMANDS_AT_ONCE * 100 // (COMMAND_COST_PERCENT * TYPICAL_COMMAND_NS))
    return max(-(-smallest * HEADROOM_PERCENT // 100), min(for_commands, MOST_FOR_COMMANDS))


def _demand(executor: ExecutorInfo, speed: HostSpeed) -> float:
    fastest = max((max(p.read_bytes_per_s, p.write_bytes_per_s) for p in executor.paths), default=0)
    return fastest / (speed.attend_bytes_per_s if executor.kernels else speed.copy_bytes_per_s)


def _attend_speed() -> int:
    nbytes = _ROWS * _HEAD_DIM * 4
    rows = np.tile(np.linspace(-1, 1, _HEAD_DIM * 64, dtype=np.float32), 2 * _ROWS // 64).view(np.uint8)
    queries = np.ones(_HEAD_DIM, dtype=np.float32).view(np.uint8)
    arrays = [queries, rows, np.zeros((2 + _HEAD_DIM) * 4, dtype=np.uint8)]
    regions = [Region("host", "host", i, len(a), view=a) for i, a in enumerate(arrays)]
    launch = Launch(
        Attend(
            "float32",
            num_sequences=1,
            num_kv_heads=1,
            group=1,
            q_len=1,
            head_dim=_HEAD_DIM,
            head_dim_v=_HEAD_DIM,
            scale=0.125,
            split_tokens=64,
            runs=np.zeros((1, 3), dtype=np.int64),
            q_positions=np.full((1, 1), _ROWS, dtype=np.int64),
            roots=np.array([[0, 0, (_ROWS // 64 - 1).bit_length(), 0]], dtype=np.int64),
        ),
        ((regions[0].all(),), (regions[1].at(0, nbytes),), (regions[1].at(nbytes, nbytes),)),
        ((regions[2].all(),),),
    )
    best = min(_timed(lambda: run(launch, lambda region: arrays[region.id])) for _ in range(_TRIES))
    return max(2 * nbytes * 1_000_000_000 // best, 1)


def _copy_speed() -> int:
    source = np.ones(16 << 20, dtype=np.uint8)
    target = np.empty_like(source)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(_TRIES))
    return max(source.nbytes * 1_000_000_000 // best, 1)


def _command_cost() -> int:
    """The lower quartile of many hand-overs: what it costs when no other program takes the core away."""
    clock = WallClock()
    costs: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(_HAND_OVERS):
            begun = clock.now()
            ended: list[None] = []
            pool.submit(clock.post, ended.append, None)
            clock.run_until(lambda ended=ended: bool(ended), begun + 1_000_000_000)  # type: ignore[misc]  # bound at once
            costs.append(clock.now() - begun)
    return sorted(costs)[len(costs) // 4]


def _timed(call: Callable[[], object]) -> int:
    clock = WallClock()
    call()
    return max(clock.now(), 1)
