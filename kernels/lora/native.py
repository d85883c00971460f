"""Deltas of all adapters of a step for one projection in one C++ call, which reads the rank rows in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..native import DTYPES, POINTER, function, library


class _Site(ctypes.Structure):
    _fields_ = (
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("num_slices", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("slice_starts", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("live_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """True when `NativeRows` serves rows of this dtype on this device."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


class RowSegments:
    """Tokens of a step and their rank rows, as the kernel reads them."""

    def __init__(self, segments: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Store segments (first token, token after the last, rank rows of their adapter), which are disjoint."""
        runs: dict[tuple[int, ...], list[range]] = {}  # of an adapter: its tokens share the reading of its rows
        for start, stop, own in segments:
            runs.setdefault(tuple(own), []).append(range(start, stop))
        table: list[tuple[int, int, int, int]] = []
        tokens: list[int] = []
        rows: list[int] = []
        for own_rows, ranges in runs.items():
            first = len(tokens)
            tokens.extend(chain.from_iterable(ranges))
            table.append((first, len(tokens), len(rows), len(own_rows)))
            rows.extend(own_rows)
        self._table = np.array(table, dtype=np.int32).reshape(-1, 4)
        self._tokens, self._rows = np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int32)
        self.stop = max((stop for _, stop, _ in segments), default=0)
        # Addresses are looked up once: a lookup takes as long as the rows of a small projection.
        self._step = _Step(self._table.ctypes.data, len(table), self._tokens.ctypes.data, self._rows.ctypes.data)
        self.address = ctypes.addressof(self._step)
        self.checked: dict[NativeRows, int] = {}
        """Number of tokens with which each site's tensors have been checked."""


class NativeRows:
    """Rank rows of one projection as the kernel reads them: views of the pool's tensors, which they keep alive."""

    def __init__(self, a: Tensor, b: Tensor, slice_sizes: Sequence[int], live: np.ndarray[Any, np.dtype[np.uint8]]):
        """Store the rows' addresses for the kernel.

        Args:
            a: [R, S, in], contiguous but for its first stride, which is that of `b`.
            b: [R, sum(slice_sizes)], the slices side by side, the scale folded in.
            slice_sizes: Outputs of each of the S slices.
            live: [R, S], contiguous: 0 if a row has no weights in a slice; these are not read.
        """
        num_rows, num_slices, in_features = a.shape
        if b.shape != (num_rows, sum(slice_sizes)) or len(slice_sizes) != num_slices or live.shape != a.shape[:2]:
            raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, slices {slice_sizes} and live {live.shape}")
        if a.stride(0) != b.stride(0) or a.stride()[1:] != (in_features, 1) or b.stride(1) != 1:
            raise ValueError("the rows of a and b must be contiguous and equally far apart")
        if live.strides[0] != 1:
            raise ValueError("live must have a slice's rows side by side")
        self._kept = (a, b, live)
        self._starts = np.cumsum([0, *slice_sizes], dtype=np.int64)
        self._in_features, self._out_features = in_features, int(self._starts[-1])
        self._dtype = a.dtype
        self._site = _Site(
            in_features,
            self._out_features,
            num_slices,
            a.stride(0),
            a.data_ptr(),
            b.data_ptr(),
            self._starts.ctypes.data,
            live.ctypes.data,
            live.strides[1],
            DTYPES[a.dtype],
        )
        self._add = function("outrider_lora_add", *[POINTER] * 4)
        self.address = ctypes.addressof(self._site)
        """Address that `kernels.linear.NativeLinear` takes to do `add` within its own call."""

    def add(self, y: Tensor, x: Tensor, segments: RowSegments) -> None:
        """y[:, s] += (x a[rows, s]ᵀ) b[rows, s] for the tokens of each segment and each slice s; y is mutated.

        A token's result does not depend on the other tokens, bit for bit.

        Args:
            y: [T, out], contiguous; mutated.
            x: [T, in], contiguous.
            segments: Segments of these T tokens. Tensors are checked at the first call with these segments and as many
                tokens, and not again: a check costs as much as a small projection, since the weights evict Python's
                memory from the caches.
        """
        num_tokens = len(x)
        if segments.checked.get(self) != num_tokens:
            self._check(y, x, segments)
            segments.checked[self] = num_tokens
        self._add(self.address, y.data_ptr(), x.data_ptr(), segments.address)

    def _check(self, y: Tensor, x: Tensor, segments: RowSegments) -> None:
        if not (y.is_contiguous() and x.is_contiguous() and x.dtype == y.dtype == self._dtype):
            raise ValueError("x and y must be contiguous and have the rows' dtype")
        if len(x) < segments.stop or y.shape != (len(x), self._out_features) or x.shape[1] != self._in_features:
            raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit the rows or the step's tokens")
