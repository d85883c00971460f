"""Engines of models with experts: greedy text is that of transformers and PEFT with drafts, chunks, cached prefixes and
preemption, and of a batch-invariant engine whatever a step computes beside it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from outrider import LoRARequest, SamplingParams

SIZES = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SPARSE = {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True}
CONFIGS = {
    "qwen3-moe": transformers.Qwen3MoeConfig(**SIZES, **SPARSE),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
TOLERANCE = 2e-3
"""Largest difference of a log probability: an adapter's products are summed in another order than PEFT's."""


class Served:
    """A tiny model, an adapter on attention and experts, and requests on both."""

    def __init__(self, root, config) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        self.folder, adapter = str(root / "base"), str(root / "adapter")
        base = transformers.AutoModelForCausalLM.from_config(config).eval()
        base.save_pretrained(self.folder)
        parameters = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
        options = {"target_modules": ["q_proj", "o_proj"], "target_parameters": parameters, "init_lora_weights": False}
        self._tuned = get_peft_model(base, LoraConfig(r=3, lora_alpha=2, **options)).eval()
        self._tuned.save_pretrained(adapter)
        self._base = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        tokens = torch.randint(3, 131, (60,)).tolist()
        prompts = [tokens, tokens[:40] + [5, 6, 7] * 5, [9, 8, 7] * 6, tokens[:1]]
        self.jobs = [(p, GREEDY, which) for p in prompts for which in (None, LoRARequest("a", path=adapter))]

    @torch.inference_mode()
    def check(self, outcomes) -> None:
        """transformers must choose each token after those before it, with the same probability."""
        for (prompt, _, lora), outcome in zip(self.jobs, outcomes, strict=True):
            model = self._base if lora is None else self._tuned
            logits = model(torch.tensor([prompt + outcome.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
            assert outcome.token_ids == logits.argmax(-1).tolist()
            theirs = torch.log_softmax(logits, -1).max(-1).values
            ours = torch.tensor([found.logprobs[0] for found in outcome.logprobs])
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=CONFIGS)
def served(request, tmp_path_factory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def engine_of(make_engine, served: Served, **options):
    values = {"model": served.folder, "max_model_len": 96, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return make_engine(**(values | options))


def said(outcomes):
    return [(outcome.token_ids, outcome.logprobs) for outcome in outcomes]


def test_drafts_chunks_and_prefixes(make_engine, run, served):
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    engine = engine_of(make_engine, served, speculative_config=speculation, max_num_batched_tokens=64)
    first = run(engine, served.jobs)
    served.check(first)
    again = run(engine, served.jobs)
    served.check(again)
    assert max(outcome.num_cached_tokens for outcome in again) >= 32
    assert sum(sum(outcome.accepted) for outcome in first) > 0


def test_preemption(make_engine, run, served):
    engine = engine_of(make_engine, served, block_size=16, num_gpu_blocks_override=14, enable_prefix_caching=False)
    served.check(run(engine, served.jobs))
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_batch_invariance(make_engine, run, served, speculation):
    options = {"dtype": "bfloat16", "batch_invariant": True, "max_num_batched_tokens": 40}
    engine = engine_of(make_engine, served, speculative_config=speculation, **options)
    alone = [said(run(engine, [job]))[0] for job in served.jobs]
    assert said(run(engine, served.jobs[::-1]))[::-1] == alone


def test_a_head_that_reads_hidden_states_of_layers_changes_no_text(make_engine, run, served, tmp_path):
    config = {"hidden_size": 48, "vocab_size": 131, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    jobs, options = served.jobs[::2], {"enable_lora": False, "load_format": "dummy", "max_num_seqs": 4}
    plain = run(engine_of(make_engine, served, **options), jobs)
    speculation = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    drafted = run(engine_of(make_engine, served, speculative_config=speculation, **options), jobs)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in plain]
