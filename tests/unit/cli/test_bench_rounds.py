"""Rounds of `outrider bench speculation`: who runs when, and what their times say."""

import numpy as np
import pytest

from outrider.platform.cli.bench.driver import RequestTimes, Round
from outrider.platform.cli.bench.figures import Cell, figures
from outrider.platform.cli.bench.measure import Plan, measure
from outrider.platform.cli.bench.modes import make_modes
from outrider.platform.cli.bench.observer import StepTimes
from outrider.platform.cli.bench.workload import Task

STEP = StepTimes(0.1, 0.1, 0.0, 1, True, 0, 0, 0, (0,))


class FakeEngine:
    """Notes who runs when; every request takes a tenth of a second."""

    def __init__(self, name, log):
        self.mode = make_modes([name], {}, 2)[-1]
        self._log = log

    def run(self, requests, concurrency):
        assert len(requests) <= concurrency
        self._log.append((self.mode.name, [int(request.request_id) for request in requests]))
        times = [RequestTimes(0.0, [1, 2], [0.05, 0.1]) for _ in requests]
        return Round(0.1 * len(requests), times, [STEP] * len(requests), 0.1 * len(requests))


def test_contestants_take_turns_of_one_batch():
    log = []
    engines = [FakeEngine(name, log) for name in ("off", "control", "ngram")]
    plan = Plan(batch_sizes=(2,), rounds=3, max_tokens=2)
    rows = measure(engines, [Task("base", [[1], [2], [3], [4], [5]])], plan)
    turns = [log[at : at + 3] for at in range(0, len(log), 3)]
    assert [turn[0][1] for turn in turns] == [[0, 1], [2, 3], [4]] * 4, "a round before the first is no part of it"
    for turn in turns:
        assert {name for name, _ in turn} == {"off", "control", "ngram"}
        assert all(ids == turn[0][1] for _, ids in turn)
    assert len({tuple(name for name, _ in turn) for turn in turns}) > 1, "each time in another order"
    assert [row["requests"] for row in rows] == [5, 5, 5]
    assert [row["seconds"]["median"] for row in rows] == [0.5, 0.5, 0.5]


def test_a_round_of_several_turns_is_their_sum():
    turns = [Round(1.0, ["a"], ["x"], 0.5), Round(2.0, ["b", "c"], ["y"], 1.0)]
    assert Round.of(turns) == Round(3.0, ["a", "b", "c"], ["x", "y"], 1.5)
    assert Round.of([turns[0], Round(2.0, [], [], None)]).cpu_seconds is None


def _cell(name, seconds):
    rounds = [Round(s, [RequestTimes(0.0, [1] * 10, [0.1 * s, s])], [], s) for s in seconds]
    return Cell(make_modes([name], {}, 2)[-1], "base", "base model", 1, 4, rounds)


def test_a_speedup_comes_with_its_error():
    rng = np.random.default_rng(1)
    noisy = (1.0 + 0.1 * rng.standard_normal(100)).tolist()
    off = _cell("off", [1.0] * 100)
    row = figures(_cell("control", noisy), off)
    # The error of a normal distribution's median is 1.25 sigma / sqrt(n).
    assert row["speedup_error"] == pytest.approx(0.0125, rel=0.4)
    assert abs(row["speedup"] - 1.0) < 4 * row["speedup_error"]
    assert figures(off, off)["speedup_error"] == 0.0
    assert figures(_cell("control", [2.0]), _cell("off", [1.0]))["speedup_error"] is None


def test_the_total_counts_slow_rounds_which_the_median_does_not():
    row = figures(_cell("control", [1.0, 1.0, 1.0, 7.0]), _cell("off", [1.0] * 4))
    assert row["speedup"] == 1.0
    assert row["speedup_total"] == pytest.approx(0.4)
