"""GPT-2 and models saved in its shape: learned positions, q, k and v in one transposed matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import wrong
from .block import Block
from .traits import FamilyTraits

_BLOCK = Block(
    layers="transformer.h",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp=("mlp.c_fc", "mlp.c_proj"),
    norms=("ln_1", "ln_2"),
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    positions="transformer.wpe",
    transposed=True,
)


def block(values: Mapping[str, Any]) -> Block:
    """Form of the layers, once the values are checked."""
    for field, served in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if bool(values.get(field, served)) != served:
            raise wrong(field, f"other than {served} is not supported")
    return _BLOCK


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    has_window=False,
    block=block,
)
