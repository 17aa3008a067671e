"""gather with many rows: threads, zero-length spans, and rows that are taken twice."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.attention_case import Bytes, bytes_of, region
from tierloop.devices.commands import Launch, Operand
from tierloop.devices.kernels import run
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.regions import Segment
from tierloop.devices.spans import Spans

pytestmark = pytest.mark.usefixtures("threads_for_little_work")


def contents(operand: Operand) -> Bytes:
    parts = [bytes_of(r)[o : o + n] for r, spans in operand for o, n in spans.array.tolist()]
    return np.concatenate([*parts, np.zeros(0, dtype=np.uint8)])


def scattered(sizes: NDArray[np.int64], memory: Bytes, random: np.random.Generator) -> Operand:
    """Spans of these sizes anywhere in a region, overlapping each other."""
    offsets = random.integers(0, memory.nbytes - int(sizes.max(initial=0)), len(sizes))
    return (Segment(region(memory), Spans(np.stack([offsets, sizes], axis=1).astype(np.int64))),)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [17, 64, 256, 1500])
def test_threads_gather_rows_of_one_size(nbytes: int, threads: int) -> None:
    random = np.random.default_rng(nbytes)
    source = scattered(np.full(600_000 // nbytes, nbytes), random.integers(0, 256, 100_000, dtype=np.uint8), random)
    target = (region(np.zeros(source[0].spans.nbytes, dtype=np.uint8)).all(),)
    run(Launch(Gather(), (source,), (target,)), bytes_of, threads)
    assert (contents(target) == contents(source)).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_gather_between_any_two_cuts(threads: int) -> None:
    random = np.random.default_rng(threads)
    sizes = random.choice([0, 1, 7, 256, 3000, 400_000], 200, p=[0.3, 0.2, 0.2, 0.2, 0.09, 0.01])
    source = scattered(sizes, random.integers(0, 256, 500_000, dtype=np.uint8), random)
    total = int(sizes.sum())
    cuts = np.sort(random.integers(0, total, 40))
    cuts = np.diff(np.concatenate([[0, 0], cuts, [total, total]]))  # an empty span at either end
    gaps = random.integers(0, 9, len(cuts))
    offsets = np.cumsum(cuts + gaps) - cuts
    memory = np.full(total + int(gaps.sum()) + 9, 0xEE, dtype=np.uint8)
    target = (Segment(region(memory), Spans(np.stack([offsets, cuts], axis=1).astype(np.int64))),)
    run(Launch(Gather(), (source,), (target,)), bytes_of, threads)
    assert (contents(target) == contents(source)).all()
    outside = np.ones(memory.nbytes, dtype=bool)
    for offset, nbytes in zip(offsets.tolist(), cuts.tolist(), strict=True):
        outside[offset : offset + nbytes] = False
    assert (memory[outside] == 0xEE).all()


def test_nothing_is_gathered_from_no_spans() -> None:
    target = (region(np.full(4, 7, dtype=np.uint8)).at(1, 0),)
    run(Launch(Gather(), ((),), (target,)), bytes_of)
    assert bytes_of(target[0].region).tolist() == [7] * 4
