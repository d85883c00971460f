"""DeepSeek-V3: DeepSeek-V2 with sigmoids as the scores of experts, and a bias for their choice."""

from dataclasses import replace

from . import deepseek_v2
from .prediction import APPENDED_LAYER
from .traits import ExpertTraits

TRAITS = replace(
    deepseek_v2.TRAITS,
    defaults={
        **deepseek_v2.TRAITS.defaults,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    constants={"moe_layer_freq": 1, "rope_interleave": 1},
    experts=ExpertTraits(rounded=False, ungated=True, grouped=True, sigmoid=True, float_router=True),
    prediction=APPENDED_LAYER,
)
