"""The engine's text against transformers and PEFT, and against itself under pressure."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider import SamplingParams
from outrider.platform.engine.queue.scheduler import Scheduler

NAMES = [None, "a", "b", "c", None, "a"]


def transformers_greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_text_equals_transformers_and_peft_in_a_mixed_batch(models, make_engine, run, prompts, greedy):
    engine = make_engine(enable_lora=True, max_loras=3, max_lora_rank=8, max_num_batched_tokens=20)
    outcomes = run(engine, [(p, greedy, models.lora(n)) for p, n in zip(prompts, NAMES, strict=True)])
    for prompt, name, outcome in zip(prompts, NAMES, outcomes, strict=True):
        # transformers bans the end token while min_new_tokens is not reached; ours may generate it
        want = transformers_greedy(models.reference(name), prompt, 24)
        first_end = outcome.token_ids.index(1) if 1 in outcome.token_ids else 24
        assert outcome.token_ids[:first_end] == want[:first_end]
        assert (len(outcome.token_ids), outcome.finish_reason) == (24, "length")


@pytest.mark.parametrize("seed", [None, 11])
def test_constant_preemption_gives_the_same_tokens(make_engine, run, plain_tokens, prompts, seed):
    params = SamplingParams(temperature=0 if seed is None else 1.0, seed=seed, max_tokens=40, ignore_eos=True)
    tight = make_engine(max_model_len=112, block_size=8, num_gpu_blocks_override=16)
    outcomes = run(tight, [(p, params) for p in prompts])
    assert tight.stats().num_preemptions > 0
    assert [o.token_ids for o in outcomes] == plain_tokens([(p, params) for p in prompts])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"block_size": 4},
        {"enable_chunked_prefill": False},
        {"scheduling_policy": "priority"},
    ],
)
def test_scheduling_never_changes_seeded_text(make_engine, run, plain_tokens, prompts, options):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=20)
    want = plain_tokens([(p, params) for p in prompts])
    engine = make_engine(**options)
    assert [o.token_ids for o in run(engine, [(p, params) for p in prompts])] == want
    # and again, now from the prefix cache if there is one
    again = run(engine, [(p, params) for p in prompts])
    assert [o.token_ids for o in again] == want
    if options.get("enable_prefix_caching", True):
        assert max(o.num_cached_tokens for o in again) > 0
    else:
        assert max(o.num_cached_tokens for o in again) == 0


def test_seeds_differ_and_unseeded_requests_differ(make_engine, run, prompts):
    engine = make_engine()
    jobs = [(prompts[0], SamplingParams(seed=s, max_tokens=16)) for s in (1, 2, 1, None, None)]
    first, second, third, fourth, fifth = (tuple(o.token_ids) for o in run(engine, jobs))
    assert first == third
    assert len({first, second, fourth, fifth}) == 4


def test_siblings_share_the_prompts_blocks_even_without_a_prefix_cache(make_engine, run, prompts):
    engine = make_engine(enable_prefix_caching=False)
    jobs = [(prompts[3], SamplingParams(seed=i, max_tokens=4), None, {"group": "g"}) for i in range(3)]
    outcomes = run(engine, jobs)
    assert [o.num_cached_tokens for o in outcomes] == [0, 48, 48]
    alone = run(engine, [(prompts[3], SamplingParams(seed=2, max_tokens=4))])
    assert alone[0].token_ids == outcomes[2].token_ids


def test_stop_token_ids_end_the_text_and_are_named(make_engine, run, prompts, greedy):
    engine = make_engine()
    text = run(engine, [(prompts[1], greedy)])[0].token_ids
    stop = text[5]
    (outcome,) = run(engine, [(prompts[1], greedy.clone(stop_token_ids=[stop]))])
    assert outcome.token_ids == text[: text.index(stop) + 1]
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", stop)


def test_min_tokens_suppresses_the_end_token(make_engine, run, prompts):
    engine = make_engine()
    params = SamplingParams(temperature=0, logit_bias={1: 100}, max_tokens=8)
    assert run(engine, [(prompts[0], params)])[0].token_ids == [1]
    outcome = run(engine, [(prompts[0], params.clone(min_tokens=3))])[0]
    assert len(outcome.token_ids) == 4
    assert outcome.token_ids[-1] == 1


def test_text_ends_at_the_context_limit(make_engine, run, prompts):
    engine = make_engine(max_model_len=64)
    (outcome,) = run(engine, [(prompts[3], SamplingParams(max_tokens=None, ignore_eos=True))])
    assert (len(outcome.token_ids), outcome.finish_reason) == (4, "length")


def test_logprobs_are_those_of_the_raw_distribution(models, make_engine, run, prompts):
    engine = make_engine(max_num_batched_tokens=16)
    params = SamplingParams(
        temperature=0.7, seed=5, top_k=20, repetition_penalty=1.2, max_tokens=6, logprobs=3, prompt_logprobs=2
    )
    (outcome,) = run(engine, [(prompts[2], params)])
    ids = torch.tensor([prompts[2] + outcome.token_ids])
    with torch.no_grad():
        want = models.reference()(ids).logits[0].log_softmax(-1)
    assert outcome.prompt_logprobs[0] is None
    found = outcome.prompt_logprobs[1:] + outcome.logprobs
    assert len(found) == ids.shape[1] - 1
    for position, entry in enumerate(found):
        row, token = want[position], ids[0, position + 1].item()
        k = 2 if position + 1 < len(prompts[2]) else 3
        assert entry.token_ids == [token, *row.topk(k).indices.tolist()]
        torch.testing.assert_close(torch.tensor(entry.logprobs), row[entry.token_ids], rtol=0, atol=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1


def test_a_request_without_any_allowed_token_fails_alone(make_engine, run, prompts, greedy):
    engine = make_engine()
    stuck = greedy.clone(allowed_token_ids=[1], min_tokens=2)
    good, bad = run(engine, [(prompts[0], greedy), (prompts[1], stuck)])
    assert bad.error.param == "allowed_token_ids"
    assert len(good.token_ids) == 24


def test_bad_requests_are_refused_and_nothing_else_stops(make_engine, run, prompts, greedy):
    from outrider.platform.core.errors import InvalidRequestError, OverloadedError, PromptTooLongError
    from outrider.platform.core.messages import EngineRequest

    engine = make_engine(max_num_queued_reqs=1, max_num_seqs=1)
    with pytest.raises(PromptTooLongError, match="256"):
        engine.add_request(EngineRequest("x", [3] * 256, greedy))
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_request(EngineRequest("x", [], greedy))
    with pytest.raises(InvalidRequestError, match="160"):
        engine.add_request(EngineRequest("x", [160], greedy))
    engine.add_request(EngineRequest("x", [3], greedy))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request(EngineRequest("x", [3], greedy))
    engine.add_request(EngineRequest("y", [3], greedy))  # one may run, one may wait
    with pytest.raises(OverloadedError):
        engine.add_request(EngineRequest("z", [3], greedy))
    engine.abort(["x", "y"])
    assert len(run(engine, [(prompts[0], greedy)])[0].token_ids) == 24


def test_garbage_collection_is_paused_only_within_a_step(make_engine, run, prompts, greedy, monkeypatch):
    engine, schedule, was_on = make_engine(), Scheduler.schedule, []

    def noted(scheduler):
        was_on.append(gc.isenabled())
        return schedule(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", noted)
    run(engine, [(prompts[0], greedy)])
    assert set(was_on) == {False}
    assert gc.isenabled()
