"""Traits by which model families differ. The module imports no torch, because the API process reads tokenizers too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """Properties of a family whose layers have experts (Shazeer et al. 2017): keys of its config.json, and names of its
    tensors in a checkpoint where each expert has its own."""

    block: str = "mlp"
    """Module of a layer that holds the router `gate` and the experts."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Projections of an expert."""
    intermediate_size: str = "moe_intermediate_size"
    """Key of an expert's inner size."""
    renormalised: bool | None = None
    """True: the weights of a token's experts sum to 1; None: the file's `norm_topk_prob` decides."""
    rounded: bool = True
    """True: these weights are rounded to the model's dtype."""
    shared: bool = False
    """True: each token has a shared expert too, with a gate of its own."""


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
    experts: ExpertTraits | None = None
    """None: all layers have a dense MLP."""
    plain_tokenizer_type: str | None = None
    """Value of `model_type` in config.json of models whose tokenizer.json holds the whole tokenizer. None: transformers
    chooses the tokenizer's class."""
