"""Which drafter `adaptive` of `outrider bench speculation` has."""

import json

import pytest

from outrider.platform.cli.bench import driver, session
from outrider.platform.cli.bench.driver import RequestTimes, Round
from outrider.platform.cli.bench.measure import Plan, trial
from outrider.platform.cli.bench.modes import make_modes
from outrider.platform.cli.bench.workload import Task
from outrider.platform.cli.main import main
from outrider.platform.core.errors import OutriderError
from outrider.platform.engine.engine_core import EngineCore

QUICK = "bench speculation --rounds 1 --max-tokens 12 --dtype float32".split()


class Timed:
    """A token takes some seconds; the first round, and one that something disturbs, take many more."""

    def __init__(self, name, seconds, log, tokens=1, disturbed=None):
        self.mode, self._log = make_modes([name], {}, 2)[-1], log
        self.seconds, self.tokens, self.disturbed, self.salts = seconds, tokens, disturbed, []

    def run(self, requests, concurrency):
        self._log.append((self.mode.name, [int(request.request_id) for request in requests]))
        if requests[0].cache_salt not in self.salts:
            self.salts.append(requests[0].cache_salt)
        more = 10.0 if len(self.salts) in (1, self.disturbed) else 0.0
        times = [RequestTimes(0.0, [1] * self.tokens, [0.1]) for _ in requests]
        return Round(more + self.seconds * self.tokens * len(requests), times, [])


@pytest.mark.parametrize(("seconds", "rounds"), [(1.5, 2), (0.3, 4), (0.001, 16)])
def test_the_fastest_is_found_in_rounds_that_a_warm_up_precedes(seconds, rounds):
    log = []
    slow, fast = Timed("suffix", 1.2 * seconds, log), Timed("ngram", seconds, log)
    plan = Plan(batch_sizes=(4, 2), rounds=1, max_tokens=2)
    assert trial([slow, fast], Task("base", [[1], [2]]), plan) == pytest.approx([1 / (1.2 * seconds), 1 / seconds])
    assert log.count(("ngram", [0, 1])) == log.count(("suffix", [0, 1])) == 1 + rounds
    assert len(fast.salts) == 1 + rounds, "no round helps another"


def test_neither_a_disturbed_round_nor_shorter_answers_make_one_the_fastest():
    slow, fast = Timed("suffix", 0.6, [], tokens=1), Timed("ngram", 0.5, [], tokens=3, disturbed=3)
    found = trial([slow, fast], Task("base", [[1]]), Plan(batch_sizes=(1,), rounds=1, max_tokens=3))
    assert found == pytest.approx([1 / 0.6, 1 / 0.5])


@pytest.mark.parametrize("fixed", ["eagle3,", ""])
@pytest.mark.parametrize("best", ["eagle3", "draft_model"])
def test_adaptive_drafts_with_the_fastest_of_the_drafters_given(monkeypatch, tmp_path, capsys, best, fixed):
    """As whoever has to choose one would: drafters that are no mode themselves are there for the trial alone."""
    tried, closed = [], []

    def trial(engines, task, plan):
        tried.extend(engines)
        assert task.name == "base"
        return [2.0 if engine.mode.method == best else 1.0 for engine in engines]

    class Core(EngineCore):
        def shutdown(self):
            super().shutdown()
            closed.append(self)

    monkeypatch.setattr(driver, "EngineCore", Core)
    monkeypatch.setattr(session, "trial", trial)
    file = tmp_path / "r.json"
    more = f"--modes {fixed}adaptive,control --tasks base --batch-sizes 1 --output-json {file}"
    assert main([*QUICK, *more.split()]) == 0
    assert [engine.mode.name for engine in tried] == ["eagle3", "draft_model"], "with a fixed number of drafts"
    assert f"adaptive drafts with {best}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["settings"]["modes"]["adaptive"]["method"] == best
    assert report["settings"]["tokens_per_second_in_trial"][best] == 2.0
    assert [(row["mode"], row["method"]) for row in report["rows"] if row["kind"] == "base model"] == [
        ("off", "off"),
        *([("eagle3", "eagle3")] if fixed else []),
        ("adaptive", best),
        ("control", "off"),
    ]
    assert len(closed) == len(set(closed)) == 5, "each once"


def test_a_trial_that_fails_leaves_no_engine(monkeypatch, capsys):
    """Of an adapter's task alone, too."""
    started, closed = [], []

    class Core(EngineCore):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

        def shutdown(self):
            super().shutdown()
            closed.append(self)

    def trial(engines, task, plan):
        assert (len(engines), task.name) == (2, "json")
        raise OutriderError("that is enough")

    monkeypatch.setattr(driver, "EngineCore", Core)
    monkeypatch.setattr(session, "trial", trial)
    assert main([*QUICK, *"--modes adaptive --tasks json --batch-sizes 1".split()]) == 1
    assert "that is enough" in capsys.readouterr().err
    assert len(started) == 3
    assert set(closed) == set(started)
