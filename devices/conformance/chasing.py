"""Dependent reads, of the level compute: `chase` goes where the lines say, as often as there are lines."""

from __future__ import annotations

import numpy as np

from tierloop.devices.conformance.launches import Bench
from tierloop.devices.conformance.subject import Subject, expect
from tierloop.devices.kernels.contract import LINE_NBYTES, Chase


def check_chase_follows_the_lines(subject: Subject) -> None:
    """One circle through all lines, a way that ends in a shorter circle, and a single line."""
    for lane in subject.kernel_lanes("chase"):
        bench = Bench(subject, lane)
        for n, is_circle in ((37, True), (50, False), (1, True)):
            if is_circle:
                order = subject.rng.permutation(n)
                numbers = np.empty(n, dtype=np.int64)
                numbers[order] = np.roll(order, -1)
            else:
                numbers = np.append(np.arange(1, n), n // 3)  # from the last line back to one in the middle
                numbers[0], numbers[7] = 7, 1
                numbers[6] = 8
            lines = subject.bytes(n * LINE_NBYTES).reshape(n, LINE_NBYTES)
            lines[:, :8] = numbers.view(np.uint8).reshape(n, 8)
            reads = (bench.scattered(lines.reshape(-1), np.full(n, LINE_NBYTES)),)
            want = 0
            for _ in range(n):
                want = int(numbers[want])
            got = int(bench.launch(Chase(), reads, bench.target(8)).view(np.int64)[0])
            expect(got == want, f"chase over {n} lines ended at {got}, not at {want}")
            bench.free()
