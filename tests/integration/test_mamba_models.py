"""Mamba-2 models: sizes of a model without attention, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.models.checkpoint.loader import read_facts
from outrider.models.config import config_from_hf
from outrider.models.families import FAMILIES as SERVED
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ..tiny_families import FAMILIES, build

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-E"}
MAMBA = {"architectures": ["Mamba2ForCausalLM"]}
BAMBA = {"architectures": ["BambaForCausalLM"]}
DEEP = replace(FAMILIES["mamba2"], config=FAMILIES["mamba2"].config | {"num_hidden_layers": 12})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Mamba-2, which has no attention."""
    path = tmp_path_factory.mktemp("mamba2")
    build(FAMILIES["mamba2"]).save_pretrained(path)
    file = path / "config.json"
    raw = json.loads(file.read_text())
    del raw["max_position_embeddings"]  # as in published files
    file.write_text(json.dumps(raw))
    return path


def test_a_model_without_attention_takes_no_memory_for_kv(folder):
    facts = read_facts(folder)
    assert facts.kv_bytes_per_token == 0
    assert facts.state_bytes == 2 * 4 * (3 * (96 + 2 * 3 * 10) + 6 * 10 * 16)
    with LLM(str(folder), skip_tokenizer_init=True, swap_space=0.001, enable_prefix_caching=True) as llm:
        engine = llm.llm_engine.engine_core
        assert engine.scheduler.config.max_model_len == 1 << 18
        assert engine.stats().kv_host_hits == 0
        prompt = {"prompt_token_ids": list(range(5, 125))}
        first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
        assert again.num_cached_tokens == 112
        assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("batch_invariant", True, "recurrent"), ("tensor_parallel_size", 2, "neither divides the groups of Mamba-2 3")],
)
def test_refused_options(folder, option, value, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, **{option: value})
    assert caught.value.param == option


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (MAMBA | {"hidden_act": "gelu"}, "hidden_act"),
        (MAMBA | {"num_heads": 100}, "num_heads"),
        (MAMBA | {"n_groups": 3}, "n_groups"),
        (MAMBA | {"conv_kernel": 1}, "conv_kernel"),
        (MAMBA | {"residual_in_fp32": "yes"}, "residual_in_fp32"),
        (MAMBA | {"time_step_limit": [0.0]}, "time_step_limit"),
        (MAMBA | {"time_step_limit": [-1.0, 2.0]}, "time_step_limit"),
        (BAMBA | {"mamba_n_heads": 100}, "mamba_n_heads"),
        (BAMBA | {"attn_layer_indices": 3}, "attn_layer_indices"),
        (NEMOTRON | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        (NEMOTRON | {"layers_block_type": "M"}, "layers_block_type"),
        (NEMOTRON | {"moe_latent_size": 64}, "moe_latent_size"),
        ({"architectures": ["FalconH1ForCausalLM"], "ssm_multipliers": [1.0]}, "ssm_multipliers"),
    ],
)
def test_wrong_configs(raw, param):
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(raw, torch.float32)
    assert caught.value.param == param


def test_published_configs_are_read():
    """Keys as in the files of Nemotron-H-8B, Granite 4 and Bamba-9B."""
    config = config_from_hf(NEMOTRON | {"attention_head_dim": 64}, torch.float32)
    assert config.mixers == ("mamba", "attention", "mlp", "experts")
    assert (config.num_layers, len(config.kv_shapes), config.head_dim) == (4, 1, 64)
    assert (config.experts.layers, config.hidden_act) == ({3}, "relu2")
    assert config.ropes[0].rope_type == "none"
    granite = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2, "num_local_experts": 0}
    config = config_from_hf(granite | {"layer_types": ["mamba", "attention"]}, torch.float32)
    assert (config.states.layers, config.experts, config.intermediate_size) == ({0}, None, 1024)
    config = config_from_hf(granite | {"layer_types": ["attention"] * 2}, torch.float32)
    assert config.states is None
    config = config_from_hf(BAMBA | {"attn_layer_indices": [9, 18, 27]}, torch.float32)
    assert (len(config.kv_shapes), config.rope.rotary_dim, config.states.head_dim) == (3, 64, 64)
    limit = json.loads('[0.0, {"__float__": "Infinity"}]'), json.loads("[0.0, Infinity]")
    limits = {
        config_from_hf(MAMBA | {"time_step_limit": given}, torch.float32).states.time_step_limit for given in limit
    }
    assert limits == {(0.0, float("inf"))}
    assert "GraniteMoeHybridForCausalLM" in SERVED


@pytest.mark.parametrize("in_fp32", [True, False])
def test_residual_in_fp32(in_fp32, tmp_path):
    """Logits of bfloat16 are nearer to those of transformers with the same switch than with the other."""
    path = tmp_path / "model"
    model = build(replace(DEEP, config=DEEP.config | {"residual_in_fp32": in_fp32}))
    model.backbone.embeddings.weight.data *= 300  # a result of a layer is less than the rounding of the sum in bfloat16
    model.to(torch.bfloat16).save_pretrained(path)
    tokens = list(range(5, 60))
    references = {}
    for switch in (True, False):
        switched = type(model).from_pretrained(path, residual_in_fp32=switch, dtype=torch.bfloat16)
        with torch.inference_mode():
            references[switch] = switched(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=64, max_logprobs=131) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=131)
        found = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0].prompt_logprobs
    ours = torch.tensor([[row[token].logprob for token in range(131)] for row in found[1:]])
    distances = {switch: (ours - expected[:-1]).abs().mean() for switch, expected in references.items()}
    assert distances[in_fp32] < distances[not in_fp32]
