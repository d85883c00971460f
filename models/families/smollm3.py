"""SmolLM3: Llama in which every fourth layer has no rotation, and maybe a window."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 128256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    window_switch=True,
    no_rope=True,
)
