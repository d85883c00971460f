"""Gemma 4, text only: Gemma 3 without offsets of norms, with wider heads in layers that see everything, values that are
normalised, and an input of its own for each layer. The last layers may read the keys of earlier ones, and experts may
stand alongside each MLP."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config_values import positive, wrong
from .gemma2 import NORMS
from .traits import FamilyTraits
from .varied_layers import SideExperts, VariedLayers, input_sizes, kv_sources

_LAYER_KEYS = {"head_dim", "num_key_value_heads"}
"""Keys that `per_layer_config` may have."""
_PERIOD = 6
"""One of this number of layers sees everything, unless the file lists the layers."""


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """The last layer sees everything, whatever the file says. Scores have no factor."""
    num_layers = positive(values, "num_hidden_layers")
    types = values.get("layer_types") or [
        "sliding_attention" if (index + 1) % _PERIOD else "full_attention" for index in range(num_layers)
    ]
    if isinstance(types, list) and len(types) == num_layers:
        types = [*types[:-1], "full_attention"]
    found: dict[str, Any] = {"layer_types": types, "query_pre_attn_scalar": 1}
    if values.get("use_bidirectional_attention") == "vision":  # among the tokens of an image
        found["use_bidirectional_attention"] = False
    return found


def _varied(values: Mapping[str, Any], types: Sequence[str]) -> VariedLayers:
    num_heads, inner = positive(values, "num_attention_heads"), positive(values, "intermediate_size")
    layers = [{**values, **changes} for changes in _changes(values, types)]
    kv_heads = tuple(positive(layer, "num_key_value_heads") for layer in layers)
    head_dims = tuple(positive(layer, "head_dim") for layer in layers)
    for count, size in zip(kv_heads, head_dims, strict=True):
        if num_heads % count or size % 2:
            raise wrong("per_layer_config", f"has {count} KV heads of {size} elements for {num_heads} heads")
    sources = kv_sources(values, types)
    widens = bool(values.get("use_double_wide_mlp", False))
    experts = None
    if values.get("enable_moe_block", False):
        keys = "num_experts", "top_k_experts", "moe_intermediate_size"
        experts = SideExperts._make(positive(values, key) for key in keys)
        if experts.top_k > experts.num_experts:
            raise wrong("top_k_experts", f"{experts.top_k} exceeds num_experts {experts.num_experts}")
    merged = values.get("attention_k_eq_v", False)
    inputs = input_sizes(values)
    return VariedLayers(
        kv_heads=kv_heads,
        head_dims=head_dims,
        inner_sizes=tuple(2 * inner if widens and source != index else inner for index, source in enumerate(sources)),
        kv_sources=sources,
        keys_as_values=frozenset(i for i, kind in enumerate(types) if merged and kind == "full_attention"),
        input_size=inputs.size,
        input_vocab_size=inputs.vocab_size,
        scaled=True,
        experts=experts,
    )


def _changes(values: Mapping[str, Any], types: Sequence[str]) -> list[dict[str, Any]]:
    """Keys of each layer that differ from the others' (`per_layer_config`), or those of layers that see everything."""
    listed = values.get("per_layer_config")
    if listed is None:
        full = {"head_dim": positive(values, "global_head_dim", 512)}
        if values.get("attention_k_eq_v", False) and "num_global_key_value_heads" in values:
            full["num_key_value_heads"] = positive(values, "num_global_key_value_heads")
        return [full if kind == "full_attention" else {} for kind in types]
    names = {*types, *map(str, range(len(types)))}
    if (
        not isinstance(listed, dict)
        or not listed.keys() <= names
        or not all(isinstance(changes, dict) and changes.keys() <= _LAYER_KEYS for changes in listed.values())
    ):
        raise wrong("per_layer_config", f"must be an object of layers that have {' and '.join(sorted(_LAYER_KEYS))}")
    return [{**listed.get(kind, {}), **listed.get(str(index), {})} for index, kind in enumerate(types)]


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    derived=_derived,
    varied=_varied,
    mlp_bias=False,
    qk_norm=True,
    norms=NORMS,
    scaled_embedding=True,
    numbers={"attention_scale": ("query_pre_attn_scalar", -0.5), "logit_cap": ("final_logit_softcapping", 1.0)},
    window_pattern=True,
    local_rope=True,
)
