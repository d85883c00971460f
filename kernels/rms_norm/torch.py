"""RMS norm in few torch operations, because each costs as much as the arithmetic of a decode step's rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class NormWeight(NamedTuple):
    """Weights of a norm in the form that `rms_norm` needs, computed once by `prepare`. With n = |x|₂ over H elements,

    y = x / sqrt(n²/H + eps) · weight = x / hypot(n, root) · scale
    """

    scale: Tensor
    """[..., H] float32: weight · sqrt(H)."""
    root: Tensor
    """[] float32: sqrt(eps · H)."""
    root_value: float
    """`root` as a number."""
    size: int
    """Elements of a row: H."""
    repeats: int
    """Number of consecutive rows of H elements that have weights of their own."""
    unit: float
    """Factor of `scale` that makes its largest element 1/2 to 1, if it is finite: then no product with an input exceeds
    the input's dtype."""


def prepare(weight: Tensor, eps: float) -> NormWeight:
    """Prepare `weight` [..., H]; its leading dimensions broadcast against those of x."""
    size = weight.shape[-1]
    root = math.sqrt(eps * size)
    on_device = torch.tensor(root, dtype=torch.float32, device=weight.device)
    scale = (weight.float() * math.sqrt(size)).contiguous()
    peak = float(scale.abs().amax())
    unit = 2.0 ** -math.frexp(peak)[1] if math.isfinite(peak) else 1.0
    return NormWeight(scale, on_device, root, size, scale.numel() // size, unit)


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor:
    """Normalise x [..., H] over its last dimension; computed in float32, returned in x's dtype."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.div(norm.hypot_(weight.root)).mul_(weight.scale).to(x.dtype)


def rms_norm_invariant(x: Tensor, weight: NormWeight) -> Tensor:
    """`rms_norm` in which a row's result does not depend, bit for bit, on other rows.

    In addition to one sum of a row in a fixed order it uses only operations that IEEE 754 rounds exactly: `hypot` may
    give a vector's lane and a leftover element different bits. It overflows if |x|² does, as the reference formula.
    """
    wide = x.float().contiguous()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.div(norm.square_().add_(weight.root.square()).sqrt_()).mul_(weight.scale).to(x.dtype)
