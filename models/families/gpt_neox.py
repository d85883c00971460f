"""GPT-NeoX and Pythia: attention and MLP side by side, a rotated quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .block import Block
from .traits import FamilyTraits


def _block(values: Mapping[str, Any]) -> Block:
    return Block(
        layers="gpt_neox.layers",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        parallel=bool(values.get("use_parallel_residual", True)),
        by_head=True,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    keys={"rms_norm_eps": "layer_norm_eps", "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    mlp_bias=True,
    has_window=False,
    partial_rotary=True,
    block=_block,
)
