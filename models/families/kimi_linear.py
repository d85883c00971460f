"""Kimi Linear: Kimi Delta Attention, with latent attention without rotation in each fourth layer, and experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_values import positive, shown, wrong
from .deepseek_v3 import EXPERTS
from .state_layers import DeltaNames, DeltaNet, kernel_size, state_layers
from .traits import FamilyTraits

_NAMES = DeltaNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    gates=("g_a_proj", "b_proj", "f_a_proj"),
    wide_gates=("g_b_proj", "f_b_proj"),
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    out="o_proj",
    module="self_attn",
)
_STATES = "linear_attn_config"
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""transformers' keys, and those of an older file's `linear_attn_config`."""


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that follow from others; no layer rotates."""
    if (scores := values.get("moe_router_activation_func", "sigmoid")) != "sigmoid":
        raise wrong("moe_router_activation_func", f"{shown(scores)} is not supported; supported is sigmoid")
    num_layers, given = positive(values, "num_hidden_layers"), values.get(_STATES, {})
    if not isinstance(given, dict):
        raise wrong(_STATES, f"must be an object, got {shown(given)}")
    found: dict[str, Any] = {ours: given[theirs] for ours, theirs in _SIZES.items() if theirs in given}
    if "layer_types" not in values and "kda_layers" in given:
        found["layer_types"] = _layer_types(given, num_layers)
    if not values.get("use_grouped_topk", True):
        found |= {"n_group": 1, "topk_group": 1}
    return found | {"no_rope_layers": [0] * num_layers}


def _layer_types(given: Mapping[str, Any], num_layers: int) -> list[str]:
    """Types of the layers by the lists of an older file, which count from 1."""
    deltas, others = given["kda_layers"], given.get("full_attn_layers", [])
    is_list = isinstance(deltas, list) and isinstance(others, list)
    if not is_list or sorted(map(str, (*deltas, *others))) != sorted(map(str, range(1, num_layers + 1))):
        raise wrong(_STATES, f"must have each of {num_layers} layers in kda_layers or in full_attn_layers")
    return ["linear_attention" if index + 1 in deltas else "full_attention" for index in range(num_layers)]


def _states(values: Mapping[str, Any]) -> DeltaNet:
    fallback = [
        "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(values["num_hidden_layers"])
    ]
    heads, size = positive(values, "linear_num_heads"), positive(values, "linear_head_dim")
    return DeltaNet(
        layers=state_layers(values, "linear_attention", fallback),
        kernel=kernel_size(values, "linear_conv_kernel_dim"),
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        merged=False,
        names=_NAMES,
        by_element=True,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
    },
    keys={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    derived=_derived,
    # transformers writes the dense layers' projections under the experts' name.
    aliases={f"block_sparse_moe.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    has_window=False,
    no_rope=True,
    mlp_bias=False,
    latent=True,
    constants={"mla_use_nope": 1, "moe_layer_freq": 1},
    states=_states,
    experts=replace(EXPERTS, block="block_sparse_moe", projections=("w1", "w3", "w2")),
)
