"""Qwen3: queries and keys of each head are normalised; the size of a head is independent of the hidden size."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    mlp_bias=False,
    qk_norm=True,
    window_switch=True,
)
