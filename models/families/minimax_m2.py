"""MiniMax-M2: norms of queries and keys over all heads together, and experts in every layer, chosen by sigmoids."""

from collections.abc import Mapping
from typing import Any

from ..config_values import positive
from .traits import ExpertTraits, FamilyTraits


def _rotated_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Part of a head that is rotated, of which files state the size."""
    if "rotary_dim" not in values:
        return {}
    return {"partial_rotary_factor": positive(values, "rotary_dim") / positive(values, "head_dim")}


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    derived=_rotated_part,
    attention_bias=False,
    mlp_bias=False,
    qk_norm_wide=True,
    has_window=False,
    partial_rotary=True,
    constants={"use_qk_norm": 1, "use_routing_bias": 1},
    experts=ExpertTraits(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        intermediate_size="intermediate_size",
        renormalised=True,
        sigmoid=True,
        correction="e_score_correction_bias",
    ),
)
