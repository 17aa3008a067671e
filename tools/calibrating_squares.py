"""Least squares for few parameters, where the model has kinks: damped Gauss-Newton steps with differences for
derivatives, and a search along one parameter at a time in between. NumPy is enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

STEPS = 12
_DIFFERENCE = 0.01
_LARGEST_STEP = 0.7
_ENOUGH = 1e-4
_ROUNDS = 3
_SEARCH = (0.1, 0.03, 0.01)
_WORTH_IT = 0.97
EXACT = 1e-10
"""A mean square below this is rounding."""

Vector = NDArray[np.float64]


def minimise(
    residuals: Callable[[Vector], Vector], x: Vector, advance: Callable[[int], None] = lambda done: None
) -> tuple[Vector, Vector, Vector]:
    """(x, residuals, Jacobian) near a minimum of the squared residuals, from a good start; x is in logarithms.

    A step that makes nothing better is damped and tried again, so the result is never worse than the start.
    """
    at = residuals(x)
    slopes = jacobian(residuals, x, at)
    for round_ in range(_ROUNDS if len(x) else 0):
        before = cost(at)
        x, at, slopes = _descend(residuals, x, at, slopes, advance if not round_ else _silent)
        if cost(at) < EXACT * len(at):
            break
        x, at = _search(residuals, x, at)
        slopes = jacobian(residuals, x, at)
        if cost(at) > _WORTH_IT * before:
            x, at, slopes = _descend(residuals, x, at, slopes, _silent)
            break
    advance(STEPS)
    return x, at, slopes


def _descend(
    residuals: Callable[[Vector], Vector], x: Vector, at: Vector, slopes: Vector, advance: Callable[[int], None]
) -> tuple[Vector, Vector, Vector]:
    """Damped Gauss-Newton steps until they gain little."""
    damping = 1e-3
    for step in range(STEPS):
        advance(step + 1)
        normal, slope = slopes.T @ slopes, slopes.T @ at
        better = False
        there = at
        move = np.zeros_like(x)
        for _ in range(6):
            damped = normal + np.diag(damping * np.diag(normal) + 1e-9)
            move = np.clip(-np.linalg.solve(damped, slope), -_LARGEST_STEP, _LARGEST_STEP)
            there = residuals(x + move)
            if cost(there) < cost(at):
                better = True
                break
            damping *= 5
        if not better:
            break
        gain = 1 - cost(there) / cost(at)
        x, at, damping = x + move, there, max(damping / 5, 1e-9)
        slopes = jacobian(residuals, x, at)
        if gain < _ENOUGH or cost(at) < EXACT * len(at):
            break
    return x, at, slopes


def _silent(done: int) -> None:
    """Progress is told once."""


def _search(residuals: Callable[[Vector], Vector], x: Vector, at: Vector) -> tuple[Vector, Vector]:
    """Steps along one parameter at a time, ever smaller: a model that is a maximum of others has kinks, where slopes
    mislead."""
    for step in _SEARCH:
        for index in range(len(x)):
            for way in (step, -step):
                moved = x.copy()
                moved[index] += way
                there = residuals(moved)
                if cost(there) < cost(at):
                    x, at = moved, there
                    break
    return x, at


def jacobian(residuals: Callable[[Vector], Vector], x: Vector, at: Vector) -> Vector:
    """Derivatives of the residuals, (residuals, parameters), by differences of one percent."""
    columns = []
    for index in range(len(x)):
        moved = x.copy()
        moved[index] += _DIFFERENCE
        columns.append((residuals(moved) - at) / _DIFFERENCE)
    return np.stack(columns, axis=1) if columns else np.zeros((len(at), 0))


def cost(residuals: Vector) -> float:
    """The sum of the squares."""
    return float(residuals @ residuals)


def intervals(x: Vector, residuals: Vector, slopes: Vector) -> list[tuple[float, float]]:
    """95 % confidence intervals of exp(x), by the fit's linearisation at its end."""
    free = max(len(residuals) - len(x), 1)
    covariance = np.linalg.pinv(slopes.T @ slopes) * cost(residuals) / free
    widths = np.minimum(1.96 * np.sqrt(np.maximum(np.diag(covariance), 0.0)), 20.0)
    return [(float(np.exp(at - width)), float(np.exp(at + width))) for at, width in zip(x, widths, strict=True)]
