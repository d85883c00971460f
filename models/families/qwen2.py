"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; a window only when switched on, and then in the upper layers."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    attention_bias=True,
    mlp_bias=False,
    window_switch=True,
)
