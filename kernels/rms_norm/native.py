"""RMS norm in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..native import DTYPES, INTEGER, POINTER, function
from .torch import NormWeight


@functools.cache
def _function() -> Any:
    return function("outrider_rms_norm", *(POINTER, POINTER, ctypes.c_float, POINTER), *[INTEGER] * 4)


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor | None:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., H]; None when the kernel does not serve
    x."""
    kernel = _function()
    size = x.shape[-1]
    repeats = weight.repeats
    if (
        kernel is None
        or x.dtype not in DTYPES
        or not x.is_cpu
        or weight.size != size
        or (repeats > 1 and (weight.scale.dim() > 2 or x.shape[-2] != repeats))
    ):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    kernel(
        *(x.data_ptr(), weight.scale.data_ptr(), weight.root_value, y.data_ptr()),
        *(x.numel() // size, size, weight.repeats, DTYPES[x.dtype]),
    )
    return y
