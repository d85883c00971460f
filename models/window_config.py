"""Sliding windows of a decoder's layers, read from a HF `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config_values import positive, shown, wrong
from .families import FamilyTraits
from .rope_config import rotated_layers


def layer_types(values: Mapping[str, Any], num_layers: int, traits: FamilyTraits) -> list[str]:
    """Kind of attention of each layer: "full_attention" or "sliding_attention"."""
    if traits.window_everywhere:
        return ["sliding_attention"] * num_layers
    if not traits.has_window or not (traits.window_switch or traits.window_pattern):
        return ["full_attention"] * num_layers
    sliding = [False] * num_layers
    if traits.no_rope:
        sliding = [not rotated for rotated in rotated_layers(values, num_layers)]
    elif traits.window_switch:
        first = values.get("max_window_layers", num_layers)
        if isinstance(first, bool) or not isinstance(first, int):
            raise wrong("max_window_layers", f"must be an integer, got {shown(first)}")
        sliding = [index >= first for index in range(num_layers)]
    elif "layer_types" not in values:
        interval = positive(values, "sliding_window_pattern")
        sliding = [(index + 1) % interval != 0 for index in range(num_layers)]
    types = values.get("layer_types", ["sliding_attention" if slides else "full_attention" for slides in sliding])
    if not isinstance(types, list):
        raise wrong("layer_types", f"must be a list, got {shown(types)}")
    if len(types) != num_layers:
        raise wrong("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise wrong(
                "layer_types", f"{shown(name)} is not supported; known are full_attention and sliding_attention"
            )
    return types


def layer_windows(values: Mapping[str, Any], types: Sequence[str], traits: FamilyTraits) -> tuple[int | None, ...]:
    """Sliding window of each layer; None: it sees everything."""
    if not traits.has_window or "sliding_window" not in values:
        return (None,) * len(types)
    if not (traits.window_switch or traits.window_pattern):
        return (positive(values, "sliding_window"),) * len(types)
    is_listed = traits.no_rope and "layer_types" in values  # the list decides there, whatever the switch says
    is_on = is_listed or not traits.window_switch or values.get("use_sliding_window", False)
    window = positive(values, "sliding_window") if is_on else None
    return tuple(window if name == "sliding_attention" else None for name in types)
