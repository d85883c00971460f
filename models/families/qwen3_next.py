"""Qwen3-Next: Qwen3.5's layers with experts; each layer's projections are grouped by key head."""

from functools import partial

from .qwen3_5 import DEFAULTS, PREDICTION
from .state_layers import delta_net
from .traits import ExpertTraits, FamilyTraits

TRAITS = FamilyTraits(
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    mlp_bias=False,
    qk_norm=True,
    norm_offset=1.0,
    partial_rotary=True,
    has_window=False,
    gated_attention=True,
    states=partial(delta_net, merged=True),
    prediction=PREDICTION,
    experts=ExpertTraits(shared=True),
)
