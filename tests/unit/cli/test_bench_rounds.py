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


class FakeDrafter(FakeEngine):
    """Notes how many drafts it was asked for, and takes as long as that makes it."""

    def __init__(self, log):
        super().__init__("off", [])
        self.mode = make_modes(["draft_model"], {"draft_model": "none"}, 4)[-1]
        self.asked = log

    def run(self, requests, concurrency):
        drafts = {request.params.speculative for request in requests}
        self.asked.append((drafts, requests[0].cache_salt, requests[0].params.max_tokens))
        most = 1 if drafts == {1} else 4
        step = StepTimes(0.2, 0.1, 0.01 + 0.01 * most, 1, True, most, most, most, (0,))
        times = [RequestTimes(0.0, [1, 2], [0.05, 0.1]) for _ in requests]
        return Round(0.1, times, [step] * len(requests), 0.1)


def test_one_draft_a_step_is_measured_in_some_rounds_among_all_others():
    asked = []
    engines = [FakeEngine("off", []), FakeDrafter(asked)]
    rows = measure(engines, [Task("base", [[1], [2]])], Plan(batch_sizes=(1,), rounds=5, max_tokens=90))
    single = [(salt, tokens) for drafts, salt, tokens in asked if drafts == {1}]
    assert len(single) == 2 * 2, "two turns each in the first round and in the fifth"
    assert {tokens for _, tokens in single} == {48}
    others = [(salt, tokens) for drafts, salt, tokens in asked if drafts != {1}]
    assert len(others) == 2 * 6
    assert {tokens for _, tokens in others} == {90}
    assert not {salt for salt, _ in single} & {salt for salt, _ in others}, "neither teaches the other its answers"
    assert rows[1]["limit"]["c"] == pytest.approx(0.01 / 0.1), "what one draft more costs; their shared part is none"
    assert len(rows) == 2
    assert rows[1]["requests"] == 2, "those with one draft are no round of the mode"


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
