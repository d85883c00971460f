"""Speculation whose number of drafts changes from step to step, while steps overlap: the same text, all evidence."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.spec_decode.control import factory
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.verify import draft_sampling as drawing

from .test_async_speculation import note_drafts

METHODS = ["draft_model", "eagle3", "medusa"]
"""One for each class of drafters: EAGLE drafts with EAGLE-3's."""
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "min_tokens": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logit_bias": {9: 3.0}},
]
MIXED = [
    *KINDS,
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "prompt_logprobs": 1, "stop_token_ids": list(range(40, 60))},
    {"temperature": 1.0, "seed": 10, "speculative": 1},
    {"temperature": 0.0, "speculative": False, "max_tokens": 9},
]


class Script:
    """In place of a policy's choices: in each step another number of drafts for each row, and times of drafting by the
    network, by prompt lookup, and of none."""

    def __init__(self, monkeypatch, seed=5, spell=6, drafters=(0, 0, None, 1), counts=(0, *(1, 2, 4) * 4)):
        self.random, self.spell, self.drafters, self.counts = random.Random(seed), spell, drafters, counts
        self.num_decisions = 0
        monkeypatch.setattr(SpeculationPolicy, "choose", lambda policy, rows, *, requests_wait: self.choose(rows))
        monkeypatch.setattr(SpeculationPolicy, "plans_no_drafts", property(lambda policy: False))
        monkeypatch.setattr(factory, "_LOOKUP_MIN", 1)  # so that prompt lookup, too, finds something often

    def choose(self, rows):
        drafter = self.drafters[self.num_decisions // self.spell % len(self.drafters)]
        self.num_decisions += 1
        for row in rows:
            row.drafter = drafter or 0
            row.max_new_drafts = 0 if drafter is None else min(self.random.choice(self.counts), row.max_new_drafts)


def make_jobs(models, prompts, kinds, adapters=True, **values):
    names = [None, "a", "b", None, "a", "c"] * 2 if adapters else [None] * len(prompts)
    lengths = {"max_tokens": 28, "ignore_eos": True} | values
    return [
        (prompt, SamplingParams(**lengths | kinds[index % len(kinds)]), models.lora(name))
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=False))
    ]


def make(make_engine, models, method, **options):
    config = models.speculative(method, 4) | {"adaptive": True}
    return make_engine(speculative_config=config, async_scheduling=True, **LORA, **options)


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


def watch(engine, monkeypatch):
    """(plan, whether another step was in flight) of every step launched."""
    plans, launch = [], engine._runner.launch

    def noted(plan, before=None):
        plans.append((plan, before is not None))
        return launch(plan, before)

    monkeypatch.setattr(engine._runner, "launch", noted)
    return plans


OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 40},
    "few blocks": {"block_size": 4, "num_gpu_blocks_override": 44, "max_model_len": 96, "max_num_batched_tokens": 48},
    "fair, no cache": {"scheduling_policy": "fair", "enable_prefix_caching": False, "max_num_seqs": 3},
}


PAIRS = [
    # Whose rows lose what their drafter keeps of them. EAGLE keeps what EAGLE-3 does, in the same class.
    *((method, "few blocks") for method in ("draft_model", "eagle3", "medusa")),
    *(("draft_model", options) for options in ("chunks", "fair, no cache")),
    ("eagle3", "plain"),
    ("medusa", "fair, no cache"),
    ("dspark", "few blocks"),
    ("dflash", "chunks"),
]


@pytest.mark.parametrize(("method", "options"), PAIRS)
def test_the_text_is_that_without_drafts(models, make_engine, plain_tokens, run, prompts, method, options, monkeypatch):
    """Drafters take turns, numbers change every step; prompts come in chunks, requests wait, yield and join."""
    Script(monkeypatch)
    if options == "fair, no cache":
        monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
    engine = make(make_engine, models, method, **OPTIONS[options])
    plans = watch(engine, monkeypatch)
    for kinds in (KINDS, MIXED, [MIXED[index] for index in (7, 0, 5, 6, 2, 3)]):
        jobs = make_jobs(models, prompts * 2, kinds)
        assert tokens(run(engine, jobs)) == plain_tokens(jobs)
        engine.check_integrity()
    beside = [plan for plan, overlaps in plans if overlaps]
    late = [row for plan in beside for row in plan.rows if row.awaits_token]
    assert sum(row.num_drafts > 0 for row in late) > 20
    assert sum(row.num_drafts == 0 for row in late) > 20
    assert any(len({row.num_drafts for row in plan.rows}) > 2 for plan in beside), "rows have different numbers"
    assert len(beside) < len(plans), "prompt lookup needs the host"
    if options == "few blocks":
        assert engine.stats().num_preemptions > 0


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    spell=st.integers(1, 12),
    drafters=st.lists(st.sampled_from([0, 0, None, 1]), min_size=1, max_size=5),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(MIXED), min_size=1, max_size=6),
    lengths=st.lists(st.integers(5, 36), min_size=2, max_size=8),
)
def test_random_decisions_do_not_change_the_text(
    pair, run, models, prompts, seed, spell, drafters, counts, kinds, lengths
):
    """The same engines, again and again: what one run leaves in the prefix cache, another finds."""
    plain, engines, script = pair
    script.random, script.spell, script.drafters, script.counts = random.Random(seed), spell, drafters, counts
    jobs = [
        (prompt, params.clone(max_tokens=length), lora)
        for (prompt, params, lora), length in zip(make_jobs(models, prompts * 2, kinds), lengths, strict=False)
    ]
    want = tokens(run(plain, jobs))
    for engine in engines:
        assert tokens(run(engine, jobs)) == want
        engine.check_integrity()


@pytest.fixture(params=["draft_model", "eagle3"])
def pair(request, models, make_engine, plain_engine, monkeypatch):
    """Whom to compare: the engine without speculation, and two with the same script."""
    script = Script(monkeypatch)
    engines = [
        make(make_engine, models, request.param),
        make(make_engine, models, request.param, block_size=4, num_gpu_blocks_override=66, max_num_batched_tokens=24),
    ]
    return plain_engine, engines, script


@pytest.mark.parametrize("method", METHODS)
def test_steps_without_drafts_overlap(models, make_engine, plain_tokens, run, prompts, method, monkeypatch):
    """Prompts among them; then drafts come as if the drafter had seen all."""
    script = Script(monkeypatch, drafters=[None])
    engine = make(make_engine, models, method)
    plans = watch(engine, monkeypatch)
    jobs = make_jobs(models, prompts, KINDS)
    want = plain_tokens(jobs)
    assert tokens(run(engine, jobs)) == want
    assert all(plan.can_overlap_next for plan, _ in plans)
    assert [overlaps for _, overlaps in plans].count(False) == 1, "the first"
    assert any(not row.samples or row.num_tokens > 1 for plan, beside in plans for row in plan.rows)
    script.drafters, script.counts = [None, 0], [4]
    drafted = note_drafts(engine)
    assert tokens(run(engine, jobs)) == want
    fixed = make_engine(speculative_config=models.speculative(method, 4) | {"adaptive": False}, **LORA)
    fresh = note_drafts(fixed)
    run(fixed, jobs)
    common = [(drafted[key], fresh[key]) for key in drafted.keys() & fresh.keys() if drafted[key] and fresh[key]]
    assert len(common) > 10
    assert all(one[: len(other)] == other[: len(one)] for one, other in common)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_observed_once(models, make_engine, run, prompts, method, monkeypatch):
    """In their order, with all drafts that were verified."""
    Script(monkeypatch)
    engine = make(make_engine, models, method)
    seen, steps = Counter(), []
    observe = SpeculationPolicy.observe

    def noted(self, plan, result):
        steps.append(plan)
        for row, got in zip(plan.rows, result.rows, strict=True):
            seen["drafts"] += row.num_drafts
            seen["accepted"] += got.num_accepted
        observe(self, plan, result)

    monkeypatch.setattr(SpeculationPolicy, "observe", noted)
    plans = watch(engine, monkeypatch)
    outcomes = run(engine, make_jobs(models, prompts, KINDS, max_tokens=40))
    said = sum(outcome.speculation.num_draft_tokens for outcome in outcomes)
    accepted = sum(outcome.speculation.num_accepted_tokens for outcome in outcomes)
    assert said > 20
    assert said <= seen["drafts"], "rows whose request had ended are computed in vain"
    assert accepted <= seen["accepted"] <= accepted + 4 * len(outcomes), "an end may cut off what was accepted"
    assert steps == [plan for plan, _ in plans]


def test_steps_with_drafts_of_the_host_do_not_overlap(models, make_engine, run, prompts, monkeypatch):
    Script(monkeypatch, drafters=[0], counts=[4])
    engine = make(make_engine, models, "ngram")
    plans = watch(engine, monkeypatch)
    run(engine, make_jobs(models, prompts, KINDS))
    assert not any(overlaps for plan, overlaps in plans if any(row.num_drafts for row in plan.rows))


@pytest.mark.parametrize("method", METHODS)
def test_choices_of_the_policy(models, make_engine, plain_tokens, run, prompts, method, monkeypatch):
    """Its own, whatever the times are: a step overlaps the one before unless the host drafts after that one."""
    engine = make(make_engine, models, method)
    plans = watch(engine, monkeypatch)
    jobs = make_jobs(models, prompts, KINDS, max_tokens=48)
    for _ in range(3):
        plans.clear()
        assert tokens(run(engine, jobs)) == plain_tokens(jobs)
        pairs = [(before.can_overlap_next, overlaps) for (before, _), (_, overlaps) in itertools.pairwise(plans)]
        assert (False, True) not in pairs
        assert pairs.count((True, False)) <= len(jobs), "only when all rows are about to end"
