"""One C++ call; a row's result does not depend on the other rows, bit for bit."""

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
    function.argtypes = (pointer, pointer, ctypes.c_float, pointer, integer, integer, integer, integer, pointer)
    return function


def can_copy(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `rms_norm_copying` serves tensors of this kind."""
    return device.type == "cpu" and dtype in DTYPES and _function() is not None


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor | None:
    """Normalise x [..., H] over its last dimension; None when that is not for this kernel."""
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
    return _run(function, x, weight, None)


def rms_norm_copying(x: Tensor, weight: NormWeight, copy: int) -> Tensor:
    """`rms_norm`, and the bits of `rms_norm_invariant`, of x [T, H] that `can_copy` says yes to.

    Args:
        copy: address of memory as large as x, which gets x as it is: to keep it in memory of one's own then costs next
            to nothing.
    """
    return _run(_function(), x, weight, copy)


def _run(function: Any, x: Tensor, weight: NormWeight, copy: int | None) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    size = weight.size
    function(
        *(x.data_ptr(), weight.scale.data_ptr(), weight.root_value, y.data_ptr()),
        *(x.numel() // size, size, weight.repeats, DTYPES[x.dtype], copy),
    )
    return y
