"""Whether numbers are what the oracle expects; the message gives the first that is not, and by how much."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.conformance import oracle
from tierloop.devices.conformance.subject import expect

Float32 = NDArray[np.float32]


def judge_states(got: Float32, want: oracle.States, what: str) -> None:
    """m within its bound, or as far above it as it may lie; l and acc within theirs after rescaling to the expected m;
    identities exactly."""
    empty = np.isneginf(want.m)
    judge_identities(got[empty], what)
    some = ~empty
    m, total, acc = (part.astype(np.float64)[some] for part in (got[..., 0], got[..., 1], got[..., 2:]))
    half = want.above[some] / 2
    judge(m, want.m[some] + half, want.m_error[some] + half, f"{what}: m")
    with np.errstate(over="ignore"):
        scale = np.exp(m - want.m[some])
    judge(total * scale, want.total[some], want.relative[some] * want.total[some], f"{what}: l")
    error = want.relative[some][..., None] * want.weight[some]
    judge(acc * scale[..., None], want.acc[some], error, f"{what}: acc")


def judge_identities(got: Float32, what: str) -> None:
    """(−inf, 0, 0) in every row."""
    wrong = ~(np.isneginf(got[..., 0]) & (got[..., 1:] == 0).all(axis=-1))
    if wrong.any():
        expect(False, f"{what}: needs the identity (−inf, 0, 0), got {got[wrong][0][:4].tolist()} …")


def judge(got: oracle.Float64, want: oracle.Float64, error: oracle.Float64, what: str) -> None:
    """Each number within its own bound; NaN is within none."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(got - want)
    wrong = np.argwhere(~(off <= error))  # not `off > error`, which NaN is not
    if wrong.size:
        at = tuple(wrong[0].tolist())
        expect(
            False,
            f"{what}: {len(wrong)} of {want.size} numbers are out of bounds, first at {list(at)}: "
            f"{got[at]:.9g}, not {want[at]:.9g} ± {error[at]:.3g}",
        )
