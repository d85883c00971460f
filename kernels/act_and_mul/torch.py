"""Activation of a gated MLP in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Activations by their Hugging Face names."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Numbers of gpt-oss's activation, which the kernels have as constants."""

# torch divides operations from this many elements on among threads, and a thread's part may end anywhere in a row.
_SERIAL = 1 << 15


def act_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """Product act(x[:, :I]) · x[:, I:] for x [T, 2I]; returns [T, I], contiguous."""
    if activation == "clamped_swiglu":
        gate, up = x[:, ::2].float().clamp_(max=SWIGLU_LIMIT), x[:, 1::2].float()
        product = (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate)
        return product.mul_(up.clamp_(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1.0)).to(x.dtype)
    half = x.shape[-1] // 2
    return ACTIVATIONS[activation](x[:, :half]).mul_(x[:, half:])


def act_and_mul_invariant(x: Tensor, activation: str = "silu") -> Tensor:
    """`act_and_mul` in which a row's result does not depend, bit for bit, on other rows.

    The exponential of a vector's lane and that of a leftover element differ in the last bit. In a slice of a wider
    tensor, in one thread, every row has its leftovers at the same indices. A row that is too large for one thread is
    computed alone, divided in the same way each time.
    """
    half = x.shape[-1] // 2
    height = max(1, (_SERIAL - 1) // half)
    if x.shape[0] <= height:
        return act_and_mul(x, activation)
    return torch.cat([act_and_mul(x[start : start + height], activation) for start in range(0, x.shape[0], height)])
