"""Phi-3 and Phi-4: Llama with merged projections; LongRoPE, in Phi-4-mini on a part of each head."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    attention_bias=False,
    mlp_bias=False,
    merged_qkv=True,
    merged_gate_up=True,
    partial_rotary=True,
)
