"""Engines of models with experts: a request's bytes depend neither on the rest of the batch nor on drafts."""

from __future__ import annotations

import json

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.kernels.experts import run_products
from outrider.models.layers import experts

from ..thread_ranks import ranks_as_threads
from ..tiny_families import FAMILIES, build

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


class Served:
    """A tiny model, an adapter on attention and experts, and requests on both."""

    def __init__(self, root, family) -> None:
        from peft import LoraConfig, get_peft_model

        self.folder, adapter = str(root / "base"), str(root / "adapter")
        base = build(family)
        base.save_pretrained(self.folder)
        options = {
            "target_modules": ["o_proj", "shared_expert.down_proj", "kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa"],
            "target_parameters": family.parameters,
            "init_lora_weights": False,
        }
        get_peft_model(base, LoraConfig(r=3, lora_alpha=2, **options)).save_pretrained(adapter)
        tokens = torch.randint(3, 131, (60,)).tolist()
        prompts = [tokens, tokens[:40] + [5, 6, 7] * 5, [9, 8, 7] * 6, tokens[:1]]
        self.jobs = [(p, GREEDY, which) for p in prompts for which in (None, LoRARequest("a", path=adapter))]


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss", "deepseek2", "deepseek3"])
def test_two_ranks_write_the_text_of_one(make_engine, run, tmp_path, monkeypatch, family):
    """With an adapter on attention, the router, the shared expert and the experts, of which each rank has its own; with
    drafts; and with blocks of a prompt that were computed before."""
    ranks_as_threads(monkeypatch)
    served = Served(tmp_path, FAMILIES[family])
    options = {"max_num_seqs": 4, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    one = start_engine(make_engine, served, max_num_seqs=4)
    two = start_engine(make_engine, served, tensor_parallel_size=2, **options)
    texts = [[outcome.token_ids for outcome in run(engine, served.jobs)] for engine in (one, two)]
    assert texts[0] == texts[1]
    assert texts[0][::2] != texts[0][1::2], "the adapter changes texts"
    assert sum(entry.counts.num_accepted_tokens for entry in two.stats().speculation)
    again = run(two, served.jobs[:4])
    assert [outcome.token_ids for outcome in again] == texts[0][:4]
    assert all(outcome.num_cached_tokens for outcome in again)


@pytest.fixture(scope="module", params=["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek3"])
def served(request, tmp_path_factory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def start_engine(make_engine, served: Served, **options):
    values = {"model": served.folder, "max_model_len": 96, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return make_engine(**(values | options))


def said(outcomes):
    return [(outcome.token_ids, outcome.logprobs) for outcome in outcomes]


def test_only_adapter_tokens_run_extra_expert_products(make_engine, run, served, monkeypatch):
    engine, counts = start_engine(make_engine, served), set()

    def counted(x, *args, **kwargs):
        counts.add(len(x))
        return run_products(x, *args, **kwargs)

    monkeypatch.setattr(experts, "run_products", counted)
    together = [outcome.token_ids for outcome in run(engine, served.jobs[:2])]
    assert counts == {60, 1}, "of two prompts, and of two tokens of a step"
    assert together == [run(engine, [job])[0].token_ids for job in served.jobs[:2]]


@pytest.mark.parametrize(
    ("dtype", "speculation"), [("float32", None), ("bfloat16", {"method": "ngram", "num_speculative_tokens": 3})]
)
def test_batch_invariance(make_engine, run, served, dtype, speculation):
    options = {"dtype": dtype, "batch_invariant": True, "max_num_batched_tokens": 40}
    engine = start_engine(make_engine, served, speculative_config=speculation, **options)
    alone = [said(run(engine, [job]))[0] for job in served.jobs]
    assert said(run(engine, served.jobs[::-1]))[::-1] == alone


def test_a_head_that_reads_hidden_states_of_layers_changes_no_text(make_engine, run, served, tmp_path):
    config = {"hidden_size": 48, "vocab_size": 131, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    jobs, options = served.jobs[::2], {"enable_lora": False, "load_format": "dummy", "max_num_seqs": 4}
    plain = run(start_engine(make_engine, served, **options), jobs)
    speculation = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    drafted = run(start_engine(make_engine, served, speculative_config=speculation, **options), jobs)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in plain]
