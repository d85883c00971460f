"""Command R7B and Command A (Cohere 2): LayerNorm without bias before attention and MLP, which are added at once; a
window and a rotation of neighbours in three of four layers, and none in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import wrong
from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    if "sliding_window" not in values:
        raise wrong("sliding_window", "null is not supported: layers without a window have no rotation")
    return Block(norms=("input_layernorm",), norm_bias=False, parallel=True)


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    keys={"rms_norm_eps": "layer_norm_eps"},
    mlp_bias=False,
    numbers={"logit_scale": ("logit_scale", 1.0)},
    window_pattern=True,
    window_rope=True,
    interleaved_rope=True,
    constants={"use_qk_norm": 0},
    block=_block,
)
