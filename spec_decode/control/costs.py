"""Costs: seconds of a target step by its rows and drafts, and of drafting.

Both are tables of medians of recent measurements over classes of sizes (1, 2, 3, 4, 6, 8, 12, 16, ...), linear
between them. All times share one drift factor, so that a machine that becomes slower or faster does not bias recently
measured sizes. Sizes with drafts age with each draft step: an old time counts less than new ones of its neighbours, and
is then forgotten, so that a slow start has no lasting effect.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable

_REMEMBERED = 5
"""Measurements of a size that are remembered: their median ignores two steps delayed by other programs, and one trial
of four rounds is enough to correct it."""
_DRIFT = 0.35
"""Exponent with which a step that took longer than expected raises all estimates: two thirds of a change of the
machine's speed are followed within three steps; the median of the size in use absorbs the rest."""
_CLIP = 2.0
"""Ratio to the expected time from which a step does not count as drift: other programs delayed it."""
_SURE = 3
"""Measurements after which the time of a size counts as known."""
_FREE_SLOPE = 1.0 / 256
"""Cost of one more token, as a share of a step without drafts, before any measurement: decoding reads weights, so one
more token costs little, and a low guess is soon measured."""
_LEAST_SHARE = 0.5
"""Least time of a step, as a share of that with the fewest drafts that were measured: extrapolation from two noisy
points may reach zero."""

_HALF_LIFE = 8
"""Rounds with drafts after which the time of another size counts half: two trials of four rounds."""
_MOST_HALVINGS = 64.0
"""Bound of an old time's weight from below: at 0 the mean of two of them is not defined."""
_FORGOTTEN = 256
"""Rounds with drafts after which the time of a larger size is forgotten; that of a smaller one is bounded by theirs."""


def size_class(size: int) -> int:
    """Index of the class that a number of rows or drafts belongs to: 0, 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..."""
    if size <= 4:
        return size
    power = (size - 1).bit_length()  # 2**(power-1) < size <= 2**power
    return 2 * power - 1 + (size > 3 << (power - 2))


class RecentTimes:
    """The last measurements at about one size."""

    __slots__ = ("_seconds", "count", "measured_at", "size")

    def __init__(self) -> None:
        self.size = 0.0
        """Mean of the sizes at which it was measured."""
        self.count = -1
        """Measurements, without the first one of a size, which prepares kernels and allocates memory."""
        self.measured_at = 0
        """Number of the round that measured it last, counted by the curve."""
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, size: float, seconds: float) -> None:
        """Record one measurement."""
        self.count += 1
        if self.count <= 1:
            self._seconds.clear()
            self.size = size
        self._seconds.append(seconds)
        self.size += (size - self.size) / min(max(self.count, 1), _REMEMBERED)

    @property
    def seconds(self) -> float:
        """The lower median of the last measurements."""
        return sorted(self._seconds)[(len(self._seconds) - 1) // 2]


class Curve:
    """Seconds as a function of one size, from medians at a few sizes; never falling."""

    def __init__(self) -> None:
        self._sizes: dict[int, RecentTimes] = {}
        self._points: tuple[list[float], list[float]] | None = None
        self._rounds = 0
        self._last = 0

    def add(self, size: int, seconds: float) -> None:
        """Record one measurement."""
        self._rounds += size > 0
        self._last = size or self._last
        known = self._sizes.get(size_class(size))
        if known is None:
            known = self._sizes[size_class(size)] = RecentTimes()
        known.add(size, seconds)
        known.measured_at = self._rounds
        self._points = None

    def _age(self, recent: RecentTimes) -> int:
        """Rounds with drafts since a size with drafts was measured."""
        return self._rounds - recent.measured_at if recent.size else 0

    def is_known(self, size: int) -> bool:
        """True if this class of sizes was measured often enough."""
        known = self._sizes.get(size_class(size))
        return known is not None and known.count >= _SURE

    def at(self, size: float) -> float:
        """Seconds at a size: linear between measured sizes and beyond them. The curve is not empty."""
        sizes, seconds = self._points or self._fit()
        if len(sizes) == 1:
            return max(0.0, seconds[0] * (1.0 + _FREE_SLOPE * (size - sizes[0])))
        after = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        left, right = sizes[after - 1], sizes[after]
        slope = (seconds[after] - seconds[after - 1]) / (right - left)
        if size > sizes[-1]:  # the last two points alone are too noisy to extrapolate
            slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
            return seconds[-1] + slope * (size - sizes[-1])
        return max(0.0, seconds[after - 1] + slope * (size - left))

    @property
    def has_slope(self) -> bool:
        """True when more than one size was measured."""
        return len(self._sizes) > 1

    @property
    def least(self) -> float:
        """Seconds of the smallest measured size."""
        return (self._points or self._fit())[1][0]

    def _fit(self) -> tuple[list[float], list[float]]:
        """Points whose seconds do not fall: neighbours that do are averaged (pool adjacent violators)."""
        pooled: list[tuple[float, float, int]] = []  # (seconds, weight, number of points)
        by_size = sorted(self._sizes.items(), key=lambda entry: entry[1].size)
        kept = [(key, it) for key, it in by_size if it.size <= self._last or self._age(it) < _FORGOTTEN]
        if len(kept) == 1:  # a single point has no slope: the next size stays, within the possible cost of more drafts
            kept = by_size[:2]
        self._sizes = dict(kept)
        known = list(self._sizes.values())
        for recent in known:
            weight = min(max(recent.count, 1), _REMEMBERED) * 0.5 ** min(self._age(recent) / _HALF_LIFE, _MOST_HALVINGS)
            value, points = recent.seconds, 1
            if pooled and self._age(recent) >= _FORGOTTEN and recent.size > self._last:
                value = min(max(value, pooled[0][0]), pooled[0][0] * recent.size / known[0].size)
            while pooled and pooled[-1][0] > value:
                other, other_weight, other_points = pooled.pop()
                value = (value * weight + other * other_weight) / (weight + other_weight)
                weight, points = weight + other_weight, points + other_points
            pooled.append((value, weight, points))
        seconds = [value for value, _, points in pooled for _ in range(points)]
        self._points = [recent.size for recent in known], seconds
        return self._points


Padded = Callable[[int, float], float]
"""Function from numbers of rows and of drafts to the number of drafts that fit into the step's padded shape."""


class StepCosts:
    """Seconds of a step with a number of rows, each of which computes one token and its drafts. A padded step has the
    time of its shape, so that drafts within a shape cost nothing more."""

    def __init__(self, padded: Padded | None = None) -> None:
        """`padded`: number of drafts that a step is padded to; None: none is padded."""
        self._padded: Padded = padded or (lambda rows, drafts: drafts)
        self._curves: dict[int, Curve] = {}  # by class of rows: seconds by number of drafts
        self._drift = 1.0

    @property
    def drift(self) -> float:
        """Ratio of present times to those of the curves."""
        return self._drift

    def add(self, rows: int, drafts: int, seconds: float) -> None:
        """Record a step of `rows` rows that verified `drafts` drafts in all, and took `seconds` > 0."""
        drafts = int(self._padded(rows, drafts))
        curve = self._curves.get(size_class(rows))
        if curve is None:
            curve = self._curves[size_class(rows)] = Curve()
        if curve.is_known(drafts):
            expected = curve.at(drafts) * self._drift
            if expected > 0.0 and seconds < _CLIP * expected:
                self._drift *= (seconds / expected) ** _DRIFT
        curve.add(drafts, seconds / self._drift)

    def curve(self, rows: int) -> Curve | None:
        """The measured curve for a number of rows, or that of the nearest class of rows; None before any step."""
        return _nearest(self._curves, rows)

    def seconds(self, rows: int, drafts: float) -> float:
        """Expected seconds of a step; 0 before any step was measured. A class of rows whose steps have had no drafts
        yet has the slope of the nearest one whose steps have."""
        curve = self.curve(rows)
        if curve is None:
            return 0.0
        drafts = self._padded(rows, drafts)
        found = curve.at(drafts)
        if not curve.has_slope:
            sloped = _nearest({key: other for key, other in self._curves.items() if other.has_slope}, rows)
            if sloped is not None:
                found = curve.least + max(0.0, sloped.at(drafts) - sloped.at(0))
        return max(found, _LEAST_SHARE * curve.least) * self._drift


class DraftCosts:
    """Seconds from one target step to the next: drafting and other work. The first drafts of a request take longer,
    since the drafter computes the tokens that it has not seen."""

    def __init__(self, steps: StepCosts) -> None:
        """`steps` has the present speed of the machine."""
        self._steps = steps
        self._curves: dict[tuple[int, bool], dict[int, Curve]] = {}
        self._catch_up = RecentTimes()  # seconds a token

    def add(self, drafter: int, rows: int, drafts: int, seconds: float, lag: int = 0) -> None:
        """Record a round: `drafter` made at most `drafts` drafts for each of some of `rows` rows; with 0 drafts it is
        the gap of a round without drafting.

        Args:
            lag: Tokens that the drafter computed first.
        """
        seconds = max(0.0, seconds) / self._steps.drift
        by_rows = self._curves.setdefault((drafter if drafts else -1, drafts > 0), {})
        if lag and by_rows:
            known = _nearest(by_rows, rows)
            assert known is not None, "there are curves"
            self._catch_up.add(1, max(0.0, seconds - known.at(drafts)) / lag)
            return
        by_rows.setdefault(size_class(rows), Curve()).add(drafts, seconds)

    def seconds(self, drafter: int, rows: int, drafts: int) -> float:
        """Expected seconds; 0 if nothing similar was measured."""
        curve = _nearest(self._curves.get((drafter if drafts else -1, drafts > 0), {}), rows)
        return 0.0 if curve is None else curve.at(drafts) * self._steps.drift

    def catch_up_seconds(self, num_tokens: float) -> float:
        """Expected seconds that the drafter takes for tokens that it has not seen; 0 before it was measured."""
        return self._catch_up.seconds * num_tokens * self._steps.drift if self._catch_up.count >= 0 else 0.0


def _nearest(curves: dict[int, Curve], rows: int) -> Curve | None:
    """The curve of the class of `rows`, or of the nearest class that has one."""
    wanted = size_class(rows)
    found = curves.get(wanted)
    if found is not None or not curves:
        return found
    classes = sorted(curves)
    at = bisect_right(classes, wanted)
    around = classes[max(at - 1, 0) : at + 1]
    return curves[min(around, key=lambda index: abs(index - wanted))]
