"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and a list of the layers with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_values import shown, wrong
from . import deepseek_v3
from .traits import FamilyTraits


def _dense_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without experts: those of the list, or the first ones."""
    types = values.get("mlp_layer_types")
    if types is None:
        return {}
    if not isinstance(types, list) or not set(map(str, types)) <= {"dense", "sparse"}:
        raise wrong("mlp_layer_types", f'must be a list of "dense" and "sparse", got {shown(types)}')
    if len(types) != values.get("num_hidden_layers"):
        raise wrong("mlp_layer_types", f"has {len(types)} entries for {shown(values.get('num_hidden_layers'))} layers")
    dense = [index for index, kind in enumerate(types) if kind == "dense"]
    return {"first_k_dense_replace": 0, "mlp_only_layers": dense}


TRAITS: FamilyTraits = replace(
    deepseek_v3.TRAITS,
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "num_experts": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    derived=_dense_layers,
)
