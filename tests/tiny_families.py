"""Tiny random models of all families, as transformers makes them, and the projections that adapters target there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = ["gate_proj", "up_proj", "down_proj"]
SCALED = [*ATTENTION, *GATED, "embed_tokens"]
MERGED = ["gate_up_proj", "down_proj"]


@dataclass(frozen=True)
class Family:
    """A model, whose config in transformers is `prefix`Config."""

    prefix: str
    config: dict[str, Any] = field(default_factory=dict)
    """Changes of SIZES."""
    targets: list[str] | str = field(default_factory=lambda: ATTENTION + GATED)
    """Every projection, which an adapter changes; or a pattern of their names."""
    parameters: list[str] = field(default_factory=list)
    """Further parameters, which hold the weights of a router or of all experts."""
    is_multimodal: bool = False
    """True: `config` is the whole config of a `prefix`ForConditionalGeneration."""
    architecture: str | None = None
    """Name in config.json of a model that transformers does not know, which has the layers of `prefix`."""


_LOCAL = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
_PHI4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [1.0 + i for i in range(6)],
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_GPT_OSS = {
    **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False},
        "original_max_position_embeddings": 64,
    },
}
_OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {
        **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
        "original_max_position_embeddings": 64,
    },
}
_LATENT = {
    **{"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
_DEEPSEEK_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"mscale": 0.7, "mscale_all_dim": 0.9},
}
_QUERY_RANK = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
_KV = ["kv_a_proj_with_mqa", "o_proj", "kv_b_proj"]
_SPARSE = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
_ALL_HEADS = {"num_key_value_heads": 4}
_QKV = ["q_proj", "k_proj", "v_proj"]
_C_ATTN = ["c_attn", "c_proj", "c_fc"]
_BY_HEAD = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
_LFM2 = {"block_auto_adjust_ff_dim": False, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_LFM2_MOE = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
GLM_MOE = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "attention_bias": True},
    "head_dim": 16,
}
_ERNIE_MOE = {
    **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    **{"num_hidden_layers": 4, "moe_layer_end_index": 2},
}
MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
DELTA = {
    **{"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10},
}
# transformers saves the filters of queries, keys and values as three equal parts, so they have equal sizes here.
OLMO_HYBRID = {**DELTA, "linear_key_head_dim": 20}
_DELTA_TARGETS = [*ATTENTION, *GATED, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
KIMI_LINEAR = {
    **{"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
    **{"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]},
    **{"linear_head_dim": 10, "linear_num_heads": 4, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
}
_KIMI_TARGETS = [*ATTENTION, *GATED, *_KV, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 24, "sliding_window": 9, "num_hidden_layers": 5, "num_kv_shared_layers": 2},
    **{"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"]},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131, "use_double_wide_mlp": True},
    "final_logit_softcapping": 3.0,
}
_GEMMA4_EXPERTS = {
    **{"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 3},
    **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0},
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}
GEMMA3N = {
    **{"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 6},
    **{"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"]},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120, "final_logit_softcapping": 3.0},
    **{"intermediate_size": [80, 64, 80, 80, 64], "activation_sparsity_pattern": [0.8, 0.9, 0.0, 0.0, 0.0]},
    **{"altup_num_inputs": 3, "altup_active_idx": 1},
}
_STREAMS = [
    *("altup_projections.0", "altup_unembed_projections.1", "linear_left", "linear_right"),
    *("correction_coefs", "prediction_coefs", "modality_router"),
]
LLAMA4 = {
    **{"head_dim": 16, "intermediate_size_mlp": 64, "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 11},
    **{"floor_scale": 8, "attn_scale": 0.3},
}
PER_LAYER = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
_MAMBA = {
    **{"num_hidden_layers": 3, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10},
    "time_step_limit": (0.3, 2.0),
}
_FALCON_H1 = {
    **{"mamba_d_ssm": 96, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "attention_in_multiplier": 0.9},
    **{"attention_out_multiplier": 1.1, "key_multiplier": 0.7, "embedding_multiplier": 2.0},
    **{"lm_head_multiplier": 0.8, "mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2]},
}
_GRANITE = {
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.6, "attention_multiplier": 0.2},
    **{"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40},
}
_NEMOTRON = {
    **{"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "head_dim": 12, "mamba_num_heads": 6},
    **{"mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 10, "time_step_min": 0.4, "n_routed_experts": 8},
    **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "num_experts_per_tok": 3},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
}
_MIXER = ["in_proj", "out_proj"]
_GRANITE_MLP = ["input_linear", "output_linear"]
VARIANTS: dict[str, Family] = {
    "falcon-h1-norm": Family(
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "granite4-dense": Family(
        "GraniteMoeHybrid", {**_MAMBA, **_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"}
    ),
}
"""More forms of some families, for the parity tests alone."""
UNKNOWN: dict[str, Family] = {"mimo": Family("Qwen2", architecture="MiMoForCausalLM")}
"""Families that transformers does not know."""
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", {"tie_word_embeddings": True}, SCALED),
    "llama4": Family("Llama4Text", LLAMA4, ATTENTION + GATED, ["router.weight", *_SPARSE[1:]]),
    "mistral": Family("Mistral", {"sliding_window": 20}),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"head_dim": 16}),
    "gemma2": Family("Gemma2", {**_LOCAL, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, SCALED),
    "gemma3": Family("Gemma3Text", {**_LOCAL, "num_hidden_layers": 3, "sliding_window_pattern": 3}, SCALED),
    "gemma3n": Family("Gemma3nText", GEMMA3N, [*ATTENTION, *GATED, *PER_LAYER, *_STREAMS]),
    "gemma4": Family("Gemma4Text", GEMMA4, [*ATTENTION, *GATED, *PER_LAYER]),
    "gemma4-experts": Family(
        "Gemma4Text", {**GEMMA4, **_GEMMA4_EXPERTS}, ATTENTION + GATED, ["router.proj.weight", *_SPARSE[1:]]
    ),
    "phi3": Family("Phi3", {"sliding_window": 20}, ["qkv_proj", "o_proj", *MERGED]),
    "phi4-mini": Family(
        "Phi3",
        {
            **{"hidden_size": 64, "rope_parameters": _PHI4_ROPE, "original_max_position_embeddings": 128},
            **{"tie_word_embeddings": True},
        },
        ["qkv_proj", "o_proj", *MERGED],
    ),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "smollm3-window": Family(
        "SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8, "attention_bias": True}
    ),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", {"num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": _OLMO3_ROPE}),
    "olmo-hybrid": Family("OlmoHybrid", OLMO_HYBRID, [*ATTENTION, *GATED, "g_proj", "b_proj", "a_proj"]),
    "exaone4": Family("Exaone4", {"num_hidden_layers": 4, "sliding_window": 9}),
    "ernie4.5": Family("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}, SCALED),
    "seed-oss": Family("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "granite": Family(
        "Granite",
        {
            **{"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.6},
            **{"attention_multiplier": 0.2, "tie_word_embeddings": True},
        },
        SCALED,
    ),
    "glm4": Family("Glm4", {"head_dim": 16}, ATTENTION + MERGED),
    "gpt2": Family("GPT2", _ALL_HEADS, [*_C_ATTN, "wte"]),
    "bigcode": Family("GPTBigCode", {**_ALL_HEADS, "multi_query": False}, _C_ATTN),
    "opt": Family("OPT", {**_ALL_HEADS, "ffn_dim": 80}, [*_QKV, "out_proj", "fc1", "fc2"]),
    "opt-projected": Family(
        "OPT",
        {**_ALL_HEADS, "ffn_dim": 80, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
        [*_QKV, "out_proj", "fc1", "fc2", "project_in", "project_out"],
    ),
    "neox": Family("GPTNeoX", {**_ALL_HEADS, "hidden_size": 64}, _BY_HEAD),
    "falcon": Family("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80}, _BY_HEAD),
    "phi": Family("Phi", _ALL_HEADS, [*_QKV, "dense", "fc1", "fc2"]),
    "stablelm": Family("StableLm", {"hidden_size": 64, "use_qkv_bias": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION, _SPARSE),
    "qwen3-moe": Family("Qwen3Moe", {**_EXPERTS, "head_dim": 12, "mlp_only_layers": [0]}, ATTENTION + GATED, _SPARSE),
    "qwen2-moe": Family("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}, ATTENTION + GATED, _SPARSE),
    "olmoe": Family("Olmoe", {**_EXPERTS, "intermediate_size": 24}, ATTENTION, _SPARSE),
    "deepseek2": Family(
        "DeepseekV2", {**_LATENT, "rope_parameters": _DEEPSEEK_ROPE}, ["q_proj", *_KV, *GATED], _SPARSE
    ),
    "deepseek3": Family("DeepseekV3", {**_LATENT, **_QUERY_RANK}, ["q_a_proj", "q_b_proj", *_KV, *GATED], _SPARSE),
    "glm4-moe": Family("Glm4Moe", {**GLM_MOE, "use_qk_norm": True}, ATTENTION + GATED, _SPARSE),
    "glm4-moe-lite": Family(
        "Glm4MoeLite",
        {**_LATENT, **_QUERY_RANK, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        ["q_a_proj", "q_b_proj", *_KV, *GATED],
        _SPARSE,
    ),
    "minimax-m2": Family(
        "MiniMaxM2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
        ATTENTION,
        _SPARSE,
    ),
    "ernie4.5-moe": Family("Ernie4_5_Moe", _ERNIE_MOE, ATTENTION + GATED, _SPARSE),
    "lfm2-moe": Family("Lfm2Moe", {**_EXPERTS, **_LFM2_MOE}, ["in_proj", "out_proj", *_QKV, "w1", "w2", "w3"], _SPARSE),
    "ministral": Family(
        "Ministral", {"head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "ministral3": Family("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    "cohere2": Family(
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.5},
        [*ATTENTION, *GATED, "embed_tokens"],
    ),
    "deepseek3.2": Family(
        "DeepseekV32",
        {**_LATENT, **_QUERY_RANK, "index_topk": 128, "index_n_heads": 2, "index_head_dim": 16},
        ["q_a_proj", "q_b_proj", *_KV, *GATED],
        _SPARSE,
    ),
    "gpt-oss": Family("GptOss", _GPT_OSS, ATTENTION, ["router.weight", *_SPARSE[1:]]),
    "lfm2": Family("Lfm2", _LFM2, ["in_proj", "out_proj", *_QKV, "w1", "w2", "w3", "embed_tokens"]),
    "qwen3.5": Family("Qwen3_5Text", {**DELTA, "head_dim": 16, "tie_word_embeddings": True}, _DELTA_TARGETS),
    "qwen3-next": Family(
        "Qwen3Next",
        {**DELTA, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        [*ATTENTION, *GATED, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        _SPARSE,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeText",
        {
            **{**DELTA, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 40, "num_experts": 4},
            **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        },
        _DELTA_TARGETS,
        _SPARSE,
    ),
    "kimi-linear": Family("KimiLinear", KIMI_LINEAR, _KIMI_TARGETS, _SPARSE),
    "mamba2": Family(
        "Mamba2",
        {"num_heads": 6, "head_dim": 16, "n_groups": 3, "state_size": 10, "time_step_limit": (0.3, 2.0)},
        ["in_proj", "embeddings"],
    ),
    "bamba": Family("Bamba", {**_MAMBA, "attn_layer_indices": [1]}, [*ATTENTION, *GATED, *_MIXER]),
    "falcon-h1": Family("FalconH1", {**_MAMBA, **_FALCON_H1}, [*ATTENTION, *GATED, "in_proj"]),
    "granite4": Family(
        "GraniteMoeHybrid",
        {**_MAMBA, **_GRANITE, "num_local_experts": 5, "intermediate_size": 24},
        [*ATTENTION, *_GRANITE_MLP, *_MIXER],
        ["router.weight", *_SPARSE[1:]],
    ),
    "nemotron-h": Family(
        "NemotronH",
        _NEMOTRON,
        [*ATTENTION, "up_proj", "down_proj", "in_proj"],
        ["gate.weight", "experts.up_proj", "experts.down_proj"],
    ),
    "starcoder2": Family("Starcoder2", {"sliding_window": 9}, [*ATTENTION, "c_fc", "c_proj"]),
}


def build(family: Family) -> Any:
    """The model in float32, with weights large enough that attention is peaked and that norms and biases count."""
    import torch
    import transformers

    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family.prefix}Config")
    if family.prefix == "Llama4":  # transformers 5.24 reads it from an output that has none
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    if family.is_multimodal:
        model = getattr(transformers, f"{family.prefix}ForConditionalGeneration")(config_class(**family.config)).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **family.config})).eval()
    for name, parameter in model.named_parameters():
        if ("norm" in name or "ln_" in name) and not name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            size = 0.3 if name.endswith("bias") else 1.3 * parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, 0.0, size)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model
