"""LFM2: gated short convolutions, with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import number, positive, shown, wrong
from .state_layers import ShortConv, kernel_size, state_layers
from .traits import FamilyTraits, NormNames


def _states(values: Mapping[str, Any]) -> ShortConv:
    count = positive(values, "num_hidden_layers")
    attending = values.get("full_attn_idxs", list(range(count)))
    if not isinstance(attending, list) or not all(type(index) is int for index in attending):
        raise wrong("full_attn_idxs", f"must be a list of layers, got {shown(attending)}")
    return ShortConv(
        layers=state_layers(values, "conv", ["full_attention" if i in attending else "conv" for i in range(count)]),
        kernel=kernel_size(values, "conv_L_cache"),
        channels=positive(values, "hidden_size"),
        bias=bool(values["conv_bias"]),
    )


def _inner_size(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inner size of the MLP: two thirds of the file's, times a factor, rounded up."""
    size = positive(values, "intermediate_size")
    if values["block_auto_adjust_ff_dim"]:
        size = 2 * size // 3
        if values.get("block_ffn_dim_multiplier") is not None:
            size = int(number("block_ffn_dim_multiplier", "", values["block_ffn_dim_multiplier"]) * size)
            multiple = positive(values, "block_multiple_of")
            size = -(-size // multiple) * multiple
    return {"intermediate_size": size}


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
    derived=_inner_size,
    names={
        "model.norm": "model.embedding_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
    norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
    has_window=False,
    states=_states,
)
