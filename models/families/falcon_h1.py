"""Falcon-H1: attention and a Mamba-2 mixer read the same norm in each layer, with many factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import number, positive, shown, wrong
from .mamba2 import BAMBA_DEFAULTS, BAMBA_KEYS, bamba_sizes, mamba2
from .state_layers import Mamba2
from .traits import FamilyTraits, NormNames


def _numbers(values: Mapping[str, Any], field: str, count: int) -> tuple[float, ...]:
    given = values.get(field, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise wrong(field, f"must be a list of {count} numbers, got {shown(given)}")
    return tuple(number(field, "", value) for value in given)


def _factor(values: Mapping[str, Any], field: str) -> float:
    return number(field, "", values.get(field, 1.0))


def _states(values: Mapping[str, Any]) -> Mamba2 | None:
    norm = "none"
    if values["mamba_rms_norm"]:
        norm = "before_gate" if values["mamba_norm_before_gate"] else "after_gate"
    return mamba2(
        values,
        frozenset(range(positive(values, "num_hidden_layers"))),
        {**BAMBA_KEYS, "out_bias": "projectors_bias"},
        norm=norm,
        factors=(_factor(values, "ssm_in_multiplier"), _factor(values, "ssm_out_multiplier")),
        part_factors=_numbers(values, "ssm_multipliers", 5),
        attention_factors=(_factor(values, "attention_in_multiplier"), _factor(values, "attention_out_multiplier")),
    )


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    size = positive(values, "head_dim", positive(values, "hidden_size") // positive(values, "num_attention_heads"))
    gate, down = _numbers(values, "mlp_multipliers", 2)
    return {
        **bamba_sizes(values, positive(values, "mamba_d_ssm") if "mamba_d_ssm" in values else None),
        "attention_multiplier": size**-0.5 * _factor(values, "key_multiplier"),
        "mlp_gate_multiplier": gate,
        "mlp_down_multiplier": down,
    }


TRAITS = FamilyTraits(
    defaults={
        **BAMBA_DEFAULTS,
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
    },
    derived=_derived,
    names={"model.norm": "model.final_layernorm", "mlp": "feed_forward"},
    norms=NormNames(before_mlp="pre_ff_layernorm"),
    numbers={
        "embedding_scale": ("embedding_multiplier", 1.0),
        "logit_scale": ("lm_head_multiplier", 1.0),
        "attention_scale": ("attention_multiplier", 1.0),
        "gate_scale": ("mlp_gate_multiplier", 1.0),
        "mlp_scale": ("mlp_down_multiplier", 1.0),
    },
    has_window=False,
    states=_states,
)
