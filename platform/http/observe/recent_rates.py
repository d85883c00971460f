"""Rates and percentiles of the last minutes, over a sliding window, for people who look at them live.

The histograms of `/metrics` are cumulative and coarse; here every second has its own counts, forgotten after
`KEPT_SECONDS`. An output costs a logarithm and a few additions.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.outputs import RequestOutput

KEPT_SECONDS = 330
RATE_SECONDS = 5
"""Seconds that a rate is a mean over: the last ones that are over."""
LATENCY_SECONDS = 30
"""Seconds that percentiles look back: they need more requests than rates to mean something."""

_GROWTH = math.log(1.05)
"""Bins are 5 % wide, so that a percentile is at most 2.5 % off."""
_SMALLEST = 1e-5
"""Seconds; the first bin takes all that is shorter."""

Labels = tuple[str, ...]
"""(adapter, tenant), as in the metrics."""


class Quantiles(NamedTuple):
    """Quantiles of durations, in seconds; None without any."""

    samples: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(slots=True)
class Durations:
    """A histogram with logarithmic bins."""

    bins: Counter[int] = field(default_factory=Counter)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.bins[max(0, int(math.log(max(seconds, _SMALLEST) / _SMALLEST) / _GROWTH))] += 1

    def quantiles(self) -> Quantiles:
        """Percentiles: the middle of the bin that the nearest rank falls into."""
        count = self.bins.total()
        if count == 0:
            return Quantiles(0, None, None, None)
        ranks = [math.ceil(share * count) for share in (0.5, 0.9, 0.99)]
        found: list[float | None] = []
        seen = 0
        for number, size in sorted(self.bins.items()):
            seen += size
            while len(found) < len(ranks) and ranks[len(found)] <= seen:
                found.append(_SMALLEST * math.exp((number + 0.5) * _GROWTH))
        return Quantiles(count, *found)


@dataclass(slots=True)
class Slot:
    """Counts of one second."""

    prompt_tokens: int = 0
    finished: int = 0
    """Prompts that have been generated from to the end."""
    output_tokens: Counter[Labels] = field(default_factory=Counter)
    first_token: Durations = field(default_factory=Durations)
    inter_token: Durations = field(default_factory=Durations)


class Point(NamedTuple):
    """The rates of the `RATE_SECONDS`, and the percentiles of the `LATENCY_SECONDS`, before a second."""

    second: int
    """Second of the clock."""
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    """Finished prompts a second."""
    first_token: Quantiles
    inter_token: Quantiles


class RecentRates:
    """Counts of this server's last minutes. They belong to the event loop's thread; but `points` may be called in
    another one, since it reads only seconds that are over, and these no longer change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: dict[int, Slot] = {}  # by second, in order

    def observe(self, labels: Labels, output: RequestOutput, seconds: float, *, first: bool) -> None:
        """Count an output that holds only what is new: the first of a prompt, `seconds` after its arrival, or another,
        `seconds` after the one before."""
        slot = self._slot()
        if first:
            slot.prompt_tokens += len(output.prompt_token_ids)
            slot.first_token.observe(seconds)
        else:
            slot.inter_token.observe(seconds)
        slot.output_tokens[labels] += sum(len(completion.token_ids) for completion in output.outputs)
        slot.finished += output.finished

    def _slot(self) -> Slot:
        second = int(self._clock())
        slot = self._slots.get(second)
        if slot is None:
            slot = self._slots[second] = Slot()
            for old in [s for s in self._slots if s < second - KEPT_SECONDS]:
                del self._slots[old]
        return slot

    def points(self, count: int = 1) -> list[Point]:
        """The last `count` seconds, the present one last."""
        now = int(self._clock())
        first = now - count + 1
        rated, timed = (_Sums(self._before(first, length)) for length in (RATE_SECONDS, LATENCY_SECONDS))
        points = [_point(first, rated, timed)]
        for second in range(first + 1, now + 1):
            for sums, length in ((rated, RATE_SECONDS), (timed, LATENCY_SECONDS)):
                sums.add(self._slots.get(second - 1), 1)
                sums.add(self._slots.get(second - 1 - length), -1)
            points.append(_point(second, rated, timed))
        return points

    def rates(self) -> dict[Labels, float]:
        """Output tokens a second of those (adapter, tenant) that have any."""
        total = Counter[Labels]()
        for slot in self._before(int(self._clock()), RATE_SECONDS):
            total.update(slot.output_tokens)
        return {labels: tokens / RATE_SECONDS for labels, tokens in total.items() if tokens}

    def _before(self, second: int, length: int) -> list[Slot]:
        seconds = range(second - length, second)
        return [self._slots[s] for s in seconds if s in self._slots]


class _Sums:
    """Sums over some seconds, which slide."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.prompt_tokens = self.output_tokens = self.finished = 0
        self.first_token, self.inter_token = Durations(), Durations()
        for slot in slots:
            self.add(slot, 1)

    def add(self, slot: Slot | None, sign: int) -> None:
        """Add a second, or take it away."""
        if slot is None:
            return
        self.prompt_tokens += sign * slot.prompt_tokens
        self.output_tokens += sign * slot.output_tokens.total()
        self.finished += sign * slot.finished
        for mine, theirs in ((self.first_token, slot.first_token), (self.inter_token, slot.inter_token)):
            for number, size in theirs.bins.items():
                mine.bins[number] += sign * size


def _point(second: int, rated: _Sums, timed: _Sums) -> Point:
    return Point(
        second,
        rated.output_tokens / RATE_SECONDS,
        rated.prompt_tokens / RATE_SECONDS,
        rated.finished / RATE_SECONDS,
        timed.first_token.quantiles(),
        timed.inter_token.quantiles(),
    )
