"""The CPU path."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :I]) · x[:, I:] for x [T, 2I]; returns [T, I], contiguous."""
    half = x.shape[-1] // 2
    return F.silu(x[:, :half]).mul_(x[:, half:])
