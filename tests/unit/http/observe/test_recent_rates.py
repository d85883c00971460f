"""Rates and percentiles of the last minutes."""

import random

import pytest

from outrider.platform.core.outputs import CompletionOutput, RequestOutput
from outrider.platform.http.observe.recent_rates import (
    KEPT_SECONDS,
    LATENCY_SECONDS,
    RATE_SECONDS,
    Durations,
    RecentRates,
)

BASE, SQL = ("", "default"), ("sql", "acme")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recent(clock) -> RecentRates:
    return RecentRates(clock)


def output(tokens: int, prompt: int = 7, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [0] * prompt, [CompletionOutput(0, "", [1] * tokens)], finished)


def test_rates_are_those_of_the_seconds_that_are_over(recent, clock):
    recent.observe(BASE, output(3), 0.1, first=True)
    recent.observe(BASE, output(2, finished=True), 0.01, first=False)
    assert recent.points()[-1].output_tokens_per_second == 0, "this second is not over"
    clock.now += 1
    (point,) = recent.points()
    assert point.second == 1001
    assert point.output_tokens_per_second == 5 / RATE_SECONDS
    assert point.prompt_tokens_per_second == 7 / RATE_SECONDS
    assert point.requests_per_second == 1 / RATE_SECONDS
    clock.now += RATE_SECONDS
    assert recent.points()[0].output_tokens_per_second == 0


def test_rates_by_labels(recent, clock):
    recent.observe(BASE, output(10), 0.1, first=True)
    recent.observe(SQL, output(20), 0.1, first=True)
    clock.now += 1
    assert recent.rates() == {BASE: 10 / RATE_SECONDS, SQL: 20 / RATE_SECONDS}
    clock.now += RATE_SECONDS
    assert recent.rates() == {}


def test_percentiles_are_at_most_half_a_bin_off():
    durations = Durations()
    values = sorted(random.uniform(0.0005, 30) for _ in range(2000))
    for value in values:
        durations.observe(value)
    count, p50, p90, p99 = durations.quantiles()
    assert count == 2000
    for share, found in ((0.5, p50), (0.9, p90), (0.99, p99)):
        assert found == pytest.approx(values[int(share * 2000) - 1], rel=0.026)


def test_percentiles_of_nothing_and_of_one():
    durations = Durations()
    assert durations.quantiles() == (0, None, None, None)
    durations.observe(0.0)  # a clock that stood still
    assert durations.quantiles()[0] == 1
    assert 0 < durations.quantiles().p99 < 2e-5


def test_percentiles_forget(recent, clock):
    recent.observe(BASE, output(1), 4.0, first=True)
    recent.observe(BASE, output(1), 0.02, first=False)
    clock.now += LATENCY_SECONDS
    (point,) = recent.points()
    assert point.first_token.p99 == pytest.approx(4.0, rel=0.026)
    assert point.inter_token.p50 == pytest.approx(0.02, rel=0.026)
    clock.now += 1
    assert recent.points()[0].first_token.samples == 0


def test_history_keeps_values_of_their_time(recent, clock):
    said = []
    for _ in range(90):
        for _ in range(random.randrange(4)):
            labels = random.choice((BASE, SQL))
            recent.observe(
                labels, output(random.randrange(1, 5)), random.uniform(0.001, 2), first=random.random() < 0.3
            )
        said += recent.points()
        clock.now += random.choice((1.0, 1.0, 3.0))
    by_second = {point.second: point for point in recent.points(200)}
    assert len(by_second) == 200
    assert [by_second[point.second] for point in said if point.second in by_second] == [
        point for point in said if point.second in by_second
    ]


def test_memory_is_bounded(recent, clock):
    for _ in range(3 * KEPT_SECONDS):
        recent.observe(BASE, output(1), 0.5, first=True)
        clock.now += 1
    assert len(recent._slots) <= KEPT_SECONDS + 1
