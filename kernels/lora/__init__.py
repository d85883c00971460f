"""Adapters' part of a projection for a whole batch: y += ((x Aᵀ) ∘ M) B over the rank rows in use."""

from .invariant import expand_invariant, shrink_expand_invariant
from .torch import keep_mask, shrink_expand

__all__ = ["expand_invariant", "keep_mask", "shrink_expand", "shrink_expand_invariant"]
