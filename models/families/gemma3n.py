"""Gemma 3n, text only: Gemma 3 with several residual streams, an input of its own for each layer, a product of low rank
alongside attention, cut gates in some MLPs, and last layers that read the keys of earlier ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config_values import number, positive, shown, wrong
from .gemma2 import NORMS
from .traits import FamilyTraits
from .varied_layers import Streams, VariedLayers, input_sizes, kv_sources

_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Layers whose gates are cut if there are more of them, and the part that is cut, unless the file lists it."""


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inner sizes of the layers, of which the largest stands for all. Scores have no factor."""
    num_layers, sizes = positive(values, "num_hidden_layers"), values["intermediate_size"]
    if not isinstance(sizes, list):
        sizes = [positive(values, "intermediate_size")] * num_layers
    if len(sizes) != num_layers:
        raise wrong("intermediate_size", f"has {len(sizes)} entries for {num_layers} layers")
    checked = [positive({"intermediate_size": size}, "intermediate_size") for size in sizes]
    return {"intermediate_size": max(checked), "inner_sizes": checked, "query_pre_attn_scalar": 1}


def _sparsities(values: Mapping[str, Any], num_layers: int) -> tuple[float, ...]:
    given = values.get("activation_sparsity_pattern")
    if given is None:
        cut = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * cut + (0.0,) * (num_layers - cut)
    given = given if isinstance(given, list) else [given] * num_layers
    if len(given) != num_layers:
        raise wrong("activation_sparsity_pattern", f"has {len(given)} entries for {num_layers} layers")
    found = tuple(number("activation_sparsity_pattern", "", part) if part else 0.0 for part in given)
    if max(found) >= 1.0:
        raise wrong("activation_sparsity_pattern", f"must be below 1, got {shown(max(found))}")
    return found


def _varied(values: Mapping[str, Any], types: Sequence[str]) -> VariedLayers:
    num_layers, number_of_streams = len(types), positive(values, "altup_num_inputs")
    active = values.get("altup_active_idx", 0)
    if type(active) is not int or not 0 <= active < number_of_streams:
        raise wrong("altup_active_idx", f"must be 0 to {number_of_streams - 1}, got {shown(active)}")
    inputs = input_sizes(values)
    if not inputs.size:
        raise wrong("hidden_size_per_layer_input", "must be a positive integer")
    return VariedLayers(
        kv_heads=(positive(values, "num_key_value_heads"),) * num_layers,
        head_dims=(positive(values, "head_dim"),) * num_layers,
        inner_sizes=tuple(values["inner_sizes"]),
        kv_sources=kv_sources(values, types),
        input_size=inputs.size,
        input_vocab_size=inputs.vocab_size,
        streams=Streams(
            number_of_streams,
            active,
            scaled=bool(values.get("altup_correct_scale", True)),
            side_rank=positive(values, "laurel_rank"),
        ),
        sparsities=_sparsities(values, num_layers),
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
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
