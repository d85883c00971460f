"""Gemma 3, text only: Gemma 2 without soft caps, with normalised queries and keys, a window in five of six layers, and
a rotation of their own for these."""

from .gemma2 import NORMS, NUMBERS
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 262208,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    mlp_bias=False,
    qk_norm=True,
    norms=NORMS,
    norm_offset=1.0,
    scaled_embedding=True,
    numbers=NUMBERS,
    window_pattern=True,
    local_rope=True,
)
