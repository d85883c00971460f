"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotation is never scaled."""

from .olmo2 import NORMS
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    mlp_bias=False,
    qk_norm_wide=True,
    norms=NORMS,
    window_pattern=True,
    local_rope=True,
)
