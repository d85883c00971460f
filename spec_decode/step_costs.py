"""What steps take, measured while they run.

    seconds of a step = host + target(rows, tokens) + sum over drafters of draft(rows served, passes)

`TimeTable` holds such a function of (rows, size) as a table of cells, one for each size (about 4% wide from 64 on) in
each class of rows (two an octave). Times are noisy and drift: contexts grow, a neighbour takes the memory bus.

- A cell is the least of its first two times, then the median of its first eight, then a running mean whose steps are
  clipped to three mean deviations: one time ten times too long moves it little.
- What drifts is mostly common to all cells. It is followed by one factor for the table, and cells hold times over that
  factor: a cell that was last visited long ago stays comparable with one visited now.
- More tokens never take less time: estimates are made monotone by pooling neighbours that disagree (isotonic
  regression, weighted by how often each was seen).
- A size that was never seen lies between its neighbours; beyond the last one, on the curve of the nearest class of
  rows, scaled to meet it; beyond that too, it costs little more (`GUESSED_GROWTH`): hopeful, so that it is tried and
  measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

GUESSED_GROWTH = 0.1
"""Where nothing was measured: share of a step's time that twice as many tokens are guessed to take more."""
GUESSED_DRAFT_SHARE = 0.03
"""A draft pass, before one was measured, over a step of the target."""
GUESSED_LOOKUP_SHARE = 0.002
"""The same for a drafter without passes."""
SHORTEST = 1e-9
"""No time is less: clocks have a resolution, and times are divided by."""
MIXED = 0
"""Class of rows of the steps that also computed prompt tokens."""
_FIRST, _EXACT = 8, 64
_MIN_GAIN, _DRIFT_GAIN = 0.02, 0.05
_MAX_DRIFT_STEP = 0.3


def row_class(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 ...: the largest that `rows` reaches; 0 is `MIXED`."""
    if rows < 2:
        return max(rows, 0)
    power = 1 << (rows.bit_length() - 1)
    return power + power // 2 if rows >= power + power // 2 else power


def _size_class(size: int) -> int:
    return size if size <= _EXACT else int(16 * math.log2(size / _EXACT)) + _EXACT + 1


class Curve:
    """A monotone, piecewise linear function of the size, in seconds."""

    __slots__ = ("seconds", "sizes", "slope")

    def __init__(self, sizes: list[float], seconds: list[float], slope: float) -> None:
        """`sizes` rise; at least one. `slope`: seconds for each further unit beyond the last size."""
        self.sizes = sizes
        self.seconds = seconds
        self.slope = slope

    def __call__(self, size: float) -> float:
        """Seconds at `size`; before the first size, those at the first."""
        sizes, seconds = self.sizes, self.seconds
        at = bisect_left(sizes, size)
        if at == 0:
            return seconds[0]
        if at == len(sizes):
            return seconds[-1] + self.slope * (size - sizes[-1])
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """The same for many sizes."""
        inside = np.interp(sizes, self.sizes, self.seconds)
        return inside + self.slope * np.maximum(sizes - self.sizes[-1], 0.0)


class _Cell:
    """Times of one size in one class of rows, over the table's drift."""

    __slots__ = ("count", "deviation", "first", "size", "value")

    def __init__(self, size: float) -> None:
        self.size = size
        self.count = 0
        self.value = 0.0
        self.deviation = 0.0
        self.first: list[float] = []

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        gain = max(_MIN_GAIN, 1.0 / self.count)
        self.size += gain * (size - self.size)
        if self.count <= _FIRST:
            self.first.append(seconds)
            self.value = min(self.first) if self.count < 3 else median(self.first)
            self.deviation = median(abs(x - self.value) for x in self.first)
            return
        self.first = []
        error = seconds - self.value
        most = 3.0 * self.deviation + 0.02 * self.value
        error = max(-most, min(most, error))
        self.value += gain * error
        self.deviation += gain * (abs(error) - self.deviation)


class _Series:
    """The cells of one class of rows."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells: dict[int, _Cell] = {}

    def points(self) -> tuple[list[float], list[float]]:
        """(sizes, values), monotone: pools adjacent violators (Barlow et al. 1972)."""
        pools: list[list[float]] = []  # weight, value, and the number of sizes in it
        cells = sorted(self.cells.values(), key=lambda cell: cell.size)
        for cell in cells:
            pools.append([min(cell.count, 50), cell.value, 1])
            while len(pools) > 1 and pools[-1][1] < pools[-2][1]:
                weight, value, number = pools.pop()
                last = pools[-1]
                last[1] = (last[0] * last[1] + weight * value) / (last[0] + weight)
                last[0] += weight
                last[2] += number
        return [cell.size for cell in cells], [value for _, value, number in pools for _ in range(int(number))]


class TimeTable:
    """Seconds as a function of (rows, size), learned from single times. Memory is bounded by the classes of sizes
    that occur: a few hundred cells."""

    def __init__(self) -> None:
        self._series: dict[int, _Series] = {}
        self._drift = 0.0
        self._warm: set[tuple[int, int]] = set()  # (rows, size) classes that have been computed before

    def add(self, rows: int, size: int, seconds: float) -> None:
        """A step of `rows` rows and `size` took `seconds`; `rows` may be `MIXED`.

        The first time of a size does not count: kernels are prepared and memory is taken for it, which can cost more
        than the step itself, and a drafter would be given up for it."""
        key = (row_class(rows), _size_class(size))
        if key not in self._warm:
            self._warm.add(key)
            return
        series = self._series.setdefault(row_class(rows), _Series())
        cell = series.cells.get(_size_class(size))
        if cell is None:
            cell = series.cells[_size_class(size)] = _Cell(size)
        if cell.count >= _FIRST and cell.value > 0.0 and rows != MIXED:
            error = math.log(max(seconds, SHORTEST) / cell.value) - self._drift
            self._drift += _DRIFT_GAIN * max(-_MAX_DRIFT_STEP, min(_MAX_DRIFT_STEP, error))
        cell.add(size, seconds * math.exp(-self._drift))

    def count(self, rows: int, size: int) -> int:
        """How often about this was seen."""
        series = self._series.get(row_class(rows))
        cell = series.cells.get(_size_class(size)) if series else None
        return cell.count if cell else 0

    def reach(self, rows: int) -> float:
        """The largest size that was seen for about so many rows; 0: none."""
        series = self._series.get(row_class(rows))
        return max((cell.size for cell in series.cells.values()), default=0.0) if series else 0.0

    def points(self, rows: int) -> tuple[list[float], list[float]]:
        """(sizes, seconds), both rising, for `rows`; empty before anything was measured."""
        wanted = row_class(rows)
        own, near = self._series.get(wanted), self._nearest(wanted)
        sizes, values = own.points() if own else ([], [])
        if near is not None:
            sizes, values = _extended(sizes, values, *near.points())
        scale = math.exp(self._drift)
        return sizes, [value * scale for value in values]

    def _nearest(self, wanted: int) -> _Series | None:
        """The series of the class nearest to `wanted`, other than it; never the mixed one."""
        others = [key for key in self._series if key not in (wanted, MIXED)]
        if not others:
            return None
        return self._series[min(others, key=lambda key: abs(math.log((key + 0.5) / (wanted + 0.5))))]


def _extended(
    sizes: list[float], values: list[float], more: list[float], more_values: list[float]
) -> tuple[list[float], list[float]]:
    """The points, and those of another class on both sides of them, scaled to meet them."""
    if not sizes:
        return list(more), list(more_values)
    other = Curve(more, more_values, 0.0)
    left = values[0] / max(other(sizes[0]), 1e-12)
    right = values[-1] / max(other(sizes[-1]), 1e-12)
    before = [(x, min(v * left, values[0])) for x, v in zip(more, more_values, strict=True) if x < sizes[0]]
    after = [(x, max(v * right, values[-1])) for x, v in zip(more, more_values, strict=True) if x > sizes[-1]]
    joined = [*before, *zip(sizes, values, strict=True), *after]
    return [x for x, _ in joined], [v for _, v in joined]


class DraftSize(NamedTuple):
    """What one call of a drafter was asked for."""

    rows: int
    """Rows that were asked for drafts..."""
    passes: int
    """...and the most drafts that one of them was asked for."""
    lag: int = 0
    """Tokens that it first had to catch up with, beyond those of the last step."""
    mixed: bool = False
    """Whether the step also computed prompt tokens: drafters with layers compute them too."""


class StepCosts:
    """All that a step's time is predicted from."""

    def __init__(self, has_passes: Sequence[bool]) -> None:
        """`has_passes`: for each drafter, whether it is a neural one."""
        self.target = TimeTable()
        self._drafters = [TimeTable() for _ in has_passes]
        self._idle = [0.0 for _ in has_passes]
        self._shares = [GUESSED_DRAFT_SHARE if passes else GUESSED_LOOKUP_SHARE for passes in has_passes]
        self._catch_up = [0.0 for _ in has_passes]  # seconds a token that a drafter lags
        self._gaps: deque[float] = deque(maxlen=16)
        self._step = 0.0  # seconds of a step of the target, smoothed, whatever it computed

    @property
    def host_seconds(self) -> float:
        """From the end of one step's drafting to the start of the next step: the 30% quantile of the last 16, since
        an engine that waits for work is not busy."""
        gaps = sorted(self._gaps)
        return gaps[int(0.3 * len(gaps))] if gaps else 0.0

    def add_gap(self, seconds: float) -> None:
        """Time between two steps."""
        self._gaps.append(max(seconds, 0.0))

    def add_step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens of `rows` decoding rows, or of a `MIXED` batch."""
        seconds = max(seconds, SHORTEST)
        self.target.add(rows, tokens, seconds)
        self._step = seconds if self._step == 0.0 else self._step + 0.1 * min(seconds - self._step, self._step)

    def add_draft(self, drafter: int, size: DraftSize, seconds: float) -> None:
        """A call of a drafter."""
        seconds = max(seconds, SHORTEST)
        if size.rows == 0:
            if not size.mixed:
                self._idle[drafter] += 0.1 * (min(seconds, 2 * self._idle[drafter] + 1e-4) - self._idle[drafter])
        elif size.lag > 0:
            known = self.draft_curve(drafter, size.rows)(size.passes)
            each = max(seconds - known, 0.0) / size.lag
            last = self._catch_up[drafter]
            self._catch_up[drafter] = each if last == 0.0 else last + 0.2 * (min(each, 3 * last) - last)
        else:
            self._drafters[drafter].add(MIXED if size.mixed else size.rows, size.passes, seconds)

    def target_curve(self, rows: int) -> Curve:
        """Seconds of a step by the tokens it computes, for `rows` decoding rows or a `MIXED` batch."""
        sizes, seconds = self.target.points(rows)
        if not sizes:
            sizes, seconds = [float(rows)], [self._step or 1e-3]
        return Curve(sizes, seconds, GUESSED_GROWTH * seconds[-1] / max(sizes[-1], 16.0))

    def draft_curve(self, drafter: int, rows: int) -> Curve:
        """Seconds of a call of a drafter by its passes, for `rows` rows; at 0, those of a call that asks for nothing.
        A further pass takes what the passes before it took."""
        sizes, seconds = self._drafters[drafter].points(rows)
        idle = self._idle[drafter]
        if not sizes:
            each = self._shares[drafter] * self._step
            return Curve([0.0, 1.0], [idle, idle + each], each)
        seconds = [max(value, idle) for value in seconds]
        slope = (seconds[-1] - idle) / sizes[-1]
        return Curve([0.0, *sizes], [idle, *seconds], slope)

    def catch_up(self, drafter: int, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` that a drafter lags."""
        each = self._catch_up[drafter] or self.draft_curve(drafter, 1)(1) / 32
        return each * num_tokens
