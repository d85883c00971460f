"""EXAONE 4: OLMo 2 with norms of queries and keys of each head; in the larger model most layers have a window, and the
others no rotation."""

from .olmo2 import NORMS
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 102400,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
    norms=NORMS,
    window_pattern=True,
    window_rope=True,
)
