"""Steps of a drafting engine that are launched before the host knows what the one before accepted: the same text."""

from __future__ import annotations

import pytest

from outrider import SamplingParams

METHODS = ["draft_model", "eagle", "eagle3", "medusa"]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "min_tokens": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logit_bias": {9: 3.0}},
]


def jobs_of(models, prompts, kinds, adapters, **values):
    names = [None, "a", "b", None, "a", "c"] if adapters else [None] * len(prompts)
    lengths = {"max_tokens": 24, "ignore_eos": True} | values
    return [
        (prompt, SamplingParams(**lengths, **kinds[index % len(kinds)]), models.lora(name))
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]


def make(make_engine, models, method, k=3, **options):
    config = models.speculative(method, k) | {"adaptive": False}
    return make_engine(
        speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8, async_scheduling=True, **options
    )


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


def watch(engine, monkeypatch):
    """The plans that are launched."""
    plans, launch = [], engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda plan, before=None: plans.append(plan) or launch(plan, before))
    return plans


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_without_drafts(
    models, make_engine, plain_engine, run, prompts, method, adapters, monkeypatch
):
    engine = make(make_engine, models, method)
    plans = watch(engine, monkeypatch)
    jobs = jobs_of(models, prompts, KINDS, adapters)
    outcomes = run(engine, jobs)
    assert tokens(outcomes) == tokens(run(plain_engine, jobs))
    assert sum(outcome.speculation.num_accepted_tokens for outcome in outcomes) > 0
    late = [row for plan in plans for row in plan.rows if row.is_late]
    assert sum(row.num_drafts > 0 for row in late) > 30
    engine.check_integrity()
