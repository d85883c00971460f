"""The rotation in three operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """The angles of T tokens: as `apply_rope` wants them, [T, 1, D] each, equally strided; or tables."""

    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None
    """[T] int64, contiguous, each in [0, P): where `cos` and `sin` are tables of P positions, [P, 1, D], each token's
    place there; for kernels that look it up themselves, and do not check it. None: they are the tokens' own."""


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

    Whether `addcmul` fuses its product into the sum may differ between a vector's lane and a leftover element, which
    depends on the other rows.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.mul(x, cos).add_(swapped.mul_(sin))
