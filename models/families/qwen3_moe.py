"""Qwen3-MoE: Qwen3 with experts; a window, when switched on, is in every layer."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151936,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    mlp_bias=False,
    qk_norm=True,
    window_switch=True,
    window_everywhere=True,
    experts=ExpertTraits(),
)
