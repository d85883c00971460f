"""Draws in one C++ call, which computes most of the noise only as exactly as the choice needs it."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, float32

from ..native import INTEGER, POINTER, function


@functools.cache
def _function() -> Any:
    return function("outrider_gumbel_argmax", POINTER, POINTER, INTEGER, INTEGER, INTEGER, POINTER)


def gumbel_argmax(scores: Tensor, row_keys: Tensor) -> Tensor | None:
    """`noise.gumbel_argmax`; None when the kernel does not serve these tensors."""
    kernel = _function()
    if kernel is None or not scores.is_cpu or scores.dtype != float32 or scores.stride(1) != 1:
        return None
    keys = row_keys.contiguous()
    rows, size = scores.shape
    tokens = keys.new_empty(rows)
    kernel(scores.data_ptr(), keys.data_ptr(), rows, size, scores.stride(0), tokens.data_ptr())
    return tokens
