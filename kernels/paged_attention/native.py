"""Rotation, write to the cache and attention in one C++ call, which reads the cache's blocks in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..native import DTYPES, FLOAT8, INTEGER, POINTER, function, library
from ..rms_norm import NormWeight
from ..rope import Rotation
from .options import DEFAULT_OPTIONS, AttentionOptions, Chunks, WholeRow, Window
from .torch import CACHE_FLOAT8, LayerKV

MAX_HEAD_DIM = 576

_WHOLE_ROW = -(1 << 63)
"""Code of `WholeRow` as a window; the number of native.cpp."""
_ITEM = 8
"""Bytes of an int64."""
_POINTERS = ("slots", "query_lens", "starts", "token_starts", "table_starts", "blocks")
_SIZES = ("num_tokens", "num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "first_key")
_OPTIONS = (
    ("rotary_dim", ctypes.c_int64),
    ("interleaved", ctypes.c_int64),
    ("scale", ctypes.c_double),
    ("soft_cap", ctypes.c_double),
)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *_OPTIONS,
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


class Shape(NamedTuple):
    """Heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class RowArrays(NamedTuple):
    """B rows of T tokens as contiguous int64 arrays."""

    slots: np.ndarray[Any, Any]
    """[T] slot of each token's KV: block * block_size + offset."""
    query_lens: np.ndarray[Any, Any]
    """[B] tokens of each row, at least 1, in sum T."""
    starts: np.ndarray[Any, Any]
    """[B] first position of each row."""
    token_starts: np.ndarray[Any, Any]
    """[B] first token of each row."""
    table_starts: np.ndarray[Any, Any]
    """[B] index of each row's first block in `blocks`, which holds enough blocks for starts + query_lens positions."""
    blocks: np.ndarray[Any, Any]


@functools.cache
def _function() -> Any:
    return function(
        "outrider_attention",
        *([POINTER] * 4 + [INTEGER]),
        *(POINTER, POINTER, INTEGER, INTEGER, INTEGER),
        *(POINTER, POINTER, INTEGER, POINTER, POINTER, ctypes.c_float, POINTER, POINTER),
    )


def is_native(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """True when `NativeStep` serves these heads on this device."""
    return device.type == "cpu" and dtype in DTYPES and shape.head_dim <= MAX_HEAD_DIM and library() is not None


def _window_code(window: Window) -> int:
    if isinstance(window, WholeRow):
        return _WHOLE_ROW
    return -window.size if isinstance(window, Chunks) else window or 0


class NativeStep:
    """Rows of a step as the kernel reads them, made once for all layers."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        block_size: int,
        query_lens: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        first_key: int = 0,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Plan B rows of T tokens, in order.

        Args:
            query_lens: [B], at least 1, their sum being T.
            starts: [B], each row's first position.
            block_tables: [B], with enough blocks for starts + query_lens positions.
            first_key: No query sees positions before it.
        """
        self._shape = shape
        self._num_heads = shape.num_heads + (1 if options.shared else 2) * shape.num_kv_heads
        self._dtype = dtype
        # Plain lists are faster for few rows than numpy calls.
        slots: list[int] = []
        blocks: list[int] = []
        token_starts, table_starts = [], []
        for count, start, table in zip(query_lens, starts, block_tables, strict=True):
            token_starts.append(len(slots))
            table_starts.append(len(blocks))
            end = start + count
            num_blocks = -(-end // block_size)
            for index in range(start // block_size, num_blocks):
                first, shift = index * block_size, (table[index] - index) * block_size
                slots += range(shift + max(start, first), shift + min(end, first + block_size))
            blocks.extend(table[:num_blocks])
        self._num_tokens = len(slots)
        parts = (slots, query_lens, starts, token_starts, table_starts, blocks)
        self._rows = np.array(list(chain.from_iterable(parts)), dtype=np.int64)  # kept alive
        sizes = (self._num_tokens, len(starts), *shape, block_size, DTYPES[dtype], first_key)
        rotary_dim = options.rotary_dim or shape.head_dim
        numbers = (rotary_dim, options.interleaved, options.scale or 0.0, options.soft_cap or 0.0)
        addresses = accumulate((_ITEM * len(part) for part in parts[:-1]), initial=self._rows.ctypes.data)
        self._struct = _Step(*sizes, *numbers, *addresses)
        self._address = ctypes.addressof(self._struct)

    def attend_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: NormWeight | None,
        kv: LayerKV,
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with a projection's output, heads side by side: qkv [T, (H + 2 Hk) · D], contiguous; return [T, H ·
        D]. If qkv has queries alone, [T, H · D], the cache holds the tokens' keys and values already.

        Queries and keys are first normalised, if there is a `norm` (of scale [H + Hk, D]), and rotated, in float32.
        Values that are not finite are written as 0, and keys are limited: see `write_kv`. A query's result depends, bit
        for bit, on its own sequence alone. With `rotation.rows` the angles come from tables, and the rows are not
        checked. `sinks` [H] are float32.
        """
        num_heads, num_kv_heads, dim = self._shape
        has_keys = qkv.dim() != 2 or qkv.shape[1] != num_heads * dim
        width = (self._num_heads if has_keys else num_heads) * dim
        if qkv.shape != (self._num_tokens, width) or qkv.dtype != self._dtype or not qkv.is_contiguous():
            raise ValueError(f"qkv must be contiguous {self._dtype} {(self._num_tokens, width)}")
        out = qkv.new_empty(self._num_tokens, num_heads * dim)
        start, size = qkv.data_ptr(), dim * qkv.itemsize
        keys, values = start + num_heads * size, start + width * qkv.itemsize - num_kv_heads * size
        cos, sin, rows = rotation
        scale, root = (None, 0.0) if norm is None else (norm.scale.data_ptr(), norm.root_value)
        _function()(
            *(self._address, start, *((keys, values) if has_keys else (None, None)), width),
            *self._cache(kv),
            _window_code(window),
            *(cos.data_ptr(), sin.data_ptr(), cos.stride(0), None if rows is None else rows.data_ptr()),
            *(scale, root, None if sinks is None else sinks.data_ptr(), out.data_ptr()),
        )
        return out

    def _cache(self, kv: LayerKV) -> tuple[int, int, int, int]:
        dtype = kv.k.dtype
        if dtype not in (self._dtype, CACHE_FLOAT8):
            raise ValueError(f"the cache must be {self._dtype} or {CACHE_FLOAT8}; got {dtype}")
        code = FLOAT8 if dtype == CACHE_FLOAT8 else DTYPES[dtype]
        return kv.k.data_ptr(), kv.v.data_ptr(), kv.k.stride(0), code
