"""y = x Wᵀ + b (+ residual), with the weight brought once into the form that the machine reads fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor, cat

from .invariant import InvariantLinear
from .invariant import pack_invariant as _pack_invariant
from .native import NativeLinear, is_native
from .native import row_squares as _row_squares
from .torch import PackedLinear
from .torch import pack as _pack
from .torch import row_squares as _slow_row_squares

__all__ = ["InvariantLinear", "NativeLinear", "PackedLinear", "pack", "pack_invariant", "row_squares"]


Weight: TypeAlias = Tensor | Sequence[Tensor]
"""[out, in], or the blocks of rows that make it up, one after the other."""


def pack(weight: Weight, bias: Tensor | None = None) -> PackedLinear | NativeLinear:
    """Pack `weight` [out, in] and `bias` [out]; on a CPU the packed copy is independent of `weight`, which may go."""
    blocks = _blocks(weight)
    return NativeLinear(blocks, bias) if all(map(is_native, blocks)) else _pack(_whole(blocks), bias)


def pack_invariant(weight: Weight, bias: Tensor | None = None) -> InvariantLinear | NativeLinear:
    """`pack`, so that the result for a row does not depend on the other rows, bit for bit."""
    blocks = _blocks(weight)
    return NativeLinear(blocks, bias) if all(map(is_native, blocks)) else _pack_invariant(_whole(blocks), bias)


def row_squares(weight: Tensor) -> Tensor:
    """[out] float32: the squared norm of each row of a weight [out, in]. torch alone takes longer for those of a model
    than for reading its file."""
    squares = _row_squares(weight)
    return _slow_row_squares(weight) if squares is None else squares


def _blocks(weight: Weight) -> Sequence[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight


def _whole(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else cat(list(blocks))
