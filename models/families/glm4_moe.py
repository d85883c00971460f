"""GLM-4.5, 4.6 and 4.7: half of each head is rotated, and from some layer on experts as DeepSeek-V3's."""

from .deepseek_v3 import EXPERTS
from .prediction import APPENDED_LAYER
from .traits import FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    keys={"num_experts": "n_routed_experts"},
    o_bias=None,
    mlp_bias=False,
    qk_norm="use_qk_norm",
    has_window=False,
    partial_rotary=True,
    experts=EXPERTS,
    prediction=APPENDED_LAYER,
)
