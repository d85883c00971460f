"""ERNIE 4.5 with experts: a bias is added to their scores for the choice, and some are shared by all tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_values import MOST, positive, shown, wrong
from . import ernie4_5
from .traits import ExpertTraits


def _dense_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without experts: those before the first and after the last one that may have some."""
    count, bounds = (
        positive(values, "num_hidden_layers"),
        (values["moe_layer_start_index"], values["moe_layer_end_index"]),
    )
    for field, bound in zip(("moe_layer_start_index", "moe_layer_end_index"), bounds, strict=True):
        if type(bound) is not int or not -1 <= bound <= MOST["num_hidden_layers"]:
            raise wrong(field, f"must be the index of a layer, got {shown(bound)}")
    first, last = bounds
    sparse = range(first, count if last == -1 else last + 1)
    return {"mlp_only_layers": [index for index in range(count) if index not in sparse]}


TRAITS = replace(
    ernie4_5.TRAITS,
    defaults={
        **ernie4_5.TRAITS.defaults,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "decoder_sparse_step": 1,
    },
    keys={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "decoder_sparse_step": "moe_layer_interval",
    },
    derived=_dense_layers,
    attention_bias=False,
    mlp_bias=False,
    constants={"use_bias": 0},
    experts=ExpertTraits(
        renormalised=True,
        rounded=False,
        ungated=True,
        correction="moe_statics.e_score_correction_bias",
        correction_row=True,
        float_router=True,
    ),
)
