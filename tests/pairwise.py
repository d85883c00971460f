"""Cases of a test with several parameters that cover every pair of their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few tuples of one value of each axis, such that any two values of two axes are together in one. Of two axes these
    are all tuples. An axis that is a dict stands for its keys."""
    values = [list(axis) for axis in axes]
    left = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a, b in itertools.product(range(len(values[i])), range(len(values[j])))
    }
    every = list(itertools.product(*map(range, map(len, values))))
    found = []
    while left:
        best = max(every, key=lambda case: len(left & _pairs(case)))
        left -= _pairs(best)
        found.append(tuple(axis[index] for axis, index in zip(values, best, strict=True)))
    return found


def _pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)}
