"""Bamba: Mamba-2 mixers, with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import positive, shown, wrong
from .mamba2 import BAMBA_DEFAULTS, BAMBA_KEYS, bamba_sizes, mamba2
from .state_layers import Mamba2
from .traits import FamilyTraits, NormNames


def _states(values: Mapping[str, Any]) -> Mamba2 | None:
    attending = values.get("attn_layer_indices", [])
    if not isinstance(attending, list) or not all(type(index) is int for index in attending):
        raise wrong("attn_layer_indices", f"must be a list of layers, got {shown(attending)}")
    return mamba2(values, frozenset(range(positive(values, "num_hidden_layers"))) - {*attending}, BAMBA_KEYS)


TRAITS = FamilyTraits(
    defaults={
        **BAMBA_DEFAULTS,
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
    derived=lambda values: {**bamba_sizes(values), "partial_rotary_factor": 0.5},
    names={"model.norm": "model.final_layernorm", "mlp": "feed_forward"},
    norms=NormNames(before_mlp="pre_ff_layernorm"),
    partial_rotary=True,
    has_window=False,
    states=_states,
)
