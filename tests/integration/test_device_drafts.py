"""Drafts that stay on the device, without waits on the host: the same text, and they are not read early."""

from __future__ import annotations

import math

import pytest

from outrider import SamplingParams
from outrider.kernels import penalties
from outrider.kernels.device_outcome import OnDevice
from outrider.platform.engine.runner.model_runner import ModelRunner
from outrider.spec_decode.control import adapters as adapter_states
from outrider.spec_decode.control import factory, trials
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.drafters import ngram_device
from outrider.spec_decode.verify import draft_sampling as drawing

METHODS = ["draft_model", "eagle3", "medusa", "ngram", "dflash", "dspark", "uno"]
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "min_tokens": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logit_bias": {9: 3.0}},
]
PENALISED = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 9, "frequency_penalty": 0.4},
    {"temperature": 0.0, "presence_penalty": 0.1},
]
READING = [PENALISED[0], {"temperature": 0.9, "seed": 9, "bad_words_token_ids": [[5, 6], [9, 10, 11]]}]


class Drafts:
    """Record of a drafter's work while the host asks for nothing."""

    def __init__(self, monkeypatch):
        self.read_while_drafting = self.num_sources = self.num_mixed = 0
        self._drafting = False
        monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
        monkeypatch.setattr(ngram_device, "runs_on", lambda device: True)
        known = OnDevice.known

        def noted(source):
            self.read_while_drafting += self._drafting
            return known(source)

        monkeypatch.setattr(OnDevice, "known", noted)

    def watch(self, engine):
        """From now on its drafter's calls count."""
        proposer = engine._runner._drafter
        propose = proposer.propose

        def watched(rows, target):
            self._drafting = True
            proposals = propose(rows, target)
            self._drafting = False
            are_late = {hasattr(p.drafts.token_ids, "source") for p in proposals if p.drafts.token_ids}
            self.num_sources += True in are_late
            self.num_mixed += len(are_late) == 2
            return proposals

        proposer.propose = watched


@pytest.fixture
def drafts(monkeypatch):
    return Drafts(monkeypatch)


def make_jobs(models, prompts, kinds, adapters):
    names = [None, "a", "b", None, "a", "c"] if adapters else [None] * len(prompts)
    return [
        (prompt, SamplingParams(max_tokens=24, ignore_eos=True, **kinds[index % len(kinds)]), models.lora(name))
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]


def make(make_engine, models, method, **options):
    config = models.speculative(method, 3) | {"adaptive": False}
    return make_engine(speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8, **options)


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize(
    ("method", "asynchronous"),
    [*((method, True) for method in METHODS), ("draft_model", False), ("eagle3", False), ("ngram", False)],
)
def test_the_text_is_that_without_drafts(models, make_engine, plain_tokens, run, prompts, drafts, method, asynchronous):
    engine = make(make_engine, models, method, async_scheduling=asynchronous, max_num_batched_tokens=40)
    drafts.watch(engine)
    for adapters in (False, True):
        jobs = make_jobs(models, prompts, KINDS, adapters)
        outcomes = run(engine, jobs)
        assert tokens(outcomes) == plain_tokens(jobs)
        assert sum(outcome.speculation.num_accepted_tokens for outcome in outcomes) > 0
    # Prompt lookup drafts on the host if it has a step's results in time.
    assert (drafts.num_sources > 0) == (asynchronous or method != "ngram")
    assert drafts.read_while_drafting == 0
    jobs = make_jobs(models, prompts, KINDS + READING, True)
    assert tokens(run(engine, jobs)) == plain_tokens(jobs)
    assert (drafts.read_while_drafting > 0) == (method != "ngram"), "bad words are looked up by the host"


@pytest.mark.parametrize("on_device", [False, True])
def test_prompt_lookup_and_the_next_launch(
    models, make_engine, plain_tokens, run, prompts, drafts, monkeypatch, on_device
):
    """On the host it needs the results of a step, so that each step is collected before the next one is launched. On
    the device steps are launched ahead, with drafts that the host has not seen."""
    monkeypatch.setattr(ngram_device, "runs_on", lambda device: on_device)
    ahead, in_flight = [], []
    launch, collect = ModelRunner.launch, ModelRunner.collect

    def launched(runner, plan, before=None):
        if any(row.num_drafts for row in plan.rows):
            ahead.append(bool(in_flight))
        in_flight.append(plan)
        return launch(runner, plan, before)

    def collected(runner, step):
        in_flight.remove(step.plan)
        return collect(runner, step)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(ModelRunner, "collect", collected)
    engine = make(make_engine, models, "ngram", async_scheduling=True)
    jobs = make_jobs(models, prompts, KINDS, True)
    ahead.clear()
    assert tokens(run(engine, jobs)) == plain_tokens(jobs)
    assert any(ahead) == on_device
    if on_device:  # others follow a step with a prompt, or with too few tokens
        assert sum(ahead) > len(ahead) // 2


def test_penalties_are_counted_on_the_device(models, make_engine, plain_tokens, run, prompts, drafts, monkeypatch):
    """With the kernel of GPUs, one step after the other: of drafts, for the target's logits and the drafter's."""
    pytest.importorskip("triton")
    jobs = make_jobs(models, prompts[3:], PENALISED, False)
    want = plain_tokens(jobs)
    monkeypatch.setattr(penalties, "use_triton", lambda logits: True)
    engine = make(make_engine, models, "medusa")
    drafts.watch(engine)
    outcomes = run(engine, jobs)
    assert tokens(outcomes) == want
    assert sum(outcome.speculation.num_accepted_tokens for outcome in outcomes) > 0
    assert drafts.num_sources > 0
    assert drafts.read_while_drafting == 0


@pytest.mark.parametrize("method", METHODS)
def test_rejection_sampling_gets_the_same_drafts(models, make_engine, run, prompts, method, monkeypatch):
    """Unseeded: the text depends on the drafts and on what each was drawn from."""
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 30}, {"temperature": 0.0}]
    texts = []
    for late in (False, True):
        if late:
            Drafts(monkeypatch)
        texts.append(tokens(run(make(make_engine, models, method), make_jobs(models, prompts, kinds, True))))
    assert texts[0] == texts[1]


@pytest.fixture
def every_other_row_by_lookup(monkeypatch):
    """In place of the policy's choices, which follow from a clock."""

    def choose(self, rows, *, requests_wait=False):
        for index, row in enumerate(rows):
            row.drafter = index % 2

    monkeypatch.setattr(SpeculationPolicy, "choose", choose)
    monkeypatch.setattr(SpeculationPolicy, "plans_no_drafts", property(lambda self: False))
    monkeypatch.setattr(factory, "_LOOKUP_MIN", 1)  # so that prompt lookup finds something often


def run_adaptive(models, make_engine, plain_tokens, run, prompts, drafts):
    """The text is that without drafts; returns how many were verified."""
    config = models.speculative("draft_model", 3) | {"adaptive": True}
    engine = make_engine(speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8)
    drafts.watch(engine)
    jobs = make_jobs(models, prompts, KINDS, True)
    for _ in range(3):
        assert tokens(run(engine, jobs)) == plain_tokens(jobs)
    return sum(entry.counts.num_draft_tokens for entry in engine.stats().speculation)


def test_under_the_policy(models, make_engine, plain_tokens, run, prompts, drafts, monkeypatch):
    """A drafter is tried at once, whatever it costs."""
    monkeypatch.setattr(adapter_states, "FIRST_TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(trials, "TRIAL_SHARE", math.inf)
    assert run_adaptive(models, make_engine, plain_tokens, run, prompts, drafts) > 0
    assert drafts.num_sources > 0


@pytest.mark.usefixtures("every_other_row_by_lookup")
def test_with_a_fallback(models, make_engine, plain_tokens, run, prompts, drafts):
    """Rows whose drafts the host knows, from prompt lookup, in a batch with others."""
    assert run_adaptive(models, make_engine, plain_tokens, run, prompts, drafts) > 0
    assert drafts.num_mixed > 0
