"""Greedy choice in one C++ call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..native import library


@functools.cache
def _function() -> Any:
    kernels = library()
    if kernels is None:
        return None
    function = kernels.outrider_largest
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = (pointer, integer, integer, integer, pointer, pointer)
    return function


def most_likely(logits: Tensor) -> tuple[list[int], list[float]] | None:
    """`sampling.most_likely`; None when the kernel does not serve these logits."""
    function = _function()
    if function is None or not logits.is_cpu or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    rows, size = logits.shape
    if size == 0:
        return None
    tokens, tops = (ctypes.c_int64 * rows)(), (ctypes.c_float * rows)()
    function(logits.data_ptr(), rows, size, logits.stride(0), tokens, tops)
    return tokens[:], tops[:]
