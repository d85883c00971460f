"""LFM2-MoE: LFM2 with experts, chosen by sigmoids, in all but its first layers."""

from dataclasses import replace

from . import lfm2
from .traits import ExpertTraits

_KEYS = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}

TRAITS = replace(
    lfm2.TRAITS,
    defaults={
        **lfm2.TRAITS.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "block_auto_adjust_ff_dim": False,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    keys={**_KEYS, "first_k_dense_replace": "num_dense_layers"},
    experts=ExpertTraits(
        block="feed_forward",
        projections=("w1", "w3", "w2"),
        grouped=True,
        sigmoid=True,
        correction="expert_bias",
        correction_switch="use_expert_bias",
    ),
)
