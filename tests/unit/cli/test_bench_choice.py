"""Which drafter `adaptive` of `outrider bench speculation` has."""

import json

import pytest

from outrider.platform.cli.bench import driver, session
from outrider.platform.cli.bench.driver import Round
from outrider.platform.cli.bench.measure import Plan, fastest
from outrider.platform.cli.bench.modes import make_modes
from outrider.platform.cli.bench.workload import Task
from outrider.platform.cli.main import main
from outrider.platform.engine.engine_core import EngineCore

QUICK = "bench speculation --rounds 1 --max-tokens 12 --dtype float32".split()


class Timed:
    """A round takes some seconds, the first one many."""

    def __init__(self, name, seconds, log):
        self.mode, self._log = make_modes([name], {}, 2)[-1], log
        self.seconds, self.salts = seconds, set()

    def run(self, requests, concurrency):
        self._log.append((self.mode.name, [int(request.request_id) for request in requests]))
        self.salts.add(requests[0].cache_salt)
        warm_up = 0.0 if len(self.salts) > 1 else 10.0 / self.seconds
        return Round(warm_up + self.seconds * len(requests), [], [])


@pytest.mark.parametrize(("seconds", "rounds"), [(1.5, 2), (0.3, 4), (0.001, 16)])
def test_the_fastest_is_found_in_rounds_that_a_warm_up_precedes(seconds, rounds):
    log = []
    slow, fast = Timed("suffix", 1.2 * seconds, log), Timed("ngram", seconds, log)
    plan = Plan(batch_sizes=(4, 2), rounds=1, max_tokens=2)
    assert fastest([slow, fast], Task("base", [[1], [2]]), plan) is fast
    assert log.count(("ngram", [0, 1])) == log.count(("suffix", [0, 1])) == 1 + rounds
    assert len(fast.salts) == 1 + rounds, "no round helps another"


@pytest.mark.parametrize("fixed", ["eagle3,", ""])
@pytest.mark.parametrize("best", ["eagle3", "draft_model"])
def test_adaptive_drafts_with_the_fastest_of_the_drafters_given(monkeypatch, tmp_path, capsys, best, fixed):
    """As whoever has to choose one would: drafters that are no mode themselves are there for the trial alone."""
    tried, closed = [], []

    def fastest(engines, task, plan):
        tried.extend(engines)
        assert task.name == "base"
        return next(engine for engine in engines if engine.mode.method == best)

    class Core(EngineCore):
        def shutdown(self):
            super().shutdown()
            closed.append(self)

    monkeypatch.setattr(driver, "EngineCore", Core)
    monkeypatch.setattr(session, "fastest", fastest)
    file = tmp_path / "r.json"
    more = f"--modes {fixed}adaptive,control --tasks base --batch-sizes 1 --output-json {file}"
    assert main([*QUICK, *more.split()]) == 0
    assert [engine.mode.name for engine in tried] == ["eagle3", "draft_model"], "with a fixed number of drafts"
    assert f"adaptive drafts with {best}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["settings"]["modes"]["adaptive"]["method"] == best
    assert [(row["mode"], row["method"]) for row in report["rows"] if row["kind"] == "base model"] == [
        ("off", "off"),
        *([("eagle3", "eagle3")] if fixed else []),
        ("adaptive", best),
        ("control", "off"),
    ]
    assert len(closed) == len(set(closed)) == 5, "each once"
