"""Answers to one prompt that draft for each other, in engines: the same text and frequencies, and none of others."""

from __future__ import annotations

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_model_path

from .test_speculation import check_frequencies, exact_third_token

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
PROMPT = [7, 8, 9]
RANDOM = SamplingParams(temperature=8.0, seed=11, max_tokens=60, ignore_eos=True)
"""Such a text repeats nothing by chance: its drafts are right if they come from an earlier answer."""
STEPS = 60


def groups(scope, k=5, **fields):
    return {"method": "ngram", "num_speculative_tokens": k, "group_drafts": scope} | fields


def steps(run, engine, lora=None, prompt=PROMPT, **fields) -> int:
    """Steps of an answer that has `STEPS` tokens."""
    (outcome,) = run(engine, [(prompt, RANDOM, lora, fields)])
    assert len(outcome.token_ids) == STEPS
    return len(outcome.deltas)


@pytest.mark.parametrize("k", [1, 5])
def test_text_is_byte_equal_with_different_adapters_in_a_batch(models, make_engine, run, plain_tokens, k):
    """Three adapters answer the same prompt at once, with several seeds each; then once more, known by heart."""
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=24) for seed in range(4)]
    params += [SamplingParams(temperature=0.8, seed=9, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=24)]
    jobs = [(PROMPT, each, models.lora(name)) for each in params for name in (None, "a", "b")]
    engine = make_engine(speculative_config=groups("prompt", k), max_num_seqs=len(jobs), **LORA)
    lengths = []
    for _ in range(2):
        outcomes = run(engine, jobs)
        assert [outcome.token_ids for outcome in outcomes] == plain_tokens(jobs)
        lengths.append(sum(len(outcome.deltas) for outcome in outcomes))
    assert lengths[1] < 0.8 * lengths[0]
    counts = {entry.adapter: entry.counts for entry in engine.stats().speculation}
    assert {name for name, own in counts.items() if own.num_accepted_tokens} == {"", "a", "b"}


def test_unseeded_frequencies_are_the_targets(models, make_engine, run):
    """Hundreds of answers at once, each drafted from all others."""
    engine = make_engine(speculative_config=groups("prompt", 3), max_num_seqs=200)
    check_frequencies(engine, run, exact_third_token(models.reference()))


def test_answers_of_a_request_draft_for_each_other():
    """By default, and with no more steps than each answer alone."""
    params = SamplingParams(n=8, temperature=0.5, seed=3, max_tokens=40, ignore_eos=True)
    found = []
    for config in (None, groups("off"), {"method": "ngram", "num_speculative_tokens": 5}):
        with LLM(str(demo_model_path()), dtype="float32", max_model_len=256, speculative_config=config) as llm:
            (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
            found.append(([one.token_ids for one in output.outputs], output.metrics.num_accepted_tokens))
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[2][1] > 2 * found[1][1]


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a"}, {}),
        ({"tenant": "a", "cache_salt": "x"}, {"tenant": "a", "cache_salt": "y"}),
        ({"tenant": "ab", "cache_salt": "c"}, {"tenant": "a", "cache_salt": "bc"}),
        ({}, {"prompt": [7, 8, 10]}),
    ],
)
def test_answers_draft_for_the_same_tenant_salt_and_prompt_alone(make_engine, run, other, fields):
    engine = make_engine(speculative_config=groups("prompt"))
    first = steps(run, engine, **other)
    assert steps(run, engine, **fields) > 0.8 * STEPS
    assert steps(run, engine, **other) < first / 2


def test_a_request_drafts_for_no_other_unless_that_is_asked_for(make_engine, run):
    engine = make_engine(speculative_config=groups("request"))
    for group in (None, "g", "h"):
        assert steps(run, engine, group=group) > 0.8 * STEPS


def test_answers_are_keyed_by_adapter_content_and_dropped_with_it(models, make_engine, run):
    engine = make_engine(speculative_config=groups("prompt"), **LORA)
    a = models.lora("a")
    engine.adapters.load(a)
    assert steps(run, engine, a) > 0.8 * STEPS
    assert steps(run, engine) > 0.8 * STEPS
    assert steps(run, engine, models.lora("b")) > 0.8 * STEPS
    assert steps(run, engine, a) < 0.5 * STEPS
    engine.adapters.unload("a")
    engine.adapters.load(a)
    assert steps(run, engine, a) > 0.8 * STEPS
    assert steps(run, engine) < 0.5 * STEPS
    engine.adapters.load(LoRARequest("a", path=models.adapters["c"]), load_inplace=True)
    assert steps(run, engine, models.lora("a")) > 0.8 * STEPS


def test_memory_is_bounded_in_the_engine(make_engine, run):
    """Two answers fit; the third one replaces the first."""
    engine = make_engine(speculative_config=groups("prompt", group_max_tokens=2 * STEPS))
    for prompt in (3, 4, 5):
        assert steps(run, engine, prompt=[7, 8, prompt]) > 0.8 * STEPS
    assert steps(run, engine, prompt=[7, 8, 5]) < 0.5 * STEPS
    assert steps(run, engine, prompt=[7, 8, 3]) > 0.8 * STEPS
