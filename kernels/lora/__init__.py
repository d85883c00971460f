"""Adapters' part of a projection for a whole batch: y += ((x Aᵀ) ∘ M) B over the rank rows in use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .invariant import expand_invariant, shrink_expand_invariant
from .torch import keep_mask
from .torch import shrink_expand as _shrink_expand_torch

__all__ = ["expand_invariant", "keep_mask", "shrink_expand", "shrink_expand_invariant"]


def shrink_expand(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], keep: Tensor | None) -> None:
    """Add the adapters' deltas to `y` in place: for slice s, `y[:, s] += ((x a[:, s]ᵀ) ∘ keep) b[s]`.

    Args:
        y: [T, sum(out_s)], the slices side by side; mutated.
        x: [T, in].
        a: [n, S, in], `n` rank rows of one or several adapters.
        b: S tensors [n, out_s], the scale folded in.
        keep: from `keep_mask`, [T, n]: which rows are of the token's adapter; None when all are.

    Raises:
        ValueError: shapes that do not go together.
    """
    num_rows, num_slices, in_features = a.shape
    if len(b) != num_slices or any(part.shape[0] != num_rows for part in b):
        raise ValueError(f"a has {num_rows} rows and {num_slices} slices; b has {[tuple(part.shape) for part in b]}")
    if x.shape[1] != in_features or y.shape != (x.shape[0], sum(part.shape[1] for part in b)):
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a {tuple(a.shape)} and b")
    if keep is not None and keep.shape != (x.shape[0], num_rows):
        raise ValueError(f"keep must be {(x.shape[0], num_rows)}, got {tuple(keep.shape)}")
    _shrink_expand_torch(y, x, a, b, keep)
