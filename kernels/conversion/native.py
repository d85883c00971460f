"""Conversion of all matrices in one C++ call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..native import DTYPES, INTEGER, POINTER, function, loaded
from .torch import Matrix

MATRIX = np.dtype(
    [(name, np.int64) for name in ("values", "rows", "columns", "dtype", "transposed")] + [("scale", np.float64)]
)
PART = np.dtype([(name, np.int64) for name in ("values", "rows", "bytes", "offset")])


class Functions(NamedTuple):
    """Kernels of conversion, called with a table, its length, the memory of the result, and its dtype or stride."""

    convert: Any
    place: Any


@functools.cache
def functions() -> Functions:
    """Functions of the kernels, if `serves` is true."""
    types = (POINTER, INTEGER, POINTER, INTEGER)
    return Functions(function("outrider_convert", *types, result=INTEGER), function("outrider_place", *types))


def serves_stored(dtype: torch.dtype) -> bool:
    """True when the native kernels can convert to this dtype. The caller does not wait for the compiler."""
    return loaded() is not None and dtype in DTYPES


def serves(out: Tensor) -> bool:
    """True when the native kernels can write `out`."""
    return serves_stored(out.dtype) and out.is_cpu and out.is_contiguous()


def convert(out: Tensor, matrices: Sequence[Matrix]) -> bool:
    """See the package."""
    # The matrix has another dtype than the kernel's, so torch computes the product here.
    matrices = [m if m.values.dtype in DTYPES else m._replace(values=m.scaled().float(), scale=1.0) for m in matrices]
    table = np.array(
        [(v.data_ptr(), *v.shape, DTYPES[v.dtype], transposed, scale) for v, transposed, scale in matrices], MATRIX
    )
    assert out.numel() == int((table["rows"] * table["columns"]).sum())
    return bool(functions().convert(table.ctypes.data, len(table), out.data_ptr(), DTYPES[out.dtype]))


def place(out: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    size = out.itemsize
    table = np.array([(v.data_ptr(), v.shape[0], v.shape[1] * size, column * size) for column, v in parts], PART)
    stride = out.shape[1] * size
    assert not len(table) or (table["rows"].max() <= len(out) and (table["offset"] + table["bytes"]).max() <= stride)
    functions().place(table.ctypes.data, len(table), out.data_ptr(), stride)
