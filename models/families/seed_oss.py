"""Seed-OSS: Llama with biases on q, k and v, and a key of its own for that of o."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 155136,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    o_bias="attention_out_bias",
    has_window=False,
)
