"""Traits by which model families differ. The module imports no torch, because the API process reads tokenizers too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .block import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Properties of a family: values of keys that its config.json may leave out, and facts that no file states."""

    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    """Key of this family's config.json for each of Llama's keys that it calls otherwise."""
    block: Callable[[Mapping[str, Any]], Block] | None = None
    """Function from the values of a config.json to the layers' form; None: Llama's."""
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
