"""Activation of a gated MLP (Shazeer 2020): act(gate) · up, where act is SiLU or GELU.

gpt-oss has "clamped_swiglu": gate and up alternate, and with g = min(gate, 7) the product is
g · sigmoid(1.702 g) · (1 + clamp(up, -7, 7)). "relu2" has no gate: it is the square of max(x, 0).
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import use_triton
from . import torch as _torch
from .native import act_and_mul as _native
from .torch import ACTIVATIONS

__all__ = ["ACTIVATIONS", "act_and_mul", "act_and_mul_invariant"]


def act_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """Product act(x[:, :I]) · x[:, I:] of x [T, 2I]; returns [T, I], contiguous.

    `activation` is one of `torch.ACTIVATIONS`, or "clamped_swiglu"; or "relu2", with a result [T, 2I].
    """
    if activation == "relu2":
        return x.relu().square_()
    if use_triton(x):
        from . import triton as _triton

        return _triton.act_and_mul(x, activation)
    y = _native(x, activation)
    return _torch.act_and_mul(x, activation) if y is None else y


def act_and_mul_invariant(x: Tensor, activation: str = "silu") -> Tensor:
    """`act_and_mul` in which a row's result does not depend, bit for bit, on other rows, as on a GPU it never does."""
    if use_triton(x) or activation == "relu2":
        return act_and_mul(x, activation)
    y = _native(x, activation)
    return _torch.act_and_mul_invariant(x, activation) if y is None else y
