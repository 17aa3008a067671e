"""One small launch of every kernel, and a way to have any device carry them out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.attention_case import Case, bytes_of, region, whole
from tierloop.devices.clocks import Clock
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.device import Device
from tierloop.devices.kernels import contract
from tierloop.devices.kernels.contract import Codes, DType
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes, wait, write_bytes

RESULTS: dict[str, type[np.generic]] = {
    "topk": np.int64,
    "append": np.uint8,
    "quantize": np.uint8,
    "chase": np.int64,
}
"""What the numbers are that a kernel writes, where they are not float32."""


def room(nbytes: int) -> Operand:
    """An operand to write into."""
    return whole(np.zeros(nbytes, dtype=np.uint8))


def every_kernel(dtype: DType = "float32") -> dict[str, Launch]:
    """A launch of each kernel on arrays of the test, with several regions and cuts among them."""
    case = Case(dtype, num_sequences=2, num_kv_heads=2, group=3, q_len=2, head_dim=24, head_dim_v=20, tokens=30)
    random = np.random.default_rng(1)
    rows = case.all_rows()
    place, roots = case.layout(rows, "paged"), case.roots_of(rows)
    states, logits = case.states(place, roots), case.logits(place)
    scores = random.normal(size=12).astype(np.float32)
    summaries = region(random.normal(size=(8, 2, 24)).astype(np.float32))
    two_each = Segment(summaries, Spans([(384 * i, 384) for i in range(4)]))
    one_each = np.array([(s, h, 0) for s in range(2) for h in range(2)], dtype=np.int64)
    new = [region(random.normal(size=16).astype(np.float32)) for _ in range(2)]
    codes: Codes = "int8" if dtype == "int8" else "fp8_e4m3"
    floats = "float32" if dtype in contract.CODE_RANGE else dtype
    item = contract.ITEMSIZE[floats]
    which, scales = np.array([1, 0], dtype=np.int64), random.uniform(0.1, 2, size=(2, 8)).astype(np.float32)
    open_blocks = Segment(region(np.zeros(100, dtype=np.uint8)), Spans([(0, 8 * item), (32, 0), (60, 8 * item)]))

    chain = np.zeros((5, 8), dtype=np.int64)
    chain[:, 0] = [3, 4, 1, 2, 3]
    lines = Segment(region(chain[:2]), Spans([(0, 64), (64, 64)]))
    lines_too = Segment(region(chain[2:]), Spans([(64 * i, 64) for i in range(3)]))

    def twice(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        writes[0].view(np.float32)[:] = 2 * reads[0].view(np.float32)

    logit_args = contract.Logits(dtype, 2, 2, 3, 2, 24, case.scale, place.runs, case.q_positions)
    combine_args = contract.Combine(dtype, 3, 2, 20, case.split_tokens, place.runs, roots)
    queries = whole(case.queries)
    attend = Launch(case.attend_args(place.runs, roots), (queries, place.keys, place.values), (room(states.nbytes),))
    launches = [
        attend,
        Launch(logit_args, (queries, place.keys), (room(logits.nbytes),)),
        Launch(combine_args, (whole(logits), place.values), (room(states.nbytes),)),
        Launch(contract.Merge(2, 2, 3, 2, 20, roots), (whole(states),), (room(4 * 480),)),
        Launch(
            contract.Score(2, 2, 3, 24, "minmax", "max", one_each),
            (whole(np.ascontiguousarray(case.queries[:, :1])), (two_each,)),
            (room(4 * 8),),
        ),
        Launch(contract.Topk(4, np.array([3, 9], dtype=np.int64)), (whole(scores),), (room(8 * 8),)),
        Launch(contract.Gather(), ((new[0].all(), new[1].at(0, 32)),), (room(96),)),
        Launch(contract.Append(floats), ((new[0].all(),),), ((open_blocks,),)),
        Launch(contract.Quantize(codes, 8, "row"), ((new[0].all(), new[1].at(32, 32)),), (room(36),)),
        Launch(contract.Dequantize(codes, 8, "channel", which), ((new[1].at(3, 16),), whole(scales)), (room(64),)),
        Launch(
            contract.Cluster(dtype, 2, 2, 24, place.runs, segment_tokens=20, cluster_tokens=8, iterations=2),
            (place.keys,),
            (room(12 * 24 * 4), room(8 * 120)),
        ),
        Launch(contract.Chase(), ((lines, lines_too),), (room(8),)),
        Launch(contract.Dense("twice", 12, 0, 96, twice), (whole(scores),), (room(48),)),
    ]
    return {one.args.kernel: one for one in launches}


def carry_out(clock: Clock, device: Device, launch: Launch, memory: Device | None = None) -> list[NDArray[np.uint8]]:
    """Put a launch's regions on a device, run it there, and read what it wrote: one array for each write operand.

    With `memory` the regions are that device's, which has to be reached by the one that runs it.
    """
    owner = memory or device
    there: dict[int, Region] = {}

    def moved(operand: Operand) -> Operand:
        segments = []
        for one, spans in operand:
            if one.id not in there:
                there[one.id] = owner.alloc(max(one.nbytes, 1))
                if one.nbytes:
                    write_bytes(clock, device, there[one.id].at(0, one.nbytes), bytes_of(one))
            segments.append(Segment(there[one.id], spans))
        return tuple(segments)

    reads, writes = tuple(moved(o) for o in launch.reads), tuple(moved(o) for o in launch.writes)
    wait(clock, device.submit(Launch(launch.args, reads, writes)))
    results = [np.concatenate([read_bytes(clock, device, segment) for segment in operand]) for operand in writes]
    for one in there.values():
        owner.free(one)
    return results
