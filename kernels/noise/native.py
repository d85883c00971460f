"""Draws in one C++ call, which computes most of the noise only as exactly as the choice needs it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch import Tensor, float32

from ..native import library


@functools.cache
def _function() -> Any:
    kernels = library()
    if kernels is None:
        return None
    function = kernels.outrider_gumbel_argmax
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = (pointer, pointer, integer, integer, integer, pointer)
    return function


def gumbel_argmax(scores: Tensor, row_keys: Tensor) -> Tensor | None:
    """`noise.gumbel_argmax`; None when the kernel does not serve these tensors."""
    function = _function()
    if function is None or not scores.is_cpu or scores.dtype != float32 or scores.stride(1) != 1:
        return None
    keys = row_keys.contiguous()
    rows, size = scores.shape
    tokens = keys.new_empty(rows)
    function(scores.data_ptr(), keys.data_ptr(), rows, size, scores.stride(0), tokens.data_ptr())
    return tokens
