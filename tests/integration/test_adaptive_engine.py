"""The controller in the engine: the same text as without speculation, whatever it decides."""

import pytest

from outrider import SamplingParams

NAMES = [None, "a", "b", None, "a", "c"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=42, max_tokens=24),
    "penalised": SamplingParams(
        temperature=0.7, seed=1, presence_penalty=0.6, repetition_penalty=1.3, min_tokens=6, max_tokens=24, min_p=0.02
    ),
    "restricted": SamplingParams(temperature=0, allowed_token_ids=[*range(3, 12)], stop_token_ids=[9], max_tokens=24),
}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
OPTIONS = {
    "plain": {},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"max_model_len": 112, "block_size": 8, "num_gpu_blocks_override": 17},
}


def text(outcomes):
    return [(o.token_ids, o.finish_reason, o.stop_reason) for o in outcomes]


def adaptive(models, method, k):
    return models.speculative(method, k) | {"adaptive": True}


@pytest.fixture
def jobs(models, prompts):
    def jobs(name):
        return [(p, PARAMS[name], models.lora(n)) for p, n in zip(prompts, NAMES, strict=True)]

    return jobs


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_text_is_byte_equal_with_and_without(models, make_engine, plain_engine, run, jobs, method, options):
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA, **options)
    num_drafted = 0
    for name in PARAMS:
        want = text(run(plain_engine, jobs(name)))
        for _ in range(2):  # the second time from the prefix cache
            outcomes = run(engine, jobs(name))
            assert text(outcomes) == want, name
            num_drafted += sum(o.speculation.num_drafts for o in outcomes if o.speculation)
    assert num_drafted > 0


def test_requests_switch_it_off_or_cap_it(models, make_engine, run, prompts):
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 4))
    params = PARAMS["greedy"]
    wants = (None, False, 2)
    outcomes = run(engine, [(prompts[0], params.clone(speculative=w)) for w in wants])
    assert len({tuple(o.token_ids) for o in outcomes}) == 1
    assert outcomes[1].speculation is None
    assert max(len(d) for d in outcomes[1].deltas) == 1
    assert max(len(d) for d in outcomes[2].deltas) <= 3


def test_nothing_is_kept_of_finished_requests(models, make_engine, run, prompts, jobs):
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 3), **LORA)
    proposer = engine._runner._proposer
    run(engine, jobs("greedy"))
    run(engine, [(prompts[0], PARAMS["greedy"])])
    run(engine, [(prompts[1], SamplingParams(max_tokens=1))])
    assert len(proposer._states) == 1  # the last batch's, until the next
    known = proposer.snapshot()
    assert len(known) == 4  # the base model and three adapters
    assert {entry["drafter"] for entry in known.values()} <= {"draft_model", "ngram"}
