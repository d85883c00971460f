"""Facts about Gemma 3n, Gemma 4 and Llama 4 that GGUF files have in no other way. See `gguf_families.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .gguf_states import Facts, Values, has_tensor

_MAVERICK = 128
"""Experts of the Llama 4 that does not normalise queries and keys."""
_ROPE_DIVISORS = "rope_freqs.weight"


def _layer_inputs(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Inputs of each layer's own, and layers that read the keys of others."""
    found: Facts = {
        "num_kv_shared_layers": values.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": values.get("embedding_length_per_layer_input", 0),
    }
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = int(table.shape[-1])
    return found


def gemma3n(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """The converter writes the bound of a cut gate in standard deviations, not its share."""
    scales = values.get("activation_sparsity_scale", [])
    shares = [0.5 * (1.0 + math.erf(scale / math.sqrt(2.0))) for scale in scales]
    return _layer_inputs(values, tensors) | {
        "activation_sparsity_pattern": shares or 0.0,
        "altup_num_inputs": values["altup.num_inputs"],
        "altup_active_idx": values["altup.active_idx"],
        "laurel_rank": int(tensors["blk.0.laurel_l.weight"].shape[-1]),
    }


def gemma4(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Layers that see everything have wider heads; a tensor says which of their frequencies are 0."""
    wide, narrow = values["attention.key_length"], values["attention.key_length_swa"]
    full = [not local for local in values["attention.sliding_window_pattern"]]
    heads, inner = values["attention.head_count_kv"], values["feed_forward_length"]
    heads = heads if isinstance(heads, list) else [heads] * len(full)
    found = _layer_inputs(values, tensors) | {
        "head_dim": narrow,
        "global_head_dim": wide,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": next(count for count, sees_all in zip(heads, full, strict=True) if not sees_all),
        "num_global_key_value_heads": next(count for count, sees_all in zip(heads, full, strict=True) if sees_all),
        "attention_k_eq_v": any(
            f"blk.{index}.attn_k.weight" in tensors and f"blk.{index}.attn_v.weight" not in tensors
            for index, sees_all in enumerate(full)
            if sees_all
        ),
        "intermediate_size": min(inner) if isinstance(inner, list) else inner,
        "use_double_wide_mlp": isinstance(inner, list) and min(inner) != max(inner),
        "enable_moe_block": has_tensor(tensors, "ffn_gate_inp.weight"),
        "top_k_experts": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
    }
    if _ROPE_DIVISORS in tensors:
        divisors = tensors[_ROPE_DIVISORS].data.flatten()
        share = float((divisors == 1.0).sum()) / len(divisors)
        found["rope_parameters"] = {"rope_type": "proportional", "partial_rotary_factor": share}
    return found


def llama4(values: Values, tensors: Mapping[str, Any]) -> Facts:
    """Sizes of chunks and of the queries' temperature are constants in llama.cpp, and those of the family here."""
    return {
        "intermediate_size_mlp": values["feed_forward_length"],
        "intermediate_size": values["expert_feed_forward_length"],
        "interleave_moe_layer_step": values.get("interleave_moe_layer_step", 1),
        "use_qk_norm": values["expert_count"] != _MAVERICK,
    }
