"""Activated LoRA: tokens before the invocation have the base model's KV, and share its cached prefixes."""

import pytest
import torch

from outrider import LoRARequest, SamplingParams

INVOCATION = [7, 9]
LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def activated(models, tmp_path_factory):
    """An activated adapter that also trains the head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path_factory.mktemp("activated"))
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, "lora_alpha": 16}
    config = LoraConfig(r=4, alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM", **options)
    get_peft_model(base, config).save_pretrained(folder)
    return LoRARequest("activated", path=folder)


@torch.inference_mode()
def peft_text(models, lora, prompt, count):
    """Greedy tokens of PEFT, whose generation keeps the invocation of the prompt."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(models.reference(), lora.path).eval()
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    return model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def with_invocation(prompts):
    return [
        [*prompts[3][:37], *INVOCATION, *prompts[1]],  # in the middle of a block
        [*prompts[3][:32], *INVOCATION, 5],  # the start of a block
        [*INVOCATION, *prompts[1], *INVOCATION, 5],  # twice: the last one counts
        [*prompts[1], 7],  # nowhere: the base model answers
    ]


@pytest.fixture(scope="module")
def expected(models, prompts, activated):
    """Texts of PEFT and of the base model for each of `with_invocation`."""
    base = models.reference()
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    texts = []
    for text in with_invocation(prompts):
        plain = base.generate(torch.tensor([text]), **options)[0, len(text) :].tolist()
        texts += [peft_text(models, activated, text, 24), plain]
    return texts


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle"])
def test_texts_equal_those_of_peft_in_a_batch_with_the_base_model(
    models, make_engine, run, prompts, greedy, activated, expected, method
):
    engine = make_engine(**LORA, speculative_config=models.speculative(method, 3), max_num_batched_tokens=24)
    jobs = [job for text in with_invocation(prompts) for job in ((text, greedy, activated), (text, greedy))]
    found = [outcome.token_ids for outcome in run(engine, jobs)]
    assert found == expected
    assert found[0] != found[1]
    assert found[6] == found[7]


def test_prefixes_are_shared_with_the_base_model_up_to_the_invocation(models, make_engine, run, prompts, activated):
    engine = make_engine(**LORA, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    middle, begin, *_ = with_invocation(prompts)
    for text, num_shared in ((middle, 32), (begin, 32)):
        alone = make_engine(**LORA, block_size=16)
        cold = run(alone, [(text, params, activated)])[0]
        warm = run(engine, [(text, params)])[0]
        first, again = (run(engine, [(text, params, activated)])[0] for _ in range(2))
        base = run(alone, [(text, params)])[0]
        assert first.num_cached_tokens == base.num_cached_tokens == num_shared
        assert again.num_cached_tokens == (len(text) - 1) // 16 * 16
        assert cold.token_ids == first.token_ids == again.token_ids != warm.token_ids == base.token_ids
