"""SwiGLU's activation in one C++ call; a row's result does not depend, bit for bit, on other rows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch import Tensor

from ..native import DTYPES, library


@functools.cache
def _function() -> Any:
    kernels = library()
    if kernels is None:
        return None
    function = kernels.outrider_silu_mul
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = (pointer, pointer, integer, integer, integer)
    return function


def silu_mul(x: Tensor) -> Tensor | None:
    """SiLU(x[:, :I]) · x[:, I:] of x [T, 2I]; None when the kernel does not serve x."""
    function = _function()
    if function is None or x.dtype not in DTYPES or not x.is_cpu:
        return None
    x = x.contiguous()
    rows, width = x.shape
    y = x.new_empty(rows, width // 2)
    function(x.data_ptr(), y.data_ptr(), rows, width // 2, DTYPES[x.dtype])
    return y
