"""Llama 4, text only: layers that rotate neighbours and see their chunk of positions alone, others that see everything
without a rotation, and experts in some or all layers, whose inputs are scaled by the router."""

from collections.abc import Mapping
from typing import Any

from ..config_values import number, positive, shown, wrong
from .chunked_layers import ChunkedLayers
from .traits import ExpertTraits, FamilyTraits


def _rotated(values: Mapping[str, Any]) -> list[bool]:
    """True for each layer that rotates. An empty list counts as absent."""
    num_layers = positive(values, "num_hidden_layers")
    given = values.get("no_rope_layers")  # which lists the layers that have it
    if not given:
        interval = positive(values, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise wrong("no_rope_layers", f"must be a list of {num_layers} numbers, got {shown(given)}")
    return [bool(kept) for kept in given]


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    rotated, num_layers = _rotated(values), positive(values, "num_hidden_layers")
    other = "chunked_attention" if "attention_chunk_size" in values else "full_attention"
    found: dict[str, Any] = {"no_rope_layers": rotated}
    found["layer_types"] = values.get("layer_types") or [other if turns else "full_attention" for turns in rotated]
    if (sparse := values.get("moe_layers")) is not None:
        if not isinstance(sparse, list) or not all(type(index) is int for index in sparse):
            raise wrong("moe_layers", f"must be a list of layers, got {shown(sparse)}")
        found["mlp_only_layers"] = [index for index in range(num_layers) if index not in sparse]
        found["decoder_sparse_step"] = 1
    return found


def _chunked(values: Mapping[str, Any]) -> ChunkedLayers:
    temperature, tunes = None, values.get("attn_temperature_tuning", True)
    if not isinstance(tunes, int):  # published files have 4
        raise wrong("attn_temperature_tuning", f"must be true or false, got {shown(tunes)}")
    if tunes:
        temperature = (number("attn_scale", "", values["attn_scale"]), number("floor_scale", "", values["floor_scale"]))
    return ChunkedLayers(
        rotated=frozenset(index for index, turns in enumerate(_rotated(values)) if turns),
        normalised=bool(values.get("use_qk_norm", True)),
        temperature=temperature,
    )


TRAITS = FamilyTraits(
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 16384,
        "moe_intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "decoder_sparse_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "n_shared_experts": 1,
    },
    keys={
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "decoder_sparse_step": "interleave_moe_layer_step",
    },
    derived=_derived,
    chunked=_chunked,
    names={"mlp": "feed_forward"},
    mlp_bias=False,
    window_pattern=True,
    no_rope=True,
    interleaved_rope=True,
    experts=ExpertTraits(
        block="feed_forward",
        merged_block="feed_forward",
        router="router",
        ungated=True,
        ungated_name="shared_expert",
        scaled_inputs=True,
        transposed=True,
    ),
)
