"""Nemotron-H: each layer is one Mamba-2 mixer, attention without rotation, MLP, or experts; MLPs have no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_values import number, positive, shown, wrong
from .mamba2 import KEYS, SINGLE_NORM, mamba2
from .prediction import PredictionHead
from .state_layers import Mamba2
from .traits import ExpertTraits, FamilyTraits

_KINDS = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "experts", "moe": "experts"},
}
"""Kind of a layer by its letter in `hybrid_override_pattern`, and by its names in `layers_block_type`."""
_KEYS = KEYS | {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_dim": "ssm_state_size",
    "activation": "mamba_hidden_act",
}


def _mixers(values: Mapping[str, Any]) -> tuple[str, ...]:
    field = "layers_block_type" if "layers_block_type" in values else "hybrid_override_pattern"
    kinds = values.get(field)
    if not isinstance(kinds, str if field == "hybrid_override_pattern" else list) or not 0 < len(kinds) <= 1 << 12:
        raise wrong(field, f"must have the kind of each layer, got {shown(kinds)}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise wrong(field, f"{shown(kind)} is not supported; known are {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def _states(values: Mapping[str, Any]) -> Mamba2 | None:
    layers = frozenset(index for index, kind in enumerate(_mixers(values)) if kind == "mamba")
    # transformers clamps by this number, whatever `time_step_limit` says, while it computes a prompt.
    least = number("time_step_min", "", values["time_step_min"])
    return mamba2(values, layers, _KEYS, time_step_limit=(least, float("inf")))


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _mixers(values)
    if "moe_latent_size" in values and "experts" in kinds:
        raise wrong("moe_latent_size", f"({shown(values['moe_latent_size'])}) is not supported")
    return {
        "num_hidden_layers": len(kinds),
        "no_rope_layers": [0] * len(kinds),
        "head_dim": values.get("attention_head_dim", values["head_dim"]),
        "hidden_act": values["mlp_hidden_act"],
        "attention_bias": False,
        "mlp_only_layers": [index for index, kind in enumerate(kinds) if kind != "experts"],
        "num_local_experts": positive(values, "n_routed_experts") if "experts" in kinds else 0,
    }


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    keys={"rms_norm_eps": "layer_norm_epsilon"},
    derived=_derived,
    names={
        "model.norm": "model.norm_f",
        "model.embed_tokens": "model.embeddings",
        "mamba": "mixer",
        "mlp": "mixer",
        **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    },
    norms=SINGLE_NORM,
    attention_bias=False,
    plain_mlp=True,
    no_rope=True,
    has_window=False,
    mixers=_mixers,
    states=_states,
    prediction=PredictionHead(
        layer="mtp.layers.0",
        second_layer="mtp.layers.1",
        mixers=("attention", "experts"),
        token_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        norm="mtp.layers.1.final_layernorm",
        norm_output=True,
    ),
    experts=ExpertTraits(
        block="mixer",
        projections=("up_proj", "down_proj"),
        gated=False,
        rounded=False,
        grouped=True,
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        float_router=True,
        shared_size="moe_shared_expert_intermediate_size",
        shared_module="mixer.shared_experts",
        shared_projections=("up_proj", "down_proj"),
    ),
)
