"""An engine that launches a step before the last one has ended generates the same bytes as one that waits."""

from __future__ import annotations

import threading

import pytest

from outrider import SamplingParams
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.runner import device_queue
from outrider.platform.engine.runner.device_queue import DeviceQueue, DeviceStopwatch

from .conftest import build_engine

LENGTHS = {"max_tokens": 20, "ignore_eos": True}
PLAIN = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 7, "min_tokens": 6, "stop_token_ids": list(range(40, 90))},
    {"temperature": 0.9, "seed": 8, "logit_bias": {9: 4.0}, "allowed_token_ids": list(range(3, 60))},
]
"""Parameters that do not depend on which tokens a request has."""
PENALISED = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
]
OPTIONS = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 16},
    "few blocks": {"block_size": 4, "num_gpu_blocks_override": 36, "max_model_len": 96, "max_num_batched_tokens": 48},
    "fair, no cache": {"scheduling_policy": "fair", "enable_prefix_caching": False, "max_num_seqs": 3},
}


def make_params(**values):
    return SamplingParams(**(LENGTHS | values))


@pytest.fixture(scope="session")
def work(models, prompts):
    """work(adapters, kinds) -> one job a prompt, and two siblings that share theirs."""

    def work(adapters, kinds):
        names = [None, "a", "b", None, "a", "c"] if adapters else [None] * len(prompts)
        jobs = []
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            jobs.append((prompt, make_params(**kinds[index % len(kinds)]), models.lora(name), {"tenant": name or ""}))
        siblings = [make_params(temperature=1.0, seed=seed) for seed in (21, 22)]
        return [*jobs, *((prompts[3], params, models.lora(names[1]), {"group": "n"}) for params in siblings)]

    return work


def words(outcomes):
    """All outputs of a client, except how many tokens came at once."""
    return [(o.token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason, o.stop_reason, o.error) for o in outcomes]


@pytest.fixture(scope="session")
def wanted(plain_engine, run, work):
    """Tokens of the engine that waits, by (adapters, True if penalties are in the batch)."""
    return {
        (adapters, penalised): words(run(plain_engine, work(adapters, PLAIN + PENALISED if penalised else PLAIN)))
        for adapters in (False, True)
        for penalised in (False, True)
    }


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((None, options) for options in OPTIONS),
        *(("ngram", options) for options in ("chunks", "few blocks")),
        *(("draft_model", "whole prompts"), ("eagle3", "fair, no cache")),
    ],
)
def test_the_same_text_and_reports(models, make_engine, run, work, wanted, method, options):
    engine = make_engine(
        speculative_config=models.speculative(method, 3),
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        async_scheduling=True,
        **OPTIONS[options],
    )
    for adapters in (False, True):
        for penalised in (False, True):
            got = words(run(engine, work(adapters, PLAIN + PENALISED if penalised else PLAIN)))
            assert [w[:1] + w[3:] for w in got] == [w[:1] + w[3:] for w in wanted[adapters, penalised]]
            for one, other in zip(got, wanted[adapters, penalised], strict=True):
                same_reports(one[1], other[1])
                same_reports(one[2] or [], other[2] or [])
            engine.check_integrity()
    if options == "few blocks":
        assert engine.stats().num_preemptions > 0


def same_reports(got, want):
    """Log-probabilities, up to what products over other numbers of rows round differently."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_unseeded_requests_draw_the_same(make_engine, run, work):
    """The engine's own random numbers go to requests in the order in which they come."""
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}]
    texts = []
    for asynchronous in (False, True):
        engine = make_engine(enable_lora=True, max_loras=3, max_lora_rank=8, async_scheduling=asynchronous)
        texts.append(words(run(engine, work(True, kinds))))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", [None, "draft_model"])
def test_aborted_requests_do_not_affect_others(models, make_engine, work, wanted, method):
    engine = make_engine(
        speculative_config=models.speculative(method, 3), enable_lora=True, max_loras=3, max_lora_rank=8,
        async_scheduling=True, block_size=4, num_gpu_blocks_override=64,
    )  # fmt: skip
    jobs, texts = work(True, PLAIN), {}
    for index, (prompt, params, lora, fields) in enumerate([*jobs, *jobs]):
        request = EngineRequest(str(index), list(prompt), params, [1], lora=lora, **fields | {"group": None})
        engine.add_request(request)
    gone = set()
    while engine.has_work():
        for delta in engine.step():
            assert delta.request_id not in gone
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
        victim = str(len(jobs) + len(gone))
        if texts.get(victim):
            engine.abort([victim])
            gone.add(victim)
        engine.check_integrity()
    assert len(gone) > 3
    assert [texts[str(index)] for index in range(len(jobs))] == [w[0] for w in wanted[True, False]]


def test_a_step_is_planned_and_launched_while_the_one_before_runs(make_engine, run, greedy, prompts, monkeypatch):
    """The device is held back until the second step is on its way; a host that waited for the first would hang."""
    engine = make_engine(async_scheduling=True)
    launched, second = [], threading.Event()
    launch, held = engine._runner.launch, []

    def noted(plan, before=None):
        launched.append(plan)
        if len(launched) == 2:
            second.set()
        return launch(plan, before)

    monkeypatch.setattr(engine._runner, "launch", noted)
    engine._runner._queue.submit(lambda: held.append(second.wait(timeout=60)))
    outcomes = run(engine, [(prompts[0], greedy)])
    assert held == [True]
    assert launched[1].rows[0].awaits_token
    assert len(outcomes[0].token_ids) == 24


def test_bad_words_of_several_tokens_see_the_token_before(make_engine, run, prompts, monkeypatch):
    """The same engine does not launch past a step whose tokens the host needs for the next one; for penalties the
    device has them."""
    engine = make_engine(async_scheduling=True)
    plans = []
    launch = engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda plan, before=None: plans.append(plan) or launch(plan, before))
    run(engine, [(prompts[0], make_params(temperature=0, bad_words_token_ids=[[5, 6]]))])
    assert not any(row.awaits_token for plan in plans for row in plan.rows)
    for penalty in ({}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.3, "frequency_penalty": 0.2}):
        plans.clear()
        run(engine, [(prompts[0], make_params(temperature=0, **penalty))])
        assert sum(row.awaits_token for plan in plans for row in plan.rows) == 19


def test_an_error_in_a_step_in_flight_leaves_a_usable_engine(
    make_engine, run, greedy, prompts, plain_engine, run_with_failures
):
    want = run(plain_engine, [(p, greedy) for p in prompts])
    engine = make_engine(async_scheduling=True)
    assert run_with_failures(engine, prompts, greedy) == [o.token_ids for o in want]


def test_an_engine_shuts_down_with_a_step_in_flight(models, greedy, prompts):
    engine = build_engine(models, async_scheduling=True)
    engine.add_request(EngineRequest("a", list(prompts[0]), greedy, [1]))
    engine.step()
    scheduler = engine.scheduler
    engine.shutdown()
    assert not scheduler.has_work()
    scheduler.check_integrity()


def test_step_seconds_exclude_queueing(make_engine, greedy, prompts, monkeypatch):
    """Not those since it was launched: it waited for the step before. In seconds of a clock that the work moves."""
    engine = make_engine(async_scheduling=True)
    clock, gate = Clock(), threading.Event()
    monkeypatch.setattr(device_queue, "time", clock)
    forward = engine._runner._model.forward
    engine._runner._model.forward = lambda *args: (forward(*args), clock.move(3.0))[0]
    engine._runner._queue.submit(lambda: (gate.wait(timeout=60), clock.move(100.0)))
    engine.add_request(EngineRequest("a", list(prompts[0]), greedy, [1]))
    plan = engine.scheduler.schedule()
    launched = engine._runner.launch(plan)
    gate.set()
    result = engine._runner.collect(launched)
    assert 3.0 <= result.seconds < 100.0
    engine.scheduler.commit(plan, result)
    engine.abort(["a"])


def test_gap_is_measured_from_the_previous_step(make_engine, greedy, prompts, monkeypatch):
    engine = make_engine(async_scheduling=False)
    clock, results = Clock(), []
    monkeypatch.setattr(device_queue, "time", clock)
    forward, collect = engine._runner._model.forward, engine._runner.collect
    engine._runner._model.forward = lambda *args: (forward(*args), clock.move(3.0))[0]
    monkeypatch.setattr(engine._runner, "collect", lambda launched: results.append(collect(launched)) or results[-1])
    engine.add_request(EngineRequest("a", list(prompts[0]), greedy, [1]))
    for _ in range(3):
        engine.step()
        clock.move(5.0)
    engine.abort(["a"])
    assert [result.seconds for result in results] == [3.0] * 3
    assert [result.gap for result in results[1:]] == [5.0] * 2


def test_a_stopwatch_ends_once(monkeypatch):
    """Work after the first `stop` is not in its seconds."""
    import torch

    clock = Clock()
    monkeypatch.setattr(device_queue, "time", clock)
    watch = DeviceStopwatch(torch.device("cpu"))
    for seconds in (2.0, 5.0):
        clock.move(seconds)
        watch.stop()
    assert watch.seconds() == 2.0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def move(self, seconds):
        self.now += seconds


def test_device_queue_follows_async_scheduling():
    import torch

    assert not DeviceQueue(torch.device("cpu"), asynchronous=False).overlaps
    queue = DeviceQueue(torch.device("cpu"), asynchronous=True)
    pieces = [queue.submit(lambda value=value: 1 // value) for value in (1, 0)]
    assert pieces[0].result() == 1
    with pytest.raises(ZeroDivisionError):
        pieces[1].result()
    queue.drain()
    queue.close()
