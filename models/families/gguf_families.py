"""Families in GGUF files: llama.cpp's names of architectures, facts that its files do not state, and the changes that
its converter makes to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...platform.core.errors import UnsupportedModelError
from . import gguf_states, gguf_varied
from .gguf_states import Facts, Values, predicted

Tensors = Mapping[str, Any]
"""Tensors of the package's reader by their names."""


def _nothing(values: Values, tensors: Tensors) -> Facts:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Family of an architecture in a GGUF file."""

    architecture: str
    """Name in the `architectures` of config.json."""
    with_experts: str | None = None
    """Architecture of files with experts, if it is another one."""
    neighbours_rotated: bool = False
    """True: rows of q and k are in the order in which neighbours are rotated as pairs; ours rotate the two halves."""
    facts: Callable[[Values, Tensors], Facts] = _nothing
    """Function from a file's values and its tensors to keys of config.json that the file has in no other way."""
    renames: tuple[tuple[str, str], ...] = ()
    """Patterns in a checkpoint's names and what replaces them, before the package's table names the tensor in the file.
    A result that begins with "blk." is the file's own name."""
    tiled: bool = False
    """True: value heads of a delta net are in the order of their indexes within a key head; ours are by key head."""


def _gemma(layers_of_largest: int) -> Callable[[Values, Tensors], Facts]:
    """Scores are scaled by the head's size; in the largest model, by hidden size / heads."""

    def facts(values: Values, tensors: Tensors) -> Facts:
        if values.get("block_count") == layers_of_largest:
            size = values["embedding_length"] // values["attention.head_count"]
        else:
            size = values.get("attention.key_length")
        return {} if size is None else {"query_pre_attn_scalar": size}

    return facts


def _olmo2(values: Values, tensors: Tensors) -> Facts:
    """OLMo 3 has the name of OLMo 2, and a window."""
    if not values.get("attention.sliding_window"):
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "rope_theta": values.get("rope.freq_base")}


def _seed_oss(values: Values, tensors: Tensors) -> Facts:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def _cohere2(values: Values, tensors: Tensors) -> Facts:
    return {"logit_scale": values.get("logit_scale")}


def _mistral3(values: Values, tensors: Tensors) -> Facts:
    """Mistral Small 3 has neither a scaled rotation nor scaled queries, Ministral 3 has both."""
    rope = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": values.get("attention.temperature_scale")}
    return {"rope_parameters": rope if rope["llama_4_scaling_beta"] else {}}


def _qwen3_moe(values: Values, tensors: Tensors) -> Facts:
    return {"norm_topk_prob": values.get("expert_weights_norm", True)}


def _stablelm(values: Values, tensors: Tensors) -> Facts:
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


def _falcon(values: Values, tensors: Tensors) -> Facts:
    """The merged projection is stored by KV head in both forms of the model; files say which form by their norms."""
    two_norms = "blk.0.attn_norm_2.weight" in tensors
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": values.get("attention.head_count_kv", 1),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }


def _gpt_neox(values: Values, tensors: Tensors) -> Facts:
    return {"use_parallel_residual": values.get("use_parallel_residual", True)}


def _gpt_oss(values: Values, tensors: Tensors) -> Facts:
    return {"rope_parameters": {"truncate": False}}


_EXPERT_KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
"""Keys of config.json about experts by those of a file."""


def _sparse(values: Values, tensors: Tensors) -> Facts:
    return {theirs: values[ours] for ours, theirs in _EXPERT_KEYS.items() if ours in values}


def _glm4_moe(values: Values, tensors: Tensors) -> Facts:
    return _sparse(values, tensors) | predicted(values) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


def _ernie4_5_moe(values: Values, tensors: Tensors) -> Facts:
    return _sparse(values, tensors) | {
        "moe_layer_start_index": values.get("leading_dense_block_count", 1),
        "decoder_sparse_step": values.get("interleave_moe_layer_step", 1),
    }


def _lfm2(values: Values, tensors: Tensors) -> Facts:
    """Layers without KV heads are convolutions; the stated size of an MLP is the final one."""
    heads = values["attention.head_count_kv"]
    return _sparse(values, tensors) | {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": values["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }


_DEEPSEEK_KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
"""Keys of DeepSeek's config.json by those of a file."""
_DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups, and groups that a token visits, of models by their number of experts; older files do not state them."""
_SIGMOID = 2
"""Number of the sigmoid in `expert_gating_func`."""
_LOG_MULTIPLIER = 0.1
"""Factor of `mscale_all_dim` in `yarn_log_multiplier`."""


def _deepseek(values: Values, tensors: Tensors) -> Facts:
    found = {theirs: values[ours] for ours, theirs in _DEEPSEEK_KEYS.items() if ours in values}
    # Files whose kv_b_proj is in two parts state the sizes of the cache, and those of the heads under another name.
    heads, value_dim = (
        values.get(f"attention.{name}_length_mla", values.get(f"attention.{name}_length")) for name in ("key", "value")
    )
    if heads is None or value_dim is None or "rope.dimension_count" not in values:
        raise UnsupportedModelError("deepseek2: the file does not state the sizes of its heads", param="model")
    groups, top_groups = _DEEPSEEK_GROUPS.get(values.get("expert_count", 0), (1, 1))
    rope: dict[str, Any] = {}
    if (multiplier := values.get("rope.scaling.yarn_log_multiplier")) is not None:
        scale = round(multiplier / _LOG_MULTIPLIER, 6)
        rope = {"mscale": scale, "mscale_all_dim": scale}
    if values.get("expert_gating_func") == _SIGMOID:
        found["architectures"] = ["DeepseekV3ForCausalLM"]
    return found | {
        "qk_nope_head_dim": heads - values["rope.dimension_count"],
        "v_head_dim": value_dim,
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "head_dim": None,
        "partial_rotary_factor": None,
        "topk_method": "group_limited_greedy",
        "n_group": values.get("expert_group_count", groups),
        "topk_group": values.get("expert_group_used_count", top_groups),
        "rope_parameters": rope,
    }


_TIME_STEP = (r"\.dt_bias$", ".dt_proj.bias")
_BACKBONE = (r"^model\.(?!.*\.mixer\.experts\.)", "backbone.")
_NEMOTRON = (_BACKBONE, (r"\.mixer\.experts\.", ".mlp.experts."), _TIME_STEP)
_NEMOTRON_H = GgufFamily(
    "NemotronHForCausalLM", facts=gguf_states.nemotron_h, renames=_NEMOTRON, neighbours_rotated=True
)
_GRANITE = (
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
    (r"\.block_sparse_moe\.router\.", ".block_sparse_moe.router.layer."),
    _TIME_STEP,
)
_GEMMA4 = (
    (r"^model\.layers\.(\d+)\.router\.scale$", r"blk.\1.ffn_gate_inp.scale"),
    (r"^model\.layers\.(\d+)\.router\.per_expert_scale$", r"blk.\1.ffn_down_exps.scale"),
)
_LFM2 = ((r"^model\.(?=.*\.feed_forward\.experts\.)", ""), (r"\.expert_bias$", ".expert_bias.bias"))
GGUF_FAMILIES = {
    "cohere2": GgufFamily("Cohere2ForCausalLM", facts=_cohere2),
    "deepseek2": GgufFamily("DeepseekV2ForCausalLM", facts=_deepseek),  # V3 too
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", facts=_ernie4_5_moe),
    "exaone4": GgufFamily("Exaone4ForCausalLM"),
    "falcon": GgufFamily("FalconForCausalLM", facts=_falcon),
    "falcon-h1": GgufFamily("FalconH1ForCausalLM", facts=gguf_states.falcon_h1, renames=(_TIME_STEP,)),
    "gemma2": GgufFamily("Gemma2ForCausalLM", facts=_gemma(46)),
    "gemma3": GgufFamily("Gemma3ForCausalLM", facts=_gemma(62)),
    "gemma3n": GgufFamily("Gemma3nForCausalLM", facts=gguf_varied.gemma3n),
    "gemma4": GgufFamily("Gemma4ForCausalLM", facts=gguf_varied.gemma4, renames=_GEMMA4),
    "glm4": GgufFamily("Glm4ForCausalLM"),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", facts=_glm4_moe),
    "gpt-oss": GgufFamily("GptOssForCausalLM", facts=_gpt_oss),
    "gpt2": GgufFamily("GPT2LMHeadModel"),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", facts=_gpt_neox),
    "granite": GgufFamily("GraniteForCausalLM", neighbours_rotated=True),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", facts=gguf_states.granite_hybrid, renames=_GRANITE, neighbours_rotated=True
    ),  # Bamba too
    "lfm2": GgufFamily("Lfm2ForCausalLM", facts=_lfm2),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", facts=_lfm2, renames=_LFM2),
    "llama": GgufFamily("LlamaForCausalLM", "MixtralForCausalLM", neighbours_rotated=True),  # Mistral too
    "llama4": GgufFamily("Llama4ForCausalLM", facts=gguf_varied.llama4),
    "mamba2": GgufFamily("Mamba2ForCausalLM", facts=gguf_states.mamba2, renames=(_BACKBONE, _TIME_STEP)),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM"),
    "mistral3": GgufFamily("Ministral3ForCausalLM", neighbours_rotated=True, facts=_mistral3),  # Mistral Small 3 too
    "nemotron_h": GgufFamily(
        "NemotronHForCausalLM", facts=gguf_states.nemotron_h, renames=_NEMOTRON, neighbours_rotated=True
    ),
    "nemotron_h_moe": GgufFamily(
        "NemotronHForCausalLM", facts=gguf_states.nemotron_h, renames=_NEMOTRON, neighbours_rotated=True
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", facts=_olmo2),  # OLMo 3 too
    "olmoe": GgufFamily("OlmoeForCausalLM"),
    "phi2": GgufFamily("PhiForCausalLM"),
    "phi3": GgufFamily("Phi3ForCausalLM"),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM"),
    "qwen2vl": GgufFamily("Qwen2ForCausalLM"),  # Qwen2.5-VL too; towers are in files of their own
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", facts=gguf_states.delta_net, renames=(_TIME_STEP,), tiled=True),
    "qwen35moe": GgufFamily("Qwen3_5MoeForCausalLM", facts=gguf_states.delta_net, renames=(_TIME_STEP,), tiled=True),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", facts=_qwen3_moe),
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", facts=gguf_states.delta_net, renames=(_TIME_STEP,)),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM"),
    "qwen3vlmoe": GgufFamily("Qwen3MoeForCausalLM", facts=_qwen3_moe),
    "seed_oss": GgufFamily("SeedOssForCausalLM", facts=_seed_oss),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", neighbours_rotated=True),
    "stablelm": GgufFamily("StableLmForCausalLM", facts=_stablelm),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM"),
}
"""Families by `general.architecture`."""

GPT2_SPLITS = {"default", "gpt-2", "phi-2", "mpt", "olmo", "jais"}
"""Splits of text as GPT-2's, by `tokenizer.ggml.pre`."""
GPT2_SPLITS_WITHOUT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Splits as GPT-2's after each digit was split off."""
GPT4_SPLITS = {"chatglm-bpe": 3, "glm4": 3, "stablelm2": 1}
"""Splits as GPT-4's, and the most digits that stay together."""
QWEN35_SPLITS = {"qwen35"}
"""Splits as Qwen3.5's: Qwen2's, but marks belong to words."""
DEEPSEEK_SPLITS = {"deepseek-v3"}
"""Splits as DeepSeek-V3's."""
FALCON_SPLITS = {"falcon"}
"""Splits as Falcon's: punctuation, then words, then numbers in threes."""
SPLITS_OF_WHOLE_WORDS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())
"""Splits after which a known word is not merged, and before which text begins with a token for that."""
