"""StableLM: Llama with LayerNorm and a rotated quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import wrong
from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    if values.get("qk_layernorm"):
        raise wrong("qk_layernorm", "true is not supported")
    parallel = bool(values.get("use_parallel_residual"))
    return Block(norms=("input_layernorm",), parallel=True) if parallel else Block()


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50304,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    },
    keys={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    o_bias=None,
    mlp_bias=False,
    has_window=False,
    partial_rotary=True,
    block=_block,
)
