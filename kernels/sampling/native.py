"""Greedy choice in one C++ call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ..native import INTEGER, POINTER, function


@functools.cache
def _function() -> Any:
    return function("outrider_largest", POINTER, INTEGER, INTEGER, INTEGER, POINTER, POINTER)


def most_likely(logits: Tensor) -> tuple[list[int], list[float]] | None:
    """`sampling.most_likely`; None when the kernel does not serve these logits."""
    kernel = _function()
    if kernel is None or not logits.is_cpu or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    rows, size = logits.shape
    if size == 0:
        return None
    tokens, tops = (ctypes.c_int64 * rows)(), (ctypes.c_float * rows)()
    kernel(logits.data_ptr(), rows, size, logits.stride(0), tokens, tops)
    return tokens[:], tops[:]
