"""A plane through what was measured for a few numbers of rows, for those that were measured badly or not at all.

    seconds = c0 + c1 rows + c2 size + c3 rows size,    c >= 0

Fitted to relative errors. What disturbs a step makes it longer, and often a whole burst of steps: times above the plane
weigh less the farther they are (iteratively reweighted least squares), those below do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_CLASSES = 3
"""Numbers of rows that must have been measured."""
_ROUNDS = 6
_SCALE = 0.1
"""Relative error above the plane at which a time's weight has halved."""


class Plane(NamedTuple):
    """The fit."""

    coefficients: np.ndarray
    """[4]"""

    def __call__(self, rows: float, size: float) -> float:
        """Seconds."""
        return float(_features(np.array([rows]), np.array([size]))[0] @ self.coefficients)


def fit_plane(rows: Sequence[float], sizes: Sequence[float], seconds: Sequence[float]) -> Plane | None:
    """The plane through N times; None when there are too few numbers of rows, or no time at all was positive."""
    if len(set(rows)) < LEAST_CLASSES or min(seconds) <= 0.0:
        return None
    relative = _features(np.array(rows, dtype=float), np.array(sizes, dtype=float)) / np.array(seconds)[:, None]
    weights = np.ones(len(seconds))
    coefficients = np.zeros(4)
    for _ in range(_ROUNDS):
        coefficients = _non_negative(relative, weights)
        above = np.maximum(1.0 - relative @ coefficients, 0.0)  # of a time that is above the plane
        weights = 1.0 / (1.0 + (above / _SCALE) ** 2)
    return Plane(coefficients) if coefficients.any() else None


def _features(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(rows), rows, sizes, rows * sizes], axis=1)


def _non_negative(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Least squares to ones with weights, where coefficients that would be negative are left out, one at a time."""
    root = np.sqrt(weights)
    kept = list(range(relative.shape[1]))
    while kept:
        found = np.linalg.lstsq(relative[:, kept] * root[:, None], root, rcond=None)[0]
        worst = int(found.argmin())
        if found[worst] >= 0.0:
            result = np.zeros(relative.shape[1])
            result[kept] = found
            return result
        kept.pop(worst)
    return np.zeros(relative.shape[1])
