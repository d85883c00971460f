"""Falcon with rotary positions: attention and MLP side by side, few KV heads, all projections of a KV head together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import positive, wrong
from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    if values.get("alibi"):
        raise wrong("alibi", "true is not supported")
    is_new, parallel = bool(values.get("new_decoder_architecture")), bool(values.get("parallel_attn", True))
    num_heads = positive(values, "num_attention_heads")
    num_kv_heads = positive(values, "num_kv_heads", num_heads) if is_new else num_heads
    if not is_new and values.get("multi_query", True):
        num_kv_heads = 1
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if is_new and values.get("num_ln_in_parallel_attn", 2) == 2:
        norms = ("ln_attn", "ln_mlp")
    elif is_new or parallel:
        norms = norms[:1]
    return Block(
        layers="transformer.h",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=norms,
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        parallel=is_new or parallel,
        by_head=True,
        num_kv_heads=num_kv_heads,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    keys={
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_bias": "bias",
        "mlp_bias": "bias",
    },
    has_window=False,
    block=_block,
)
