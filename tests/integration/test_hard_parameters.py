"""Parameters and adapters that leave nothing to choose: the one request fails, at the same token for every drafter."""

from __future__ import annotations

import math

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import InvalidRequestError, PromptTooLongError
from outrider.platform.core.messages import EngineRequest

VOCAB = 160
NO_TOKEN = "the sampling parameters ({}) leave no token to choose"
MANNERS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "unseeded": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
}


def outcome(got):
    return got.token_ids, got.finish_reason, got.error, [entry.token_ids[0] for entry in got.logprobs]


@pytest.fixture(scope="module")
def overflowing(models, tmp_path_factory):
    """An adapter whose products leave float32."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("adapter") / "overflowing"
    shutil.copytree(models.adapters["a"], folder)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file)
    return LoRARequest("overflowing", path=str(folder))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_row_without_allowed_tokens_ends_the_text_at_the_same_token(models, make_engine, run, method):
    """Only token 5 is allowed and three in a row are not: two tokens, then the error. Others continue."""
    hard = {"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5, 5]], "ignore_eos": True}
    jobs = []
    for manner in MANNERS.values():
        params = [
            SamplingParams(max_tokens=8, logprobs=1, **hard, **manner),
            SamplingParams(max_tokens=2, **hard, **manner),  # ends in time
            SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        ]
        jobs += [*(([5] * 6, p) for p in params), ([5, 9], params[0])]
    want = [outcome(got) for got in run(make_engine(), jobs)]
    message = NO_TOKEN.format("allowed_token_ids, bad_words")
    for cut, ended, free in zip(want[::4], want[1::4], want[2::4], strict=True):
        assert cut[0] == ended[0] == [5, 5]
        assert (cut[2].message, cut[2].param, cut[2].type) == (message, "allowed_token_ids", "BadRequestError")
        assert (ended[1], len(free[0])) == ("length", 8)
    for k in (1, 2, 5):
        drafted = make_engine(speculative_config=models.speculative(method, k))
        assert [outcome(got) for got in run(drafted, jobs)] == want, k


FORCES = {
    "logit_bias": lambda token: {"logit_bias": {token: 100.0}},
    "allowed_token_ids": lambda token: {"allowed_token_ids": [token]},
    "bad_words": lambda token: {"bad_words_token_ids": [[t] for t in range(VOCAB) if t != token]},
}


@pytest.mark.parametrize("field", FORCES)
def test_token_lists_are_not_shared_between_requests(plain_engine, run, field):
    jobs = [
        ([5, 9], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, **FORCES[field](token)))
        for token in (101, 102, 102, 101)
    ]
    assert [got.token_ids for got in run(plain_engine, jobs)] == [[101] * 2, [102] * 2, [102] * 2, [101] * 2]


def test_min_tokens_suppresses_stop_token_ids(plain_engine, run):
    fields = {"max_tokens": 4, "temperature": 0, "min_tokens": 2, "logit_bias": {101: 100.0, 102: 60.0}}
    jobs = [([5, 9], SamplingParams(stop_token_ids=[stop], **fields)) for stop in (101, 102)]
    found = [(got.token_ids, got.finish_reason) for got in run(plain_engine, jobs)]
    assert found == [([102, 102, 101], "stop"), ([101] * 4, "length")]


def test_result_ends_at_an_empty_row_among_accepted_drafts(models, make_engine, run):
    """The target drafts for itself, so all drafts are right; nothing may follow the token at some place of its text."""
    prompt, plain, jobs, want = [9, 4, 7, 11, 30], make_engine(), [], []
    for manner in ("greedy", "seeded"):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **MANNERS[manner])
        jobs.append((prompt, params))
        want.append(outcome(run(plain, [(prompt, params)])[0]))
        free = want[-1][0]
        for last in free[1:5]:
            cut = params.clone(bad_words_token_ids=[[last, token] for token in range(VOCAB)], logprobs=1)
            jobs.append((prompt, cut))
            want.append(outcome(run(plain, [(prompt, cut)])[0]))
            assert want[-1][0] == free[: free.index(last) + 1]
            assert (want[-1][2].message, want[-1][2].param) == (NO_TOKEN.format("bad_words"), "bad_words")
    itself = {"method": "draft_model", "model": str(models.target)}
    for k in (1, 2, 3, 6):
        found = run(make_engine(speculative_config=itself | {"num_speculative_tokens": k}), jobs)
        assert [outcome(got) for got in found] == want, k
        assert [max(len(delta) for delta in whole.deltas) for whole in found[::5]] == [k + 1] * 2


def test_edits_that_empty_the_first_row_fail_one_request(make_engine, run, prompts, greedy):
    engine = make_engine()
    cases = [
        ({"allowed_token_ids": [1], "min_tokens": 2}, "allowed_token_ids, min_tokens"),
        ({"allowed_token_ids": [4, 5], "bad_words_token_ids": [[4], [5]]}, "allowed_token_ids, bad_words"),
        ({"bad_words_token_ids": [[t] for t in range(VOCAB)]}, "bad_words"),
        ({"stop_token_ids": list(range(VOCAB)), "min_tokens": 1}, "min_tokens"),
    ]
    alone = run(engine, [(prompts[1], greedy)])[0].token_ids
    for manner in MANNERS.values():
        jobs = [(prompts[0], SamplingParams(max_tokens=5, **case, **manner)) for case, _ in cases]
        *failed, good = run(engine, [*jobs, (prompts[1], greedy)])
        found = [(got.error.message, got.error.param) for got in failed]
        assert found == [(NO_TOKEN.format(names), names.partition(",")[0]) for _, names in cases]
        assert all(got.token_ids == [] for got in failed)
        assert good.token_ids == alone


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_an_adapter_that_overflows_fails_its_own_requests(
    models, make_engine, run, prompts, greedy, overflowing, method
):
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = make_engine(speculative_config=models.speculative(method, 3), **options)
    bad = [SamplingParams(max_tokens=5, logprobs=2, **manner) for manner in MANNERS.values()]
    told = SamplingParams(max_tokens=5, prompt_logprobs=1, temperature=0)
    masked = SamplingParams(max_tokens=5, allowed_token_ids=[7], temperature=0)
    jobs = [(prompts[1], greedy), *((prompts[2], p, overflowing) for p in (*bad, told, masked)), (prompts[3], greedy)]
    first, *failed, last = run(engine, jobs)
    for got in failed:
        assert (got.token_ids, got.logprobs, got.prompt_logprobs) == ([], [], None)
        assert (got.error.type, got.error.param) == ("InvalidAdapter", "model")
        assert "not finite with the adapter 'overflowing'" in got.error.message
    # now in the blocks that the failed ones had
    again = run(engine, [(prompts[1], greedy), (prompts[3], greedy)])
    assert [a.token_ids for a in again] == [first.token_ids, last.token_ids]
    assert len(first.token_ids) == len(last.token_ids) == 24


def test_logits_not_finite_inside_a_prompt_are_reported_at_its_end(make_engine, run, prompts, monkeypatch):
    """The rows of some prompt tokens are NaN, the last is not: only requests for the prompt's log-probabilities see
    it."""
    engine = make_engine(enable_prefix_caching=False)
    model = engine._runner._model
    compute = model.compute_logits

    def broken(hidden, *adapters):
        logits = compute(hidden, *adapters)
        if len(logits) > 1:
            logits[0, 3] = math.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", broken)
    (plain,) = run(engine, [(prompts[1], SamplingParams(temperature=0, max_tokens=3))])
    assert (len(plain.token_ids), plain.error) == (3, None)
    (told,) = run(engine, [(prompts[1], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))])
    assert told.error.message == "the model's logits are not finite"
    assert (told.token_ids, told.prompt_logprobs) == ([], None)


def test_a_drafter_whose_logits_are_not_finite_changes_nothing(models, make_engine, run, prompts, monkeypatch):
    """Its drafts are rejected; unseeded requests then draw from the target alone."""
    engine = make_engine(speculative_config=models.speculative("draft_model", 3))
    drafter = engine._runner._drafter._model
    compute = drafter.compute_logits
    monkeypatch.setattr(drafter, "compute_logits", lambda hidden: torch.full_like(compute(hidden), math.nan))
    allowed = {"allowed_token_ids": [7, 8, 9], "max_tokens": 30, "ignore_eos": True}
    for manner in MANNERS.values():
        (got,) = run(engine, [(prompts[0], SamplingParams(**allowed, **manner))])
        assert (len(got.token_ids), got.error) == (30, None)
        assert set(got.token_ids) <= {7, 8, 9}


def test_prompt_logprobs_of_one_token_are_one_none(make_engine, run):
    (got,) = run(make_engine(), [([5], SamplingParams(max_tokens=1, prompt_logprobs=1))])
    assert got.prompt_logprobs == [None]


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle"])
def test_a_prompt_of_the_whole_context_is_scored(models, make_engine, run, method):
    length = 64
    ids = [3 + i % 50 for i in range(length)]
    with torch.no_grad():
        want = models.reference()(torch.tensor([ids])).logits[0].log_softmax(-1)
    config = models.speculative(method, 3)
    engine = make_engine(max_model_len=length, max_num_batched_tokens=24, speculative_config=config)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0, ignore_eos=True)
    other = (ids[:9], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    got, shorter = run(engine, [(ids, params), other])
    assert (got.token_ids, got.finish_reason) == ([int(want[-1].argmax())], "length")
    assert len(shorter.token_ids) == 20
    assert [entry.logprobs[0] for entry in got.prompt_logprobs[1:]] == pytest.approx(
        [float(want[i, token]) for i, token in enumerate(ids[1:])], abs=1e-4
    )
    with pytest.raises(PromptTooLongError):
        engine.add_request(EngineRequest("x", [*ids, 3], params))


@pytest.mark.parametrize(
    ("params", "fields", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, {}, "logit_bias"),
        ({"allowed_token_ids": [10**6]}, {}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB], "min_tokens": 2}, {}, "stop_token_ids"),
        ({"bad_words_token_ids": [[VOCAB + 3]]}, {}, "bad_words"),
        ({"bad_words_token_ids": [[]]}, {}, "bad_words"),
        ({"logprobs": 21}, {}, "logprobs"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ({}, {"eos_token_ids": [1, VOCAB]}, "eos_token_ids"),
        ({}, {"cache_salt": "\ud800"}, "cache_salt"),
        ({}, {"tenant": "\ud800"}, "tenant"),
    ],
)
def test_engine_core_refuses_invalid_requests(plain_engine, params, fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        plain_engine.add_request(EngineRequest("x", [3, 4], SamplingParams(**params), **fields))
    assert caught.value.param == param
    assert not plain_engine.has_work()
