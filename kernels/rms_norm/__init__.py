"""y = x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor

from . import torch as _torch
from .native import rms_norm as _native
from .torch import NormWeight, prepare

__all__ = ["NormWeight", "prepare", "rms_norm", "rms_norm_invariant"]


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor:
    """Normalise x [..., H] over its last dimension; computed in float32, returned in x's dtype."""
    y = _native(x, weight)
    return _torch.rms_norm(x, weight) if y is None else y


def rms_norm_invariant(x: Tensor, weight: NormWeight) -> Tensor:
    """`rms_norm` whose result for a row does not depend on the other rows, bit for bit."""
    y = _native(x, weight)
    return _torch.rms_norm_invariant(x, weight) if y is None else y
