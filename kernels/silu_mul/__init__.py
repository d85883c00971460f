"""SwiGLU's activation (Shazeer 2020): silu(gate) · up."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import use_triton
from . import torch as _torch
from .native import silu_mul as _native

__all__ = ["silu_mul", "silu_mul_invariant"]


def silu_mul(x: Tensor) -> Tensor:
    """SiLU(x[:, :I]) · x[:, I:] of x [T, 2I]; returns [T, I], contiguous."""
    if use_triton(x):
        from . import triton as _triton

        return _triton.silu_mul(x)
    y = _native(x)
    return _torch.silu_mul(x) if y is None else y


def silu_mul_invariant(x: Tensor) -> Tensor:
    """`silu_mul` in which a row's result does not depend, bit for bit, on other rows."""
    y = _native(x)
    return _torch.silu_mul_invariant(x) if y is None else y
