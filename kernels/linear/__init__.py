"""y = x Wᵀ + b (+ residual), with the weight brought once into the form that the machine reads fastest."""

from __future__ import annotations

from torch import Tensor

from .invariant import InvariantLinear
from .invariant import pack_invariant as _pack_invariant
from .native import NativeLinear, is_native
from .native import row_squares as _row_squares
from .torch import PackedLinear
from .torch import pack as _pack
from .torch import row_squares as _slow_row_squares

__all__ = ["InvariantLinear", "NativeLinear", "PackedLinear", "pack", "pack_invariant", "row_squares"]


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | NativeLinear:
    """Pack `weight` [out, in] and `bias` [out]; on a CPU the packed copy is independent of `weight`, which may go."""
    return NativeLinear(weight, bias) if is_native(weight) else _pack(weight, bias)


def pack_invariant(weight: Tensor, bias: Tensor | None = None) -> InvariantLinear | NativeLinear:
    """`pack`, so that the result for a row does not depend on the other rows, bit for bit."""
    return NativeLinear(weight, bias) if is_native(weight) else _pack_invariant(weight, bias)


def row_squares(weight: Tensor) -> Tensor:
    """[out] float32: the squared norm of each row of a weight [out, in]. torch alone takes longer for those of a model
    than for reading its file."""
    squares = _row_squares(weight)
    return _slow_row_squares(weight) if squares is None else squares
