"""Long matches of prompt lookup instead of the drafts of a head, in engines: same text, and which drafter made it."""

import math

import pytest

from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.engine.sampling.mask_threads import MaskThreads
from outrider.spec_decode.control import adapters, policy
from outrider.spec_decode.control.goodput import Plan

HEAD = {"method": "eagle3", "model": str(demo_model_path().parent / "eagle3"), "num_speculative_tokens": 4}
COPIED = "red lamp, green chair, blue table, " * 8
FRESH = "Write a short story about a lamp."
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)


@pytest.fixture
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as may be, and no trials, whatever steps take on this machine."""

    def most(offers, prices, num_rows, *, fair):
        return Plan([len(offer.survival) for offer in offers], 2.0, 1.0)

    monkeypatch.setattr(policy, "best_plan", most)
    monkeypatch.setattr(adapters, "FIRST_TRIAL_SECONDS", math.inf)


def generate(speculative, prompts, params):
    """(tokens of each answer, verification steps of [the head, prompt lookup] for each)."""
    with LLM(str(demo_model_path()), dtype="float32", max_model_len=512, speculative_config=speculative) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    steps = [[*output.metrics.drafts_by_drafter, 0, 0][:2] for output in outputs]
    return [output.outputs[0].token_ids for output in outputs], steps


@pytest.mark.usefixtures("always_drafting")
def test_copied_text_is_drafted_by_matches_and_fresh_text_by_the_head():
    prompts, params = [COPIED, FRESH], [GREEDY, SEEDED]
    plain, _ = generate(None, prompts, params)
    by_head, alone = generate(HEAD, prompts, params)
    mixed, steps = generate(HEAD | {"adaptive": True}, prompts, params)
    assert by_head == mixed == plain
    (copy_head, copy_match), (fresh_head, fresh_match) = steps
    assert copy_match > copy_head
    assert copy_match + copy_head < 0.8 * sum(alone[0])
    assert fresh_match == 0
    assert [fresh_head, 0] == alone[1], "the head is as right as if it were alone"


@pytest.mark.usefixtures("always_drafting")
def test_what_other_answers_say_is_drafted_instead_of_the_heads_drafts():
    params = [SamplingParams(n=6, seed=5, temperature=0.3, max_tokens=40, ignore_eos=True)]
    plain, _ = generate(None, [FRESH], params)
    alone, [(_, alone_match)] = generate(HEAD | {"adaptive": True, "group_drafts": "off"}, [FRESH], params)
    grouped, [(_, group_match)] = generate(HEAD | {"adaptive": True}, [FRESH], params)
    assert plain == alone == grouped
    assert group_match > alone_match


@pytest.mark.usefixtures("always_drafting")
def test_forced_tokens_of_a_grammar_come_before_a_match(monkeypatch, make_engine, run):
    """The prompt has the forced words with others between them, which matches would draft."""
    found_in_time = MaskThreads.run
    monkeypatch.setattr(MaskThreads, "run", lambda self, jobs, _: found_in_time(self, jobs, 30.0))
    words = ["the red lamp", "costs 42 euros", "and the green chair", "costs 17 euros"]
    prompt = load_tokenizer(demo_model_path()).encode(" or maybe ".join([*words, *words]))
    grammar = f'start: "{" ".join(words)}!"'
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(grammar=grammar))
    found = []
    for speculative in (None, HEAD | {"adaptive": True}):
        engine = make_engine(model=str(demo_model_path()), max_model_len=512, speculative_config=speculative)
        found += run(engine, [(prompt, params)])
    assert found[0].token_ids == found[1].token_ids
    assert len(found[0].token_ids) > 15
    assert len(found[1].deltas) <= len(found[0].deltas) < 15, "no step verified a draft that the grammar excludes"
