"""OLMo Hybrid: OLMo 2's layers, and gated delta nets after norms in three of four, mostly without a rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_values import positive
from .olmo2 import NORMS
from .state_layers import DeltaNames, DeltaNet, delta_net
from .traits import PRE_NORMS, FamilyTraits

_NAMES = DeltaNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    gates=("g_proj", "b_proj", "a_proj"),
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    out="o_proj",
)


def _states(values: Mapping[str, Any]) -> DeltaNet:
    scale = 2.0 if values["linear_allow_neg_eigval"] else 1.0
    return replace(delta_net(values, merged=False), names=_NAMES, beta_scale=scale, norm_eps=1e-5)


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that follow from others. No layer rotates if `rope_theta` is null."""
    num_layers, num_heads = positive(values, "num_hidden_layers"), positive(values, "num_attention_heads")
    key_heads = positive(values, "linear_num_key_heads", num_heads)
    key_dim = positive(values, "linear_key_head_dim", int(0.75 * positive(values, "hidden_size") / key_heads))
    rope, theta = values.get("rope_parameters", {}), values.get("rope_theta")
    rotates = not isinstance(rope, dict) or rope.get("rope_theta", theta) is not None
    found = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": positive(values, "linear_num_value_heads", num_heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": positive(values, "linear_value_head_dim", 2 * key_dim),
        "full_attention_interval": min(4, num_layers),
        "no_rope_layers": [int(rotates)] * num_layers,
    }
    return found if rotates else found | {"rope_parameters": {}}


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    derived=_derived,
    mlp_bias=False,
    qk_norm_wide=True,
    norms=NORMS,
    state_norms=PRE_NORMS,
    aliases={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    has_window=False,
    no_rope=True,
    states=_states,
)
