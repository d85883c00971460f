"""Conversion of a file's bytes to rows, group by group, so that each group stays in the processor's cache.

bytes of the file --convert--> M_0 | M_1ᵀ | ... --place--> columns of the rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..native import DTYPES
from .native import MATRIX, PART, functions


class StoredMatrix(NamedTuple):
    """One matrix in the bytes of its group, and its columns in the rows."""

    offset: int
    """Position of its first byte in the group."""
    rows: int
    columns: int
    dtype: torch.dtype
    """Dtype in the file, one of `native.DTYPES`."""
    transposed: bool
    target: int
    """First column of the matrix in the rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix in the file."""
        return self.rows * self.columns * self.dtype.itemsize


class StoredGroups:
    """Groups of matrices and their columns in the rows; immutable, and used for many files of one layout."""

    def __init__(self, groups: Sequence[Sequence[StoredMatrix]], dtype: torch.dtype, shape: tuple[int, int]) -> None:
        """Plan conversions to `dtype` into rows of `shape`; `serves_stored(dtype)` must be True."""
        self._dtype = dtype
        self._shape = shape
        self.num_bytes = [max(m.offset + m.num_bytes for m in group) for group in groups]
        """Bytes of each group in the file."""
        matrices, parts, self._numbers = [], [], []
        for group in groups:
            end = 0
            for m in group:
                height, width = (m.columns, m.rows) if m.transposed else (m.rows, m.columns)
                assert height <= shape[0]
                assert m.target + width <= shape[1]
                matrices.append((m.offset, m.rows, m.columns, DTYPES[m.dtype], m.transposed, 1.0))
                parts.append((end * dtype.itemsize, height, width * dtype.itemsize, m.target * dtype.itemsize))
                end += m.rows * m.columns
            self._numbers.append(end)
        self._matrices, self._parts = np.array(matrices, MATRIX), np.array(parts, PART)
        ends = np.cumsum([len(group) for group in groups]).tolist()
        self._spans = list(zip([0, *ends], [len(group) for group in groups], strict=False))

    def start(self, scales: Sequence[float], rows: Tensor) -> Conversion:
        """Start the conversion of one file into `rows`; `scales` has one factor for each matrix."""
        assert tuple(rows.shape) == self._shape
        assert rows.dtype == self._dtype
        assert rows.is_contiguous()
        return Conversion(self, scales, rows)


class Conversion:
    """Conversion of one file. For each group in turn: fill `buffer`, call `convert`, look at `result`, call `place`."""

    def __init__(self, groups: StoredGroups, scales: Sequence[float], rows: Tensor) -> None:
        self._groups, self._rows = groups, rows
        self._buffer = np.empty(max(groups.num_bytes), np.uint8)
        self._result = np.empty(max(groups._numbers) * groups._dtype.itemsize, np.uint8)
        self._matrices, self._parts = groups._matrices.copy(), groups._parts.copy()
        self._matrices["scale"] = scales
        self._matrices["values"] += self._buffer.ctypes.data
        self._parts["values"] += self._result.ctypes.data

    def buffer(self, group: int) -> memoryview:
        """Memory that the caller fills with the bytes of a group."""
        return self._buffer.data[: self._groups.num_bytes[group]]

    def convert(self, group: int) -> bool:
        """Convert the group in the buffer; True when all results are finite."""
        first, count = self._groups._spans[group]
        table = self._matrices.ctypes.data + first * MATRIX.itemsize
        return bool(functions().convert(table, count, self._result.ctypes.data, DTYPES[self._groups._dtype]))

    def result(self, group: int) -> memoryview:
        """Bytes of the results of a group, valid until the next `convert`."""
        return self._result.data[: self._groups._numbers[group] * self._groups._dtype.itemsize]

    def place(self, group: int) -> None:
        """Copy the results of a group to the rows."""
        first, count = self._groups._spans[group]
        table = self._parts.ctypes.data + first * PART.itemsize
        functions().place(table, count, self._rows.data_ptr(), self._rows.shape[1] * self._rows.itemsize)
