"""Times of one kind of step, followed as they change; and what changes for all of them at once.

- What disturbs a step makes it longer, so times are judged by the lower ones: a cell is the lower third of its first
  eight times. Then it follows slowly, downwards twice as fast as upwards (an expectile), by steps that are
  clipped to three mean deviations: one time ten times too long moves it little. After long without any it follows
  sooner: a few times of a trial then say more than many from another minute.
- What changes sooner is mostly common to all cells, the machine's speed. It is followed by one factor for all tables,
  and cells hold times over that factor, so that one that was last visited a while ago stays comparable with one visited
  now. In noise the factor wanders, a few per cent in a thousand steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

SHORTEST = 1e-9
"""No time is less: clocks have a resolution, and times are divided by."""
_FIRST = 8
"""Times of a cell before which it only collects."""
_GAIN, _DOWNWARDS = 0.03, 2.0
_MOST_GAIN = 0.5
_REMEMBERED = 500.0
"""Times of its table over which what a cell knows fades."""
_FEW, _LONG_AGO = 8, 32
"""Times that a cell must know of to say something of the machine, and times of its table after the last of them when it
does not any more."""
_KNOWN = 3.0
"""What is left of it always, in times."""
_DRIFT_GAIN, _MOST_DRIFT_GAIN = 0.03, 0.1
_MAX_DRIFT_STEP = 0.3


def _lower_third(times: Collection[float]) -> float:
    return sorted(times)[(len(times) - 1) // 3]


class Cell:
    """Times of one size in one class of rows, over the table's drift."""

    __slots__ = ("count", "deviation", "first", "seen", "size", "value", "weight")

    def __init__(self, size: float) -> None:
        self.size = size
        self.count = 0
        self.value = 0.0
        self.deviation = 0.0
        self.first: list[float] = []
        self.seen = 0
        """When the last time was added, counted in times of the table."""
        self.weight = 0.0
        """Times that it knows of, those long ago for less."""

    def weight_at(self, now: int) -> float:
        """What is left of `weight`."""
        return self.weight * math.exp((self.seen - now) / _REMEMBERED)

    @property
    def gain(self) -> float:
        """How much one more time counts."""
        return max(_GAIN, 1.0 / (_KNOWN + self.weight))

    def is_in_use(self, now: int) -> bool:
        """Whether a time that is not like it says something of the machine, rather than of the cell."""
        return self.count >= _FEW and now - self.seen < _LONG_AGO and self.value > 0.0

    def add(self, size: float, seconds: float, now: int) -> None:
        """One more time, the table's `now`-th."""
        if self.count >= _FIRST and self.value <= 0.0:  # gaps may be nothing for a while
            self.count, self.first = 0, []
        self.weight = self.weight_at(now) + 1.0
        self.seen = now
        self.count += 1
        self.size += max(_GAIN, 1.0 / self.count) * (size - self.size)
        if self.count <= _FIRST:
            self.first.append(seconds)
            self.value = _lower_third(self.first)
            self.deviation = median(abs(x - self.value) for x in self.first)
            return
        self.first = []
        gain = self.gain
        error = seconds - self.value
        most = 3.0 * self.deviation + gain * self.value
        error = max(-most, min(most, error))
        self.value += (gain if error > 0.0 else min(_MOST_GAIN, _DOWNWARDS * gain)) * error
        self.deviation += gain * (abs(error) - self.deviation)


class Series:
    """The cells of one class of rows."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}

    def points(self) -> tuple[list[float], list[float]]:
        """(sizes, values), monotone."""
        cells = sorted(self.cells.values(), key=lambda cell: cell.size)
        values = [cell.value for cell in cells]
        return [cell.size for cell in cells], monotone(values, [min(cell.count, 50) for cell in cells])


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall: pools adjacent violators (Barlow et al. 1972)."""
    pools: list[list[float]] = []  # weight, value, and the number of values in it
    for value, weight in zip(values, weights, strict=True):
        pools.append([weight, value, 1])
        while len(pools) > 1 and pools[-1][1] < pools[-2][1]:
            weight, value, number = pools.pop()
            last = pools[-1]
            last[1] = (last[0] * last[1] + weight * value) / (last[0] + weight)
            last[0] += weight
            last[2] += number
    return [value for _, value, number in pools for _ in range(int(number))]


class Speed:
    """What a step takes now over what it took when it was measured first, whatever the step: the machine's speed."""

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0

    def follow(self, ratio: float, gain: float) -> None:
        """A step took `ratio` of what it took at first; `gain`: see `Cell`. Cells that are in use move the speed about
        as fast as themselves: what is common to them is the machine's."""
        error = math.log(max(ratio, SHORTEST)) - self._log
        error = max(-_MAX_DRIFT_STEP, min(_MAX_DRIFT_STEP, error))
        gain = max(_DRIFT_GAIN, min(gain, _MOST_DRIFT_GAIN))
        self._log += (gain if error > 0.0 else min(_MOST_GAIN, _DOWNWARDS * gain)) * error
        self.factor = math.exp(self._log)
