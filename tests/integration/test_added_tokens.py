"""Adapters with more tokens than the base model: their requests generate them, and no other request does."""

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.structured_outputs import StructuredOutputsParams

from .conftest import VOCAB

SIZE = VOCAB + 4
LORA = {"enable_lora": True, "max_lora_rank": 8}
PROMPT = [5, VOCAB, 9, SIZE - 1, 6, VOCAB, 9]


@pytest.fixture(scope="module")
def resized(models, tmp_path_factory):
    """The PEFT model of an adapter that often generates its added tokens, and the request for it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path_factory.mktemp("resized"))
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    base.resize_token_embeddings(SIZE, mean_resizing=False)
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data[VOCAB:] = 1.5 * parameter.data[20 : 20 + SIZE - VOCAB]
    model.save_pretrained(folder)
    return model.eval(), LoRARequest("resized", path=folder)


@pytest.fixture(scope="module")
def peft_texts(resized, prompts):
    """PEFT's, after two prompts."""
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    with torch.inference_mode():
        return [
            resized[0].generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
            for prompt in (PROMPT, prompts[2])
        ]


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "draft_model", "eagle", "medusa"])
def test_text_equals_peft_with_every_drafter(
    models, make_engine, run, prompts, greedy, resized, peft_texts, plain_tokens, method
):
    """Drafters that know only the base model's tokens leave these requests alone, and draft for all others."""
    _, lora = resized
    engine = make_engine(**LORA, speculative_config=models.speculative(method, 3), max_num_batched_tokens=16)
    others = [(prompts[4], greedy), (prompts[4], greedy, models.lora("a"))]
    found = run(engine, [(PROMPT, greedy, lora), *others, (prompts[2], greedy, lora)])
    texts = [outcome.token_ids for outcome in found]
    assert [texts[0], texts[3]] == peft_texts
    assert max(texts[0] + texts[3]) >= VOCAB
    assert texts[1:3] == plain_tokens(others)
    drafted = [outcome.speculation is not None and outcome.speculation.num_draft_tokens > 0 for outcome in found]
    assert drafted[1] == drafted[2] == (method is not None)
    assert drafted[0] == (method in ("ngram", "suffix"))


def test_other_requests_sample_as_alone(make_engine, run, prompts, resized, models):
    """With every sampling parameter, in a batch with a request of the adapter, whose steps have more columns."""
    params = [
        SamplingParams(seed=4, max_tokens=40, ignore_eos=True, temperature=3.0, logprobs=3),
        SamplingParams(seed=5, max_tokens=40, ignore_eos=True, top_p=0.9, repetition_penalty=1.3, temperature=2.0),
        SamplingParams(seed=6, max_tokens=40, ignore_eos=True, top_k=7, presence_penalty=0.4, min_p=0.01),
    ]
    engine = make_engine(**LORA)
    jobs = [(prompts[1], one, models.lora(name)) for one, name in zip(params, (None, "a", None), strict=True)]
    alone = [outcome.token_ids for outcome in run(engine, jobs)]
    sampled = SamplingParams(seed=7, max_tokens=40, ignore_eos=True, temperature=2.0, logprobs=2)
    beside = run(engine, [*jobs, (PROMPT, sampled, resized[1])])
    assert [outcome.token_ids for outcome in beside[:3]] == alone
    assert max(beside[3].token_ids) >= VOCAB > max(max(text) for text in alone)
    assert all(token < VOCAB for entry in beside[0].logprobs for token in entry.token_ids)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_other_requests_sample_drafts_in_the_same_step(models, make_engine, run, prompts, greedy, resized, method):
    """Drafters give probabilities of the base model's tokens; a step with the adapter has more columns."""
    engine = make_engine(**LORA, speculative_config=models.speculative(method, 3))
    sampled = SamplingParams(max_tokens=12, ignore_eos=True)  # without a seed drafts are drawn
    found = run(engine, [(prompts[4], sampled), (PROMPT, greedy, resized[1]), (prompts[4], sampled, models.lora("a"))])
    assert [len(outcome.token_ids) for outcome in found] == [12, 24, 12]
    assert all(found[i].speculation.num_draft_tokens > 0 for i in (0, 2))
    assert max(found[0].token_ids + found[2].token_ids) < VOCAB


def test_parameters_name_added_tokens(make_engine, run, resized):
    added = SIZE - 2

    def params(**options):
        return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **options)

    cases = {
        "bias": params(logit_bias={added: 100.0}),
        "allowed": params(allowed_token_ids=[added, 5]),
        "banned": params(logit_bias=dict.fromkeys(range(VOCAB, SIZE), -100.0)),
        "stop": params(logit_bias={added: 100.0}, stop_token_ids=[added], min_tokens=3),
        "penalised": params(repetition_penalty=100.0, prompt_logprobs=1, logprobs=0),
    }
    engine = make_engine(**LORA)
    found = dict(zip(cases, run(engine, [(PROMPT, one, resized[1]) for one in cases.values()]), strict=True))
    assert found["bias"].token_ids == [added] * 6
    assert set(found["allowed"].token_ids) <= {added, 5}
    assert max(found["banned"].token_ids) < VOCAB
    assert len(found["stop"].token_ids) == 4
    assert found["stop"].token_ids[-1] == added
    assert not set(found["penalised"].token_ids) & set(PROMPT)
    logprobs = found["penalised"].prompt_logprobs
    with torch.inference_mode():
        expected = resized[0](torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for position, entry in enumerate(logprobs[1:], 1):
        assert entry.token_ids[0] == PROMPT[position]
        assert entry.logprobs[0] == pytest.approx(expected[position - 1, PROMPT[position]].item(), abs=1e-4)


def test_tokens_that_an_adapter_does_not_have_are_refused(models, make_engine, run, prompts, greedy, resized):
    """Once it is known how many it has; other requests go on."""
    engine = make_engine(**LORA)
    jobs = [
        ([5, SIZE], greedy, resized[1]),
        ([5, VOCAB], greedy, models.lora("a")),
        ([5], SamplingParams(logit_bias={SIZE: 1.0}), resized[1]),
        (prompts[0], greedy, resized[1]),
        ([5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")), resized[1]),
    ]
    found = run(engine, jobs)
    assert "which adds tokens to the vocabulary" in found[4].error.message
    for outcome, size in zip(found, (SIZE, VOCAB, SIZE), strict=False):
        assert outcome.error.type == "BadRequestError"
        assert f"outside the vocabulary of {size} tokens" in outcome.error.message
    assert len(found[3].token_ids) == 24
