"""Rotary position embedding (Su et al. 2021) with the half-split pairs of HF Llama."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import use_triton
from .torch import Rotation, apply_rope_invariant
from .torch import apply_rope as _torch

__all__ = ["Rotation", "apply_rope", "apply_rope_invariant"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]): y = x · cos + swap_halves(x) · sin.

    Args:
        x: [T, heads, D]; D even. Queries and keys side by side are rotated in one call.
        cos: [T, 1, D], both halves equal; of cos and sin the last dimension is contiguous.
        sin: [T, 1, D], the first half negated, so that swapping halves needs no sign.

    Returns:
        [T, heads, D], contiguous.
    """
    if use_triton(x):
        from .triton import apply_rope as on_gpu

        return on_gpu(x, cos, sin)
    return _torch(x, cos, sin)
