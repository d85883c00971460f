"""Ministral: Mistral with a window in the layers that a list names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_values import positive
from . import mistral


def _types(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without a list all layers have the window."""
    return {"layer_types": ["sliding_attention"] * positive(values, "num_hidden_layers"), **values}


TRAITS = replace(mistral.TRAITS, derived=_types, window_pattern=True, plain_tokenizer_type="ministral")
