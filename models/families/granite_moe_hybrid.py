"""Granite 4: Granite's factors, Mamba-2 mixers with attention in some layers, an MLP in each layer, and maybe experts
alongside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import positive
from . import granite
from .mamba2 import BAMBA_DEFAULTS, BAMBA_KEYS, bamba_sizes, mamba2, unrotated
from .state_layers import Mamba2, state_layers
from .traits import ExpertTraits, FamilyTraits


def _states(values: Mapping[str, Any]) -> Mamba2 | None:
    fallback = ["linear_attention"] * positive(values, "num_hidden_layers")
    return mamba2(values, state_layers(values, "linear_attention", fallback, hybrid=False), BAMBA_KEYS)


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    found = bamba_sizes(values)
    if values.get("position_embedding_type") != "rope":
        found |= unrotated(values)
    else:
        found |= {"no_rope_layers": [1] * positive(values, "num_hidden_layers")}
    if not values["num_local_experts"]:
        found |= {"intermediate_size": values["shared_intermediate_size"]}
    return found


TRAITS = FamilyTraits(
    defaults={
        **BAMBA_DEFAULTS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "attention_multiplier": 1.0,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    derived=_derived,
    names={"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
    numbers=granite.TRAITS.numbers,
    mlp_bias=False,
    merged_gate_up=True,
    no_rope=True,
    has_window=False,
    states=_states,
    experts=ExpertTraits(
        block="block_sparse_moe",
        router="router",
        intermediate_size="intermediate_size",
        renormalised=True,
        shared_size="shared_intermediate_size",
        shared_module="shared_mlp",
        shared_projections=("input_linear", "output_linear"),
        merged_names={
            "router.layer.weight": "router.weight",
            "input_linear.weight": "experts.gate_up_proj",
            "output_linear.weight": "experts.down_proj",
        },
    ),
)
