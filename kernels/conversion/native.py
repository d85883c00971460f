"""Conversion of all matrices in one C++ call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..native import DTYPES, loaded
from .torch import Matrix

MATRIX = np.dtype(
    [(name, np.int64) for name in ("values", "rows", "columns", "dtype", "transposed")] + [("scale", np.float64)]
)
PART = np.dtype([(name, np.int64) for name in ("values", "rows", "bytes", "offset")])


@functools.cache
def functions() -> tuple[Any, Any] | None:
    """Functions `outrider_convert` and `outrider_place`; None when there are no native kernels."""
    kernels = loaded()
    if kernels is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    convert, place = kernels.outrider_convert, kernels.outrider_place
    convert.argtypes, convert.restype = (pointer, integer, pointer, integer), integer
    place.argtypes, place.restype = (pointer, integer, pointer, integer), None
    return convert, place


def serves(out: Tensor) -> bool:
    """True when the native kernels can write `out`."""
    return loaded() is not None and out.dtype in DTYPES and out.is_cpu and out.is_contiguous()


def convert(out: Tensor, matrices: Sequence[Matrix]) -> bool:
    """See the package."""
    found = functions()
    assert found is not None, "serves says when this may be called"
    # The matrix has another dtype than the kernel's, so torch computes the product here.
    matrices = [m if m.values.dtype in DTYPES else m._replace(values=m.scaled().float(), scale=1.0) for m in matrices]
    table = np.array(
        [(v.data_ptr(), *v.shape, DTYPES[v.dtype], transposed, scale) for v, transposed, scale in matrices], MATRIX
    )
    assert out.numel() == int((table["rows"] * table["columns"]).sum())
    return bool(found[0](table.ctypes.data, len(table), out.data_ptr(), DTYPES[out.dtype]))


def place(out: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    found = functions()
    assert found is not None, "serves says when this may be called"
    size = out.itemsize
    table = np.array([(v.data_ptr(), v.shape[0], v.shape[1] * size, column * size) for column, v in parts], PART)
    stride = out.shape[1] * size
    assert not len(table) or (table["rows"].max() <= len(out) and (table["offset"] + table["bytes"]).max() <= stride)
    found[1](table.ctypes.data, len(table), out.data_ptr(), stride)
