"""Steps of a drafting engine that are launched before the host knows what the one before accepted: the same text."""

from __future__ import annotations

import threading

import pytest

from outrider import SamplingParams
from outrider.platform.core.messages import EngineRequest
from outrider.spec_decode.verify import draft_sampling as drawing

METHODS = ["draft_model", "eagle", "eagle3", "medusa"]
CLASSES = ["draft_model", "eagle3", "medusa"]
"""One method for each class of drafters: EAGLE drafts with EAGLE-3's."""
BOTH_WAYS = [("draft_model", False), ("draft_model", True), ("eagle", True), ("eagle3", False), ("medusa", True)]
"""Methods, and whether drafts are made on the device. All share this switch, so one is tested both ways. Batches that
come and go have the rest."""
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "min_tokens": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logit_bias": {9: 3.0}},
]


def make_jobs(models, prompts, kinds, adapters, **values):
    names = [None, "a", "b", None, "a", "c"] * 2 if adapters else [None] * len(prompts)
    lengths = {"max_tokens": 24, "ignore_eos": True} | values
    return [
        (prompt, SamplingParams(**lengths | kinds[index % len(kinds)]), models.lora(name))
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=False))
    ]


def make(make_engine, models, method, k=3, **options):
    config = models.speculative(method, k) | {"adaptive": False}
    usual = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "async_scheduling": True}
    return make_engine(speculative_config=config, **usual | options)


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


def watch(engine, monkeypatch):
    """The plans that are launched."""
    plans, launch = [], engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda plan, before=None: plans.append(plan) or launch(plan, before))
    return plans


@pytest.mark.parametrize(("method", "adapters"), BOTH_WAYS)
def test_the_text_is_that_without_drafts(
    models, make_engine, plain_tokens, run, prompts, method, adapters, monkeypatch
):
    engine = make(make_engine, models, method)
    plans = watch(engine, monkeypatch)
    jobs = make_jobs(models, prompts, KINDS, adapters)
    outcomes = run(engine, jobs)
    assert tokens(outcomes) == plain_tokens(jobs)
    assert sum(outcome.speculation.num_accepted_tokens for outcome in outcomes) > 0
    late = [row for plan in plans for row in plan.rows if row.awaits_token]
    assert sum(row.num_drafts > 0 for row in late) > 30
    engine.check_integrity()


@pytest.mark.parametrize("method", CLASSES)
def test_steps_with_penalties_overlap(models, make_engine, plain_tokens, run, prompts, method, monkeypatch):
    """The device counts what the step before accepts and samples, for the drafter's logits too."""
    kinds = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 9, "frequency_penalty": 0.4, "presence_penalty": -0.3},
        {"temperature": 0.0, "presence_penalty": 0.8},
    ]
    want = plain_tokens(make_jobs(models, prompts, kinds, True))
    engine = make(make_engine, models, method)
    plans = watch(engine, monkeypatch)
    outcomes = run(engine, make_jobs(models, prompts, kinds, True))
    assert tokens(outcomes) == want
    late = [row for plan in plans for row in plan.rows if row.awaits_token]
    assert sum(row.num_drafts > 0 for row in late) > 20
    in_turn = run(make(make_engine, models, method, async_scheduling=False), make_jobs(models, prompts, kinds, True))
    accepted, usual = (sum(o.speculation.num_accepted_tokens for o in every) for every in (outcomes, in_turn))
    assert accepted > 0.8 * usual > 0, "the drafter's logits are penalised alike"


OPTIONS = {
    "chunks": {"max_num_batched_tokens": 40},
    "few blocks": {"block_size": 4, "num_gpu_blocks_override": 44, "max_model_len": 96, "max_num_batched_tokens": 48},
    "fair, no cache": {"scheduling_policy": "fair", "enable_prefix_caching": False, "max_num_seqs": 3},
}
MIXED = [
    *KINDS,
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 9, "frequency_penalty": 0.4},
    {"temperature": 0.0, "prompt_logprobs": 1, "stop_token_ids": list(range(40, 60))},
    {"temperature": 1.0, "seed": 10, "speculative": 1},
    {"temperature": 0.0, "speculative": False, "max_tokens": 9},
]


@pytest.mark.parametrize(
    ("method", "options", "on_device"),
    [
        *((method, "few blocks", False) for method in ("draft_model", "eagle3", "medusa")),
        *(("draft_model", "fair, no cache", True), ("eagle3", "chunks", True), ("medusa", "fair, no cache", True)),
    ],
)
def test_changing_batches(models, make_engine, plain_tokens, run, prompts, method, options, on_device, monkeypatch):
    """Prompts in chunks, preemption, penalties, and drafts that the host does not know either."""
    if on_device:
        monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
    engine = make(make_engine, models, method, **OPTIONS[options])
    plans = watch(engine, monkeypatch)
    for kinds in (KINDS, MIXED, [MIXED[index] for index in (8, 0, 6, 7, 2, 3)]):
        jobs = make_jobs(models, prompts * 2, kinds, True)
        assert tokens(run(engine, jobs)) == plain_tokens(jobs)
        engine.check_integrity()
    late = [row for plan in plans for row in plan.rows if row.awaits_token]
    assert sum(row.num_drafts > 0 for row in late) > 30
    mixed = [
        plan
        for plan in plans
        if any(row.awaits_token for row in plan.rows) and any(not row.awaits_token for row in plan.rows)
    ]
    assert mixed, "requests join while others are in flight"
    if options == "few blocks":
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("method", "k"), [("draft_model", 1), ("draft_model", 2), ("eagle", 2), ("eagle3", 1), ("eagle3", 5), ("medusa", 5)]
)
def test_any_number_of_drafts_and_any_length(models, make_engine, plain_tokens, run, prompts, method, k):
    engine = make(make_engine, models, method, k, max_model_len=80)
    jobs = []
    for count in (1, 2, 3, 5, 9, 60):
        jobs += make_jobs(models, prompts[:3], KINDS[:1] + KINDS[2:3], False, max_tokens=count)
    want = [ids[: 80 - len(prompt)] for ids, (prompt, *_) in zip(plain_tokens(jobs), jobs, strict=True)]
    assert tokens(run(engine, jobs)) == want
    engine.check_integrity()


@pytest.mark.parametrize(("method", "on_device"), BOTH_WAYS)
def test_unseeded_draws_match_steps_without_overlap(models, make_engine, run, prompts, method, on_device, monkeypatch):
    """Except at the ends: a sequence gets fewer drafts there while the host does not know its length. So the drafts,
    what they were drawn from, and the noise of every position are the same, and with them the distribution."""
    if on_device:
        monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 30}, {"temperature": 0.0}]
    texts = []
    for asynchronous in (False, True):
        config = models.speculative(method, 3) | {"adaptive": False}
        options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "async_scheduling": asynchronous}
        engine = make_engine(speculative_config=config, **options)
        texts.append(
            [text[:28] for text in tokens(run(engine, make_jobs(models, prompts, kinds, True, max_tokens=36)))]
        )
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", CLASSES)
def test_aborted_requests_do_not_affect_others(models, make_engine, plain_tokens, run, prompts, method):
    engine = make(make_engine, models, method, block_size=4, num_gpu_blocks_override=72)
    jobs = make_jobs(models, prompts, KINDS, True)
    want = plain_tokens(jobs)
    for index, (prompt, params, lora) in enumerate(jobs * 2):
        engine.add_request(EngineRequest(str(index), list(prompt), params, [1], lora=lora))
    texts, gone = {}, set()
    while engine.has_work():
        for delta in engine.step():
            assert delta.request_id not in gone
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
        victim = str(len(jobs) + len(gone))
        if len(texts.get(victim, ())) > 5:
            engine.abort([victim])
            gone.add(victim)
        engine.check_integrity()
    assert len(gone) > 3
    assert [texts[str(index)] for index in range(len(jobs))] == want


@pytest.mark.parametrize("method", METHODS)
def test_a_step_launches_before_acceptance_is_known(models, make_engine, run, prompts, greedy, method, monkeypatch):
    """The device is held back until the step after is on its way: a host that waited would hang."""
    engine = make(make_engine, models, method)
    launch, seen, held = engine._runner.launch, [], []
    event = threading.Event()

    def noted(plan, before=None):
        if plan.can_overlap_next and before is None and not held:
            held.append(True)
            engine._runner._queue.submit(lambda: seen.append(event.wait(timeout=60)))
        elif before is not None and any(row.num_drafts for row in plan.rows):
            event.set()
        return launch(plan, before)

    monkeypatch.setattr(engine._runner, "launch", noted)
    outcomes = run(engine, [(prompts[0], greedy)])
    assert seen == [True]
    assert len(outcomes[0].token_ids) == 24


def test_an_error_in_a_step_in_flight_leaves_a_usable_engine(
    models, make_engine, run, greedy, prompts, plain_engine, run_with_failures
):
    want = run(plain_engine, [(p, greedy) for p in prompts])
    engine = make(make_engine, models, "eagle3")
    assert run_with_failures(engine, prompts, greedy) == [o.token_ids for o in want]


@pytest.mark.parametrize("adaptive", [False, True])
def test_synthetic_acceptance_does_not_overlap(models, make_engine, run, prompts, greedy, adaptive, monkeypatch):
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.2]}
    config = models.speculative("draft_model", 3) | {"adaptive": adaptive} | rates
    engine = make_engine(speculative_config=config, async_scheduling=True)
    plans = watch(engine, monkeypatch)
    run(engine, [(prompt, greedy) for prompt in prompts])
    assert not any(plan.can_overlap_next or row.awaits_token for plan in plans for row in plan.rows)


def note_drafts(engine):
    """Record the drafts by the request's name and its tokens."""
    drafted, draft = {}, engine._runner.draft

    def noted(launched, result):
        seconds = draft(launched, result)
        for row in launched.plan.rows:
            if row.request.drafts.token_ids:  # a step may bring a part of a prompt alone
                drafted[row.request.seed_key, (*row.request.tokens,)] = list(row.request.drafts.token_ids)
        return seconds

    engine._runner.draft = noted
    return drafted


@pytest.mark.parametrize("method", CLASSES)
def test_drafts_match_steps_without_overlap(models, make_engine, run, prompts, method):
    """Also after prompts whose KV, and whose hidden states, such steps have left in the prefix cache."""
    found = []
    for asynchronous in (False, True):
        config = models.speculative(method, 3) | {"adaptive": False}
        options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "async_scheduling": asynchronous}
        engine = make_engine(speculative_config=config, block_size=4, **options)
        drafted = note_drafts(engine)
        jobs = make_jobs(models, prompts, KINDS, True)
        outcomes = run(engine, jobs)
        longer = [
            (prompt + outcome.token_ids, params, lora)
            for (prompt, params, lora), outcome in zip(jobs, outcomes, strict=True)
        ]
        again = run(engine, longer)
        assert all(o.num_cached_tokens > len(prompt) for o, (prompt, *_) in zip(again, jobs, strict=True))
        found.append(drafted)
    common = [(found[0][key], found[1][key]) for key in found[0].keys() & found[1].keys()]
    assert sum(min(map(len, pair)) for pair in common) > 300
    assert all(one[: len(other)] == other[: len(one)] for one, other in common)
