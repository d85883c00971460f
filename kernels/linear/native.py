"""bfloat16 products on processors with AVX512-BF16, or with AVX2 alone: one C++ call that reads the packed weight once.

oneDNN's product takes 1.1 to 1.5 times as long for few rows, and its results may depend on their number; with AVX2
alone it has none, and PyTorch's takes six to eight times as long for many. Here a row's result does not depend on other
rows, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..memory import weight_memory
from ..native import DTYPES, INTEGER, POINTER, function

RELEASING_WORK = 1 << 28
"""Multiply-adds from which a call releases Python's lock: about a millisecond."""


class _Weight(ctypes.Structure):
    _fields_ = (
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class AdapterTokens(Protocol):
    """Tokens of a step that use adapters, and their rank rows: `kernels.lora.native.RowSegments`."""

    address: int
    stop: int
    """Token after the last one with an adapter."""


class _Functions(NamedTuple):
    product: Any
    releasing: Any
    """`product`, without Python's lock during the call."""
    pack: Any
    panel: int
    """Outputs in a panel of the packed weight."""


@functools.cache
def _functions() -> _Functions | None:
    panel = function("outrider_linear_panel", result=INTEGER)
    if panel is None or not panel():
        return None
    name, types = "outrider_linear", (*(POINTER,) * 4, INTEGER, POINTER, POINTER)
    pack = function("outrider_linear_pack", POINTER, POINTER, INTEGER, INTEGER, releases_lock=True)
    return _Functions(function(name, *types), function(name, *types, releases_lock=True), pack, panel())


def is_native(weight: Tensor) -> bool:
    """True when `NativeLinear` can hold this weight [out, in] on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
        and weight.numel() > 0
        and _functions() is not None
    )


def row_squares(weight: Tensor) -> Tensor | None:
    """Squared norm of each row: [out] float32; None when there is no kernel for the weight."""
    kernel = function("outrider_row_squares", POINTER, INTEGER, INTEGER, INTEGER, POINTER)
    if kernel is None or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    weight = weight.contiguous()
    squares = torch.empty(len(weight), dtype=torch.float32)
    kernel(weight.data_ptr(), *weight.shape, DTYPES[weight.dtype], squares.data_ptr())
    return squares


class NativeProduct:
    """Packed weight [out, in] and bias [out]; immutable. A row's result does not depend on other rows, bit for bit.

    A subclass packs them, and sets the attributes.
    """

    fuses_adapters = True
    __slots__ = (
        "_base",
        "_kept",
        "_product",
        "_releasing",
        "_rows",
        "_weight",
        "in_features",
        "num_bytes",
        "out_features",
    )
    in_features: int
    out_features: int
    num_bytes: int
    """Bytes of the packed weight."""
    # Arguments of the kernel: without the bias, and with it.
    _base: ctypes.Structure
    _weight: ctypes.Structure
    # Kernel, and the one without Python's lock during the call, which serves this number of rows or more.
    _product: Any
    _releasing: Any
    _rows: int

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, site: int = 0, step: AdapterTokens | None = None
    ) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor.

        Args:
            x: [T, in] bfloat16.
            residual: [T, out] bfloat16; added before the result is rounded.
            site: `kernels.lora.native.NativeRows.address` of rows for this projection: their deltas for the tokens of
                `step` are added by the same call, since one more costs as much as a small product.

        Raises:
            ValueError: x or residual has another shape or dtype, or `step` is of more tokens.
        """
        return self._multiply(self._weight, x, residual, site, step)

    @property
    def address(self) -> int:
        """Address of the kernel's `Weight`; valid while this object lives."""
        return ctypes.addressof(self._weight)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        return self._multiply(self._base, x, None)

    def _multiply(
        self,
        weight: ctypes.Structure,
        x: Tensor,
        residual: Tensor | None,
        site: int = 0,
        step: AdapterTokens | None = None,
    ) -> Tensor:
        rows, in_features = x.shape
        if in_features != self.in_features or x.dtype is not torch.bfloat16:
            raise ValueError(f"x must be bfloat16 [T, {self.in_features}]: {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        y = x.new_empty(rows, self.out_features)
        added = None
        if residual is not None:
            if residual.shape != y.shape or residual.dtype is not torch.bfloat16:
                raise ValueError(
                    f"residual must be bfloat16 {tuple(y.shape)}: {residual.dtype} {tuple(residual.shape)}"
                )
            residual = residual.contiguous()
            added = residual.data_ptr()
        product = self._releasing if rows >= self._rows else self._product
        address = None
        if step is not None:
            if step.stop > rows:
                raise ValueError(f"x has {rows} tokens, adapters up to token {step.stop}")
            address = step.address
        product(ctypes.addressof(weight), x.data_ptr(), added, y.data_ptr(), rows, site or None, address)
        return y


class NativeLinear(NativeProduct):
    """Packed weight of bfloat16."""

    __slots__ = ()

    def __init__(self, blocks: Sequence[Tensor], bias: Tensor | None) -> None:
        """Pack `blocks`, the rows of the weight in order, each a tensor for which `is_native` is True; they may be
        freed."""
        functions = _functions()
        assert functions is not None, "is_native must be True"
        if any(len(block) % functions.panel for block in blocks[:-1]):
            blocks = [torch.cat(list(blocks))]
        self.out_features, self.in_features = sum(map(len, blocks)), blocks[0].shape[1]
        shape = -(-self.out_features // functions.panel) * functions.panel, self.in_features
        packed = weight_memory.take(2 * shape[0] * shape[1]).view(torch.bfloat16).view(shape)
        self.num_bytes = packed.nbytes
        bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        fields = (self.in_features, self.out_features, packed.data_ptr())
        self._base = _Weight(*fields, None)
        self._weight = self._base if bias is None else _Weight(*fields, bias.data_ptr())
        self._kept = (packed, bias)
        self._product, self._releasing = functions.product, functions.releasing
        self._rows = max(1, RELEASING_WORK // (self.out_features * self.in_features))
        first = 0
        for block in blocks:
            rows = block.contiguous()
            functions.pack(ctypes.addressof(self._base), rows.data_ptr(), first, len(rows))
            first += len(rows)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the weight: [n, in] bfloat16."""
        packed, functions = self._kept[0], _functions()
        assert functions is not None
        panels = packed.view(-1, self.in_features // 2, functions.panel, 2)
        return panels[ids // functions.panel, :, ids % functions.panel].view(len(ids), self.in_features)
