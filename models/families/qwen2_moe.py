"""Qwen2-MoE: Qwen2 with experts, and a shared expert with a gate of its own for each token."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151936,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    attention_bias=True,
    mlp_bias=False,
    window_switch=True,
    experts=ExpertTraits(shared=True),
)
