"""RMS norm in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..native import DTYPES, library
from .torch import NormWeight


@functools.cache
def _function() -> Any:
    kernels = library()
    if kernels is None:
        return None
    function = kernels.outrider_rms_norm
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = (pointer, pointer, ctypes.c_float, pointer, integer, integer, integer, integer)
    return function


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor | None:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., H]; None when the kernel does not serve
    x."""
    function = _function()
    size = x.shape[-1]
    repeats = weight.repeats
    if (
        function is None
        or x.dtype not in DTYPES
        or not x.is_cpu
        or weight.size != size
        or (repeats > 1 and (weight.scale.dim() > 2 or x.shape[-2] != repeats))
    ):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    function(
        *(x.data_ptr(), weight.scale.data_ptr(), weight.root_value, y.data_ptr()),
        *(x.numel() // size, size, weight.repeats, DTYPES[x.dtype]),
    )
    return y
