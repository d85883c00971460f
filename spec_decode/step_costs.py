"""What steps take, measured while they run.

    seconds of a step = host(rows) + target(rows, tokens) + sum over drafters of draft(rows served, passes)

`TimeTable` holds such a function of (rows, size) as a table of cells, one for each size (about 4% wide from 64 on) in
each class of rows (two an octave).

- Times are noisy and drift: contexts grow, a neighbour takes the memory bus. `cost_cells` follow them.
- More tokens never take less time: estimates are made monotone by pooling neighbours that disagree (isotonic
  regression, weighted by how often each was seen).
- Once a few classes of rows are known, all are judged against a plane through them (`cost_fit`): what was seen a few
  times is trusted a little. Before, a size that was never seen lies between its neighbours; beyond the last one, on the
  curve of the nearest class of rows, scaled to meet it; beyond that too, it costs little more (`GUESSED_GROWTH`):
  hopeful, so that it is tried and measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np

from .cost_cells import SHORTEST, Cell, Series, Speed, monotone
from .cost_fit import Plane, fit_plane

GUESSED_GROWTH = 0.1
"""Where nothing was measured: share of a step's time that twice as many tokens are guessed to take more."""
GUESSED_DRAFT_SHARE = 0.03
"""A draft pass, before one was measured, over a step of the target."""
GUESSED_LOOKUP_SHARE = 0.002
"""The same for a drafter without passes."""
SHORTEST_GAP = 1e-5
"""Between two steps: what is less is nothing, though not in proportion."""
MIXED = 0
"""Class of rows of the steps that also computed prompt tokens."""
_STEPS_A_DECISION = 32
"""Where drafting pays, about: decisions take some half a per cent of the time (`pace`)."""
_LIKES = 16
"""Of how many steps that draft one is measured, as long as nobody knows. Of long ones each is: there it is little."""
_UNMEASURED = 0.1
"""Of the counting of a step that is measured, what one takes that is not..."""
_JOINING = 2.0
"""...and takes more where others than before are drafted for: they are taken over by code that no cache holds."""
_JOINS_MEMORY = 256.0
"""Steps over which is averaged how many are that."""
_EXACT = 64
_TRUSTED_AFTER = 12
"""Times of a cell after which it weighs as much as the plane."""
_MOST_AT_ONCE = 4
"""For how many times a mean of many counts, at most."""
_MOST_STALE = 128
"""Times after which points, and the plane, are made anew; sooner while there are few..."""
_MUCH = 0.02
"""...and points of a class of rows when one of its cells moves by this at once."""


@lru_cache(1024)
def row_class(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 ...: the largest that `rows` reaches; 0 is `MIXED`."""
    if rows < 2:
        return max(rows, 0)
    power = 1 << (rows.bit_length() - 1)
    return power + power // 2 if rows >= power + power // 2 else power


@lru_cache(1024)
def _size_class(size: int) -> int:
    return size if size <= _EXACT else int(16 * math.log2(size / _EXACT)) + _EXACT + 1


class Curve:
    """A monotone, piecewise linear function of the size, in seconds."""

    __slots__ = ("scale", "seconds", "sizes", "slope")

    def __init__(self, sizes: list[float], seconds: list[float], slope: float) -> None:
        """`sizes` rise; at least one. `slope`: seconds for each further unit beyond the last size."""
        self.sizes = sizes
        self.seconds = seconds
        self.slope = slope
        self.scale = 1.0
        """All are to be multiplied by it."""

    def __call__(self, size: float) -> float:
        """Seconds at `size`; before the first size, those at the first."""
        sizes, seconds = self.sizes, self.seconds
        at = bisect_left(sizes, size)
        if at == 0:
            return seconds[0] * self.scale
        if at == len(sizes):
            return (seconds[-1] + self.slope * (size - sizes[-1])) * self.scale
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return (seconds[at - 1] + share * (seconds[at] - seconds[at - 1])) * self.scale

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """The same for many sizes."""
        inside = np.interp(sizes, self.sizes, self.seconds)
        return (inside + self.slope * np.maximum(sizes - self.sizes[-1], 0.0)) * self.scale


def _low(times: Collection[float]) -> float:
    """The 30% quantile; 0 of none."""
    return sorted(times)[int(0.3 * len(times))] if times else 0.0


class TimeTable:
    """Seconds as a function of (rows, size), learned from single times. Memory is bounded by the classes of sizes
    that occur: a few hundred cells."""

    def __init__(self, speed: Speed | None = None, *, by_row: bool = True, leads: bool = True) -> None:
        """`speed`: what all tables of a machine share. `by_row`: sizes are sums over the rows, twice as many rows are
        like others at twice the size; else they are passes of a drafter, none at 0. `leads`: the speed follows it."""
        self._speed = speed or Speed()
        self._leads = leads
        self.reach = 0.0
        """The largest size that was seen in decoding; 0: none."""
        self._by_row = by_row
        self._series: dict[int, Series] = {}
        self._plane: Plane | None = None
        self._plane_made = -1  # when it was; -1: it is to be made
        self._num_added = 0
        self._curves: dict[int, tuple[int, Curve | None]] = {}  # by class: when it was made
        self._warm: set[tuple[int, int]] = set()  # (rows, size) classes that have been computed before

    def add(self, rows: int, size: int, seconds: float) -> None:
        """A step of `rows` rows and `size` took `seconds`; `rows` may be `MIXED`.

        The first time of a size does not count: kernels are prepared and memory is taken for it, which can cost more
        than the step itself, and a drafter would be given up for it."""
        key = (row_class(rows), _size_class(size))
        if key not in self._warm:
            self._warm.add(key)
            return
        series = self._series.setdefault(row_class(rows), Series())
        cell = series.cells.get(_size_class(size))
        if cell is None:
            cell = series.cells[_size_class(size)] = Cell(size)
        if self._leads and rows != MIXED and cell.is_in_use(self._num_added):
            self._speed.follow(seconds / cell.value, cell.gain)
        before = cell.value
        self._num_added += 1
        cell.add(size, seconds / self._speed.factor, self._num_added)
        if abs(cell.value - before) > _MUCH * before:
            self._curves.pop(row_class(rows), None)
        if cell.count == 1:
            self._curves.clear()
            self._plane_made = -1
        if rows != MIXED:
            self.reach = max(self.reach, size)

    def knows(self, rows: int, size: int) -> bool:
        """Whether about this was seen more than once, or enough else to tell."""
        series = self._series.get(row_class(rows))
        cell = series.cells.get(_size_class(size)) if series else None
        return (cell is not None and cell.count > 1) or self._plane is not None

    def curve(self, rows: int) -> Curve | None:
        """Seconds by size for `rows`, as of now; None before anything was measured."""
        wanted = row_class(rows)
        made, curve = self._curves.get(wanted, (-1, None))
        if self._is_stale(made):
            sizes, values = self._make_points(wanted)
            curve = None if not sizes else _by_tokens(sizes, values) if self._by_row else _by_passes(sizes, values)
            self._curves[wanted] = (self._num_added, curve)
        if curve is not None:
            curve.scale = self._speed.factor
        return curve

    def _is_stale(self, made: int) -> bool:
        return made < 0 or self._num_added - made > min(_MOST_STALE, made // 4)

    def _make_points(self, wanted: int) -> tuple[list[float], list[float]]:
        own = self._series.get(wanted)
        if wanted == MIXED:
            return own.points() if own else ([], [])
        cells = [(key, cell) for key, series in self._series.items() if key != MIXED for cell in series.cells.values()]
        if cells and self._is_stale(self._plane_made):
            self._plane_made = self._num_added
            self._plane = fit_plane(
                [key for key, _ in cells], [cell.size for _, cell in cells], [cell.value for _, cell in cells]
            )
        if self._plane is not None:
            shares = {round(cell.size / key if self._by_row else cell.size, 1) for key, cell in cells}
            return self._blended(wanted, own, shares)
        sizes, values = own.points() if own else ([], [])
        near = self._nearest(wanted)
        return _extended(sizes, values, *near.points()) if near is not None else (sizes, values)

    def _blended(self, wanted: int, own: Series | None, shares: Collection[float]) -> tuple[list[float], list[float]]:
        """The plane, moved towards what was measured for this class as much as that can be trusted."""
        assert self._plane is not None
        error_at, points = Curve([0.0], [0.0], 0.0), {}
        cells = sorted(own.cells.values(), key=lambda cell: cell.size) if own else []
        if cells:
            planes = [self._plane(wanted, cell.size) for cell in cells]
            trusts = [cell.count / (cell.count + _TRUSTED_AFTER) for cell in cells]
            errors = [
                trust * math.log(cell.value / max(plane, SHORTEST))
                for cell, plane, trust in zip(cells, planes, trusts, strict=True)
            ]
            error_at = Curve([cell.size for cell in cells], errors, 0.0)
            points = {
                cell.size: (plane * math.exp(error), min(cell.count, 50))
                for cell, plane, error in zip(cells, planes, errors, strict=True)
            }
        for share in shares:
            size = share * wanted if self._by_row else share
            if all(abs(size - known) > 0.04 * size for known in points):
                points[size] = (self._plane(wanted, size) * math.exp(error_at(size)), 1)
        sizes = sorted(points)
        return sizes, monotone([points[size][0] for size in sizes], [points[size][1] for size in sizes])

    def _nearest(self, wanted: int) -> Series | None:
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


def _by_tokens(sizes: list[float], seconds: list[float]) -> Curve:
    return Curve(sizes, seconds, GUESSED_GROWTH * seconds[-1] / max(sizes[-1], 16.0))


def _by_passes(sizes: list[float], seconds: list[float]) -> Curve:
    return Curve([0.0, *sizes], [0.0, *seconds], seconds[-1] / sizes[-1])


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
        self._speed = Speed()
        self.target = TimeTable(self._speed)
        # Prompt lookup takes microseconds, which depend on what the caches hold: they say nothing of the machine.
        self._drafters = [TimeTable(self._speed if passes else None, by_row=False) for passes in has_passes]
        self._shares = [GUESSED_DRAFT_SHARE if passes else GUESSED_LOOKUP_SHARE for passes in has_passes]
        # Gaps between steps, and those after steps that drafted: each of size 1.
        self._gaps = TimeTable(self._speed, by_row=False, leads=False)
        self._drafting_gaps = TimeTable(self._speed, by_row=False, leads=False)
        # What follows, in seconds, is kept over the machine's speed, as cells are.
        self._catch_up: list[deque[float]] = [deque(maxlen=8) for _ in has_passes]  # seconds a token that it lags
        self._caught_up = [False for _ in has_passes]  # whether it ever did: as with sizes, the first time is left out
        self._bookkeeping: deque[float] = deque(maxlen=16)
        self._likes: deque[int] = deque(maxlen=16)  # of how many steps each of those was one
        self._decisions: deque[float] = deque(maxlen=16)
        self._joins, self._joined_steps = 0.0, 1.0  # lately, of the steps that draft and are not measured
        self._step = 0.0  # seconds of a step of the target, smoothed, whatever it computed

    def host_seconds(self, rows: int) -> float:
        """From the end of one step's drafting to the start of the next step, of `rows` rows. Never more than after
        drafting, of which more is known while there is drafting."""
        known = [curve(1) for curve in (self._gaps.curve(rows), self._drafting_gaps.curve(rows)) if curve is not None]
        return min(known, default=0.0)

    def drafting_seconds(self, rows: int) -> float:
        """What a step that drafts takes more of all that is neither the target's nor a drafter's: a large part of the
        step of a small model."""
        gap = self._drafting_gaps.curve(rows)
        longer = max(0.0, gap(1) - self.host_seconds(rows)) if gap is not None else 0.0
        return longer + self.bookkeeping_seconds

    @property
    def bookkeeping_seconds(self) -> float:
        """Counting, of that, and deciding now and then; most steps are not measured, which is most of it."""
        share = len(self._likes) / sum(self._likes) if self._likes else 1.0 / _LIKES
        share += (1.0 - share) * (_UNMEASURED + _JOINING * self._joins / self._joined_steps)
        return self._counting_seconds * share + self.decision_seconds / _STEPS_A_DECISION

    @property
    def measured_bookkeeping_seconds(self) -> float:
        """The same of a step that is measured."""
        return self._counting_seconds + self.decision_seconds / _STEPS_A_DECISION

    @property
    def _counting_seconds(self) -> float:
        return _low(self._bookkeeping) * self._speed.factor

    @property
    def decision_seconds(self) -> float:
        """A decision, with all that is taken in before it."""
        return _low(self._decisions) * self._speed.factor

    def add_gap(self, rows: int, seconds: float, num_steps: int = 1) -> None:
        """Time between two steps of `rows` rows, of which the first did not draft: the mean of so many such times."""
        for _ in range(min(num_steps, _MOST_AT_ONCE)):
            self._gaps.add(rows, 1, max(seconds, SHORTEST_GAP))

    def add_drafting_gap(self, rows: int, seconds: float) -> None:
        """Time between two steps of `rows` rows, of which the first drafted."""
        self._drafting_gaps.add(rows, 1, max(seconds, SHORTEST_GAP))

    def add_bookkeeping(self, seconds: float, num_steps: int = 1) -> None:
        """Time of counting in a step that drafted, the one of `num_steps` that was measured; 0: others are not so."""
        self._bookkeeping.append(max(seconds, 0.0) / self._speed.factor)
        if num_steps:
            self._likes.append(num_steps)

    def add_joins(self, num_joins: int, num_steps: int) -> None:
        """So many of that many steps that draft and are not measured were the first ones of their batch. Those in which
        another than the first drafter serves somebody are no part of either."""
        keep = math.exp(-num_steps / _JOINS_MEMORY)
        self._joins = self._joins * keep + num_joins
        self._joined_steps = self._joined_steps * keep + num_steps

    def add_decision(self, seconds: float) -> None:
        """Time of a decision, with all that is taken in before it."""
        self._decisions.append(max(seconds, 0.0) / self._speed.factor)

    def add_step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens of `rows` decoding rows, or of a `MIXED` batch."""
        seconds = max(seconds, SHORTEST)
        self.target.add(rows, tokens, seconds)
        self._step = seconds if self._step == 0.0 else self._step + 0.1 * min(seconds - self._step, self._step)

    def add_draft(self, drafter: int, size: DraftSize, seconds: float) -> None:
        """A call of a drafter."""
        seconds = max(seconds, SHORTEST)
        if size.lag > 0:
            known = self.draft_curve(drafter, size.rows)(size.passes)
            if self._caught_up[drafter]:
                self._catch_up[drafter].append(max(seconds - known, 0.0) / size.lag / self._speed.factor)
            self._caught_up[drafter] = True
        else:
            self._drafters[drafter].add(MIXED if size.mixed else size.rows, size.passes, seconds)

    def target_curve(self, rows: int) -> Curve:
        """Seconds of a step by the tokens it computes, for `rows` decoding rows or a `MIXED` batch."""
        return self.target.curve(rows) or _by_tokens([float(rows)], [self._step or 1e-3])

    def draft_curve(self, drafter: int, rows: int) -> Curve:
        """Seconds of a call of a drafter by its passes, for `rows` rows; none at 0. A further pass takes
        what the passes before it took."""
        return self._drafters[drafter].curve(rows) or _by_passes([1.0], [self._shares[drafter] * self._step])

    def catch_up(self, drafter: int, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` that a drafter lags."""
        times = self._catch_up[drafter]
        each = median(times) * self._speed.factor if times else self.draft_curve(drafter, 1)(1) / 32
        return each * num_tokens
