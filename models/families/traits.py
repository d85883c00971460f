"""Traits by which model families differ. The module imports no torch, because the API process reads tokenizers too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Properties of a family: values of keys that its config.json may leave out, and facts that no file states."""

    defaults: Mapping[str, Any]
    attention_bias: bool | None = None
    """Bias of q, k and v; None: the file's `attention_bias` decides, for o too."""
    mlp_bias: bool | None = None
    """Bias of the MLP; None: the file's `mlp_bias` decides."""
    qk_norm: bool = False
    window_switch: bool = False
    """True: a window counts only with `use_sliding_window`, and only from layer `max_window_layers` on."""
    has_window: bool = True
    plain_tokenizer_type: str | None = None
    """Value of `model_type` in config.json of models whose tokenizer.json holds the whole tokenizer. None: transformers
    chooses the tokenizer's class."""
