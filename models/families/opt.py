"""OPT: learned positions from row 2 of their table on, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import positive, wrong
from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    if not values.get("layer_norm_elementwise_affine", True):
        raise wrong("layer_norm_elementwise_affine", "false is not supported")
    norm_first = bool(values.get("do_layer_norm_before", True))
    has_final_norm = norm_first and not values.get("_remove_final_layer_norm", False)
    return Block(
        layers="model.decoder.layers",
        out="self_attn.out_proj",
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        embedding="model.decoder.embed_tokens",
        embedding_size=positive(values, "word_embed_proj_dim", positive(values, "hidden_size")),
        projections="model.decoder.",
        final_norm="model.decoder.final_layer_norm" if has_final_norm else None,
        positions="model.decoder.embed_positions",
        position_offset=2,
        norm_first=norm_first,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    keys={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "attention_bias": "enable_bias",
        "mlp_bias": "enable_bias",
    },
    has_window=False,
    block=_block,
)
