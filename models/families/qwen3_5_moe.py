"""Qwen3.5 with experts, text."""

from dataclasses import replace

from . import qwen3_5
from .traits import ExpertTraits

TRAITS = replace(
    qwen3_5.TRAITS,
    defaults={
        **qwen3_5.DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    experts=ExpertTraits(shared=True, renormalised=True),
)
