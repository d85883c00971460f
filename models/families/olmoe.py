"""OLMoE: experts in every layer; queries and keys are normalised over all heads together."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    mlp_bias=False,
    qk_norm_wide=True,
    has_window=False,
    experts=ExpertTraits(intermediate_size="intermediate_size"),
)
