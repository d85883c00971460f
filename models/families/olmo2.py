"""OLMo 2: norms after attention and MLP instead of before them, and of queries and keys over all heads together."""

from .traits import FamilyTraits, NormNames

NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

TRAITS = FamilyTraits(
    defaults={"vocab_size": 50304, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    mlp_bias=False,
    qk_norm_wide=True,
    norms=NORMS,
    has_window=False,
)
