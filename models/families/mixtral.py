"""Mixtral: Mistral with experts in every layer; the softmax over a token's experts alone weighs them."""

from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    attention_bias=False,
    mlp_bias=False,
    experts=ExpertTraits(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        intermediate_size="intermediate_size",
        renormalised=True,
        rounded=False,
    ),
)
