"""Rotary position embedding (Su et al. 2021) with the half-split pairs of HF Llama, or with adjacent elements as pairs
(GLM).

On a GPU, and in C++, the attention kernels rotate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Angles of T tokens: cos and sin [T, 1, R] as `apply_rope` takes them, equally strided; or tables of all
    positions. R is D, or the first elements of a head that are rotated."""

    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None
    """[T] int64, contiguous: each token's index in the tables `cos` and `sin` [P, 1, R], below P; for kernels that look
    the angles up and do not check the indices. None: `cos` and `sin` are the tokens' own."""


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]): y = x · cos + swap_halves(x) · sin.

    Args:
        x: [T, heads, D]; D even. Queries and keys side by side are rotated in one call.
        cos: [T, 1, D], both halves equal.
        sin: [T, 1, D], the first half negated, so that swapping halves needs no sign.

    Returns:
        [T, heads, D], contiguous.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.mul(x, cos).addcmul_(swapped, sin)


def apply_rope_invariant(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` in operations that are rounded one by one, as in HF.

    `addcmul` may fuse its product into the sum for a vector's lane but not for a leftover element, which depends on the
    other rows.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.mul(x, cos).add_(swapped.mul_(sin))


def rope_of_part(
    rope: Callable[[Tensor, Tensor, Tensor], Tensor], rotary_dim: int, *, interleaved: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`rope` for the first `rotary_dim` elements of each head, with adjacent elements as pairs if `interleaved`."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        if interleaved:
            part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        part = rope(part, cos, sin)
        if interleaved:
            part = part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((part, rest), -1)

    return rotate
