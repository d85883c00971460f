"""Quantised products in C++: one call reads the packed codes once, at memory speed.

On processors with AVX512-VNNI integer codes are multiplied with inputs in fixed point of 16 bits, whose largest number
in each chunk is that of the inputs that share a scale. Inputs within 2^-7 of it are exact, others are off by up to
2^-15 of it. A weight may allow `coarse_inputs`: they have 8 bits, which is nearly twice as fast for many rows, and are
off by up to 2^-8 of the chunk's largest. Codes that are no integers are multiplied as bfloat16, which holds each
float8; on processors without AVX512-BF16 all products are in float32. Scales and offsets are kept in float16 with a
common factor, so that bfloat16 and float16 ones are exact, others within 2^-11.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linear.native import RELEASING_WORK, NativeProduct
from ..memory import weight_memory
from ..native import INTEGER, POINTER, function
from .weight import QuantizedWeight

_NIBBLES, _SMALL_LEVELS, _BYTES, _LEVELS, _FLOAT8 = range(5)
"""Forms of codes.h."""
_NO_OFFSETS, _HALF_OFFSETS, _ZERO_POINTS = range(3)
_MAX_CHUNK = 256
"""Most inputs of a chunk: 256 products of 8 and 16 bits fit into 32."""
_MAX_EXPONENT = 24
"""Power of two below which scales and offsets must be."""


class _Block(ctypes.Structure):
    _fields_ = (
        ("form", INTEGER),
        ("in_features", INTEGER),
        ("out_features", INTEGER),
        ("chunk", INTEGER),
        ("group", INTEGER),
        ("zero", INTEGER),
        ("offsets", INTEGER),
        ("inputs", INTEGER),
        ("scale_unit", ctypes.c_double),
        ("offset_unit", ctypes.c_double),
        ("panels", POINTER),
        ("levels", POINTER),
    )


class _Inputs(ctypes.Structure):
    _fields_ = (("chunk", INTEGER), ("order", POINTER), ("num_planes", INTEGER))


class _Weight(ctypes.Structure):
    _fields_ = (
        ("in_features", INTEGER),
        ("out_features", INTEGER),
        ("num_blocks", INTEGER),
        ("num_inputs", INTEGER),
        ("input_bits", INTEGER),
        ("blocks", POINTER),
        ("inputs", POINTER),
        ("bias", POINTER),
    )


class _Functions(NamedTuple):
    product: Any
    releasing: Any
    """`product`, without Python's lock during the call."""
    rows: Any
    num_bytes: Any
    pack: Any
    has_integers: bool


@functools.cache
def _functions() -> _Functions | None:
    name, types = "outrider_quantized_linear", (*(POINTER,) * 4, INTEGER, POINTER, POINTER)
    product = function(name, *types)
    if product is None:
        return None
    return _Functions(
        product,
        function(name, *types, releases_lock=True),
        rows=function("outrider_quantized_rows", POINTER, POINTER, INTEGER, POINTER),
        num_bytes=function("outrider_quantized_bytes", POINTER, result=INTEGER),
        pack=function("outrider_quantized_pack", *(POINTER, POINTER, INTEGER, POINTER, POINTER), releases_lock=True),
        has_integers=bool(function("outrider_quantized_integers", result=INTEGER)()),
    )


def is_native(blocks: Sequence[QuantizedWeight], dtype: torch.dtype) -> bool:
    """True when `NativeQuantizedLinear` can hold these blocks of a weight, for inputs of `dtype`, on this machine."""
    return (
        dtype == torch.bfloat16
        and all(block.codes.device.type == "cpu" and (block.bits == 4 or block.levels is None) for block in blocks)
        and all(block.codes.numel() > 0 for block in blocks)
        and _functions() is not None
    )


class NativeQuantizedLinear(NativeProduct):
    """Packed codes, scales and offsets of blocks of rows, in any forms."""

    __slots__ = ("_blocks", "_inputs")

    def __init__(self, blocks: Sequence[QuantizedWeight], bias: Tensor | None) -> None:
        """Pack `blocks`, the rows of the weight in order, for which `is_native` is True; they may be freed.

        Raises:
            ValueError: a scale or an offset is not finite, or 2^24 or more.
        """
        functions = _functions()
        assert functions is not None, "is_native must be True"
        self.out_features, self.in_features = sum(block.shape[0] for block in blocks), blocks[0].shape[1]
        self._product, self._releasing = functions.product, functions.releasing
        self._rows = max(1, RELEASING_WORK // (self.out_features * self.in_features))
        bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._kept: list[Any] = [bias]
        self._blocks = (_Block * len(blocks))()
        self.num_bytes = 0
        inputs: dict[tuple[int, tuple[int, ...] | None, int], _Inputs] = {}
        for to, block in zip(self._blocks, blocks, strict=True):
            self._describe(to, block, functions.has_integers, inputs)
            self._pack(to, block, functions)
        self._inputs = (_Inputs * len(inputs))(*inputs.values())
        shape = (self.in_features, self.out_features, len(blocks), len(inputs), blocks[0].input_bits or 16)
        tables = ctypes.addressof(self._blocks), ctypes.addressof(self._inputs)
        self._base = _Weight(*shape, *tables, None)
        self._weight = self._base if bias is None else _Weight(*shape, *tables, bias.data_ptr())

    @property
    def input_form(self) -> tuple[int, int, int] | None:
        """Form of the inputs: chunk, planes and bits; None: the blocks differ in it, or have an order of inputs."""
        first = self._inputs[0]
        if len(self._inputs) > 1 or first.order:
            return None
        return first.chunk, first.num_planes, self._base.input_bits

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of W, dequantised: [n, in] bfloat16.

        Raises:
            IndexError: there is no such row.
        """
        ids = ids.long().contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"rows are 0 to {self.out_features - 1}: {int(ids.min())} to {int(ids.max())}")
        found = torch.empty(len(ids), self.in_features, dtype=torch.bfloat16)
        functions = _functions()
        assert functions is not None
        functions.rows(self.address, ids.data_ptr(), len(ids), found.data_ptr())
        return found

    def _describe(self, to: _Block, block: QuantizedWeight, has_integers: bool, inputs: dict[Any, _Inputs]) -> None:
        """Set all of `to` but what `_pack` sets; add to the distinct `inputs` how the block takes them."""
        to.out_features, to.in_features = block.shape
        to.group = min(block.group, self.in_features)
        to.chunk = _chunk(to.group, self.in_features)
        to.form, to.zero, divisor = _form(block, has_integers)
        if to.form in (_SMALL_LEVELS, _LEVELS):
            levels = block.levels.float() * divisor + to.zero  # type: ignore[union-attr]  # there are some
            table = levels.to(torch.uint8 if to.form == _SMALL_LEVELS else torch.float32).contiguous()
            self._kept.append(table)
            to.levels = table.data_ptr()
        num_planes = 0
        if has_integers and to.form in (_NIBBLES, _SMALL_LEVELS, _BYTES):
            num_planes = 1 if block.input_bits == 8 or block.coarse_inputs else 2
        key = (to.chunk, None if block.order is None else tuple(block.order.tolist()), num_planes)
        if key not in inputs:
            order = None if block.order is None else block.order.to(torch.int32).contiguous()
            self._kept.append(order)
            inputs[key] = _Inputs(to.chunk, None if order is None else order.data_ptr(), num_planes)
        to.inputs = list(inputs).index(key)
        to.scale_unit = 1 / divisor

    def _pack(self, to: _Block, block: QuantizedWeight, functions: _Functions) -> None:
        scales, unit = _halves(block.scales, "scales")
        to.scale_unit *= unit
        offsets = None
        if block.offsets is not None:
            zeros = _zero_points(block, to.zero)
            if zeros is None:
                to.offsets, (offsets, to.offset_unit) = _HALF_OFFSETS, _halves(block.offsets, "offsets")
            elif zeros.min() == zeros.max():
                to.zero = int(zeros.flatten()[0])
            else:
                to.offsets, offsets, to.zero = _ZERO_POINTS, zeros, 0
        panels = weight_memory.take(functions.num_bytes(ctypes.addressof(to)))
        to.panels = panels.data_ptr()
        self._kept.append(panels)
        self.num_bytes += panels.nbytes
        codes = block.codes.contiguous()
        flip = 128 if codes.dtype == torch.int8 else 0
        functions.pack(
            ctypes.addressof(to),
            codes.data_ptr(),
            flip,
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
        )


def _chunk(group: int, in_features: int) -> int:
    """Number of inputs in a chunk: an equal part of a group."""
    if group <= _MAX_CHUNK:
        return group
    if group >= in_features:
        return _MAX_CHUNK
    return next(size for size in range(_MAX_CHUNK, 0, -1) if group % size == 0)


def _form(block: QuantizedWeight, has_integers: bool) -> tuple[int, int, int]:
    """Form of the codes; number subtracted from each; number by which the levels were multiplied."""
    if block.codes.dtype == torch.float8_e4m3fn:
        return _FLOAT8, 0, 1
    if block.levels is None:
        if block.bits == 4:
            return _NIBBLES, 0, 1
        return _BYTES, 128 if block.codes.dtype == torch.int8 else 0, 1
    levels = block.levels.double()
    for divisor in (1, 2):
        whole, least = levels * divisor, -int(levels.min() * divisor)
        is_small = whole.abs().max() < 256 and whole.max() + least < 256
        if has_integers and is_small and torch.equal(whole, whole.round()):
            return _SMALL_LEVELS, least, divisor
    return _LEVELS, 0, 1


def _zero_points(block: QuantizedWeight, zero: int) -> Tensor | None:
    """Numbers [O, G] uint8 that are subtracted from the codes instead of `zero` and the offsets; None: there are none.
    Larger ones would make sums of a chunk that 32 bits do not hold."""
    assert block.offsets is not None
    if block.codes.is_floating_point() or block.levels is not None:
        return None
    zeros = (block.offsets / -block.scales).nan_to_num(0, 0, 0).round_()
    numbers = zeros + zero
    is_exact = numbers.min() >= 0 and numbers.max() < 256 and torch.equal(block.offsets, block.scales * -zeros)
    return numbers.to(torch.uint8) if is_exact else None


def _halves(values: Tensor, name: str) -> tuple[Tensor, float]:
    """`values` divided by a power of two, as float16, and that power times 2^112: see `load_half` in codes.h."""
    largest = float(values.abs().max())
    if not largest < 2**_MAX_EXPONENT:
        raise ValueError(f"{name} must be finite and below 2^{_MAX_EXPONENT}: {largest}")
    exponent = max(math.frexp(largest)[1], -100) - 12
    halves = torch.ldexp(values.double(), torch.tensor(-exponent)).to(torch.float16).contiguous()
    return halves, math.ldexp(1, exponent + 112)
