"""Activation of a gated MLP in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..native import DTYPES, INTEGER, POINTER, function

_CODES = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
"""Numbers of the activations that the kernel computes."""


@functools.cache
def _function() -> Any:
    return function("outrider_act_and_mul", POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER)


def act_and_mul(x: Tensor, activation: str = "silu") -> Tensor | None:
    """Product act(x[:, :I]) · x[:, I:] of x [T, 2I]; None when the kernel does not serve x."""
    kernel, code = _function(), _CODES.get(activation)
    if code is None or kernel is None or x.dtype not in DTYPES or not x.is_cpu:
        return None
    x = x.contiguous()
    rows, width = x.shape
    y = x.new_empty(rows, width // 2)
    kernel(x.data_ptr(), y.data_ptr(), rows, width // 2, DTYPES[x.dtype], code)
    return y


@functools.cache
def _gelu_function() -> Any:
    return function("outrider_gelu", POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER)


def gelu(x: Tensor, *, tanh: bool) -> Tensor | None:
    """GELU of x [T, I], or its approximation with tanh; None when the kernel does not serve x. Torch needs ten times as
    long for bfloat16."""
    kernel = _gelu_function()
    if kernel is None or x.dtype not in DTYPES or not x.is_cpu:
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), len(x), x.shape[1], DTYPES[x.dtype], int(tanh))
    return y
