"""y = x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor, device

from ..dispatch import has_triton, use_triton
from . import torch as _torch
from .native import rms_norm as _native
from .torch import NormWeight, prepare

__all__ = [
    "NormWeight",
    "add_rms_norm",
    "adds_residuals",
    "prepare",
    "rms_norm",
    "rms_norm_invariant",
]


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor:
    """Normalise x [..., H] over its last dimension; computed in float32, returned in x's dtype."""
    if use_triton(x):
        from . import triton as _triton

        if _triton.serves(x, weight):
            return _triton.rms_norm(x, weight)
    y = _native(x, weight)
    return _torch.rms_norm(x, weight) if y is None else y


def adds_residuals(target: device) -> bool:
    """True when `add_rms_norm` is one launch, and so saves the launch of a sum."""
    return target.type == "cuda" and has_triton()


def add_rms_norm(x: Tensor, residual: Tensor, weight: NormWeight) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum, of x and residual [T, H] of one dtype, as new tensors; the sum is rounded first."""
    assert x.shape == residual.shape
    if use_triton(x) and residual.stride(1) == 1:
        from . import triton as _triton

        if _triton.serves(x, weight):
            return _triton.add_rms_norm(x, residual, weight)
    total = residual + x
    return rms_norm(total, weight), total


def rms_norm_invariant(x: Tensor, weight: NormWeight) -> Tensor:
    """`rms_norm` in which a row's result does not depend, bit for bit, on other rows. The Triton kernel is such: one
    program adds a row's squares, in an order that depends on the width alone."""
    if use_triton(x):
        return rms_norm(x, weight)
    y = _native(x, weight)
    return _torch.rms_norm_invariant(x, weight) if y is None else y
