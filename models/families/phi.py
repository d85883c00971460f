"""Phi-1, 1.5 and 2: attention and MLP read one norm, a rotated half of each head, a head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import wrong
from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    if values.get("qk_layernorm"):
        raise wrong("qk_layernorm", "true is not supported")
    return Block(
        out="self_attn.dense",
        mlp=("mlp.fc1", "mlp.fc2"),
        norms=("input_layernorm",),
        final_norm="model.final_layernorm",
        head_bias=True,
        parallel=True,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 51200,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    keys={"rms_norm_eps": "layer_norm_eps"},
    mlp_bias=True,
    has_window=False,
    partial_rotary=True,
    block=_block,
)
