"""GLM-4 (0414): neighbours in half of each head are rotated, norms before and after attention and MLP, and a merged
MLP."""

from .traits import FamilyTraits, NormNames

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151552,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    o_bias=None,
    mlp_bias=False,
    norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    merged_gate_up=True,
    has_window=False,
    partial_rotary=True,
    interleaved_rope=True,
)
