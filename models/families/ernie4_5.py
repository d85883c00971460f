"""ERNIE 4.5: Llama with neighbours rotated as pairs."""

from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 103424,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    has_window=False,
    interleaved_rope=True,
)
