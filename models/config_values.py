"""Values of a config.json, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..platform.core.errors import UnsupportedModelError
from ..platform.core.model_limits import MAX_TOKEN_IDS
from ..platform.core.text import shorten

# Largest integer that a field may have: a larger one is a damaged file, and would take all memory, or all time.
MOST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
}
_MOST_ELSE = 1 << 24
_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention"),
    *("norm_topk_prob", "use_parallel_residual", "layer_norm_elementwise_affine", "do_layer_norm_before"),
    *("_remove_final_layer_norm", "qk_layernorm", "multi_query", "alibi", "new_decoder_architecture", "parallel_attn"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "enable_bias", "bias", "use_bias", "use_qkv_bias"),
    *("conv_bias", "block_auto_adjust_ff_dim", "tie_embedding", "attention_out_bias", "use_expert_bias"),
    *("altup_correct_scale", "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "use_qk_norm"),
    *("use_conv_bias", "mamba_conv_bias", "mamba_proj_bias", "projectors_bias", "mamba_rms_norm"),
    *("mamba_norm_before_gate", "linear_allow_neg_eigval", "factors_in_weights", "mla_use_nope", "moe_renormalize"),
    *("use_grouped_topk", "residual_in_fp32"),
)
"""Fields that are true or false; some old files have 1 or 0."""
_OF_IMAGES = ("use_bidirectional_attention", "vision")
"""A switch that is on for tokens of images alone."""
_COUNTS = (
    "sliding_window",
    "max_window_layers",
    "first_k_dense_replace",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "num_ln_in_parallel_attn",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
)
"""Fields that are integers from 0 on, also in the files of families that do not read them."""
_SMALLEST, _LARGEST = 1e-30, 1e18
_MOST_SHOWN = 80


def wrong(field: str, problem: str) -> UnsupportedModelError:
    """Error about a field of config.json."""
    return UnsupportedModelError(f"config.json: {field} {problem}", param=field)


def shown(value: object) -> str:
    """Text of `value` for an error, cut short: a file may hold a number of thousands of digits."""
    return shorten(repr(value), _MOST_SHOWN)


def check_values(raw: Mapping[str, Any]) -> None:
    """Refuse (UnsupportedModelError) switches, counts and end tokens of a wrong type or range, whichever family the
    model is of. Other fields are checked where they are read. null counts as absent."""
    for field in _SWITCHES:
        value = raw.get(field)
        if value is not None and not (isinstance(value, int) and value in (0, 1)) and (field, value) != _OF_IMAGES:
            raise wrong(field, f"must be true or false, got {shown(value)}")
    for field in _COUNTS:
        value, most = raw.get(field), MOST.get(field, _MOST_ELSE)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            raise wrong(field, f"must be an integer, 0 to {most}, got {shown(value)}")
    ends = raw.get("eos_token_id")
    for value in ends if isinstance(ends, list) else [ends]:
        if value is not None and not (type(value) is int and 0 <= value < MAX_TOKEN_IDS):
            raise wrong("eos_token_id", f"must be a token id or a list of them, got {shown(value)}")


def positive(values: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as a positive integer that is not absurdly large."""
    value, most = values.get(field, default), MOST.get(field, _MOST_ELSE)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(field, f"must be a positive integer, got {shown(value)}")
    if value > most:
        raise wrong(field, f"must be at most {most}, got {shown(value)}")
    return value


def number(field: str, name: str, value: object) -> float:
    """`value` as a positive number, of which float32 holds powers too; in an error `field` is the object and `name` its
    key."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
        said = f"{name} must be" if name else "must be"
        raise wrong(field, f"{said} a positive number, {_SMALLEST:g} to {_LARGEST:g}, got {shown(value)}")
    return float(value)
