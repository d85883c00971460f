"""Rounds of `outrider bench speculation`: the order of the runs, and the figures of their times."""

from types import SimpleNamespace

import numpy as np
import pytest

from outrider.platform.cli.bench.request_figures import RequestRecord, Round
from outrider.platform.cli.bench.speculation.modes import make_modes
from outrider.platform.cli.bench.speculation.rounds import ModeEngine, Plan, measure
from outrider.platform.cli.bench.speculation.speculation_figures import Cell, figures
from outrider.platform.cli.bench.speculation.tasks import Task
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import TokenDelta


class FakeCore:
    """Notes which requests run together, and when; every request ends with its first token."""

    def __init__(self, name, log):
        self._name, self._log, self._queued = name, log, []
        self.info = SimpleNamespace(device="cpu")

    def add_request(self, request):
        self._queued.append(request)

    def step(self):
        self._log.append((self._name, [int(request.request_id) for request in self._queued]))
        deltas = [TokenDelta(request.request_id, [1], finish_reason="stop") for request in self._queued]
        self._queued = []
        return deltas


def fake_engines(names, log):
    return [ModeEngine(mode, FakeCore(mode.name, log)) for mode in make_modes(names, {}, 2)]


def test_every_mode_runs_a_batch_before_the_next_batch_begins():
    log = []
    plan = Plan(batch_sizes=(2,), rounds=3, max_tokens=2)
    rows = measure(fake_engines(["control", "ngram"], log), [Task("base", [[1], [2], [3], [4], [5]])], plan).rows
    batches = [log[at : at + 3] for at in range(0, len(log), 3)]
    assert [batch[0][1] for batch in batches] == [[0, 1], [2, 3], [4]] * 4, "the round before the first is no part"
    for batch in batches:
        assert {name for name, _ in batch} == {"off", "control", "ngram"}
        assert all(ids == batch[0][1] for _, ids in batch)
    assert len({tuple(name for name, _ in batch) for batch in batches}) > 1, "each time in another order"
    assert [row["requests"] for row in rows] == [5, 5, 5]


def test_a_queue_is_filled_as_requests_end():
    log = []
    plan = Plan(batch_sizes=(2,), rounds=1, max_tokens=2, queue=3)
    measure(fake_engines([], log), [Task("base", [[1], [2]])], plan)
    assert [ids for _, ids in log] == [[0, 1], [2, 3], [4, 5]] * 2


def test_no_run_shares_its_cache_with_another():
    salts = []

    class Core(FakeCore):
        def add_request(self, request):
            salts.append(request.cache_salt)
            super().add_request(request)

        adapters = SimpleNamespace(find=lambda name: SimpleNamespace(draft="loaded"))

    task = Task("a", [[1]], LoRARequest("with", path="x"), LoRARequest("without", path="y"))
    (off,) = make_modes([], {}, 2)
    measure([ModeEngine(off, Core("off", []))], [task], Plan(batch_sizes=(1, 2), rounds=2, max_tokens=2))
    assert len(set(salts)) == 2 * 3 * 2, "batch sizes, rounds with the warm-up, kinds"


def test_a_measurement_that_is_stopped_keeps_its_whole_rounds():
    """12 runs a task: 2 modes, 1 batch, 6 rounds with the warm-up. It stops within the fourth counted round."""
    log, tasks = [], [Task("base", [[1]]), Task("more", [[2]])]
    plan = Plan(batch_sizes=(1,), rounds=5, max_tokens=2)
    measured = measure(fake_engines(["ngram"], log), tasks, plan, stops=lambda: len(log) == 12 + 9)
    assert len(log) == 21, "the run in progress was completed, and no other started"
    assert [(row["task"], row["mode"], row["same_text_as_off"]["of"]) for row in measured.rows] == [
        ("base", "off", 5),
        ("base", "ngram", 5),
        ("more", "off", 3),
        ("more", "ngram", 3),
    ]
    assert measured.cut == ("CUT: stopped after 1 of 2 pairs of batch size and task, and 3 of 5 rounds of the next")
    early = measure(fake_engines(["ngram"], []), tasks, plan, stops=lambda: True)
    assert (early.rows, early.cut) == ([], "CUT: stopped after 0 of 2 pairs of batch size and task")
    assert measure(fake_engines(["ngram"], []), tasks, plan).cut == ""


def test_a_round_of_several_batches_is_their_sum():
    assert Round.joined([Round(1.0, ["a"], 0.5), Round(2.0, ["b", "c"], 1.0)]) == Round(3.0, ["a", "b", "c"], 1.5)


def _cell(name, seconds):
    rounds = [Round(s, [RequestRecord(0, 0.0, [0.1 * s, s], num_output_tokens=10)]) for s in seconds]
    return Cell(make_modes([name], {}, 2)[-1], "base", "base model", 1, rounds)


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


def test_one_slow_round_is_no_part_of_the_speedup():
    assert figures(_cell("control", [1.0, 1.0, 1.0, 7.0]), _cell("off", [1.0] * 4))["speedup"] == 1.0
