"""Conversion of stored matrices to the dtype in which they are used, and their placement in adjacent columns of
rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import native as _native
from . import torch as _torch
from .native import serves_stored
from .stored import Conversion, StoredGroups, StoredMatrix
from .torch import Matrix

__all__ = ["Conversion", "Matrix", "StoredGroups", "StoredMatrix", "convert", "place", "serves_stored"]


def convert(out: Tensor, matrices: Sequence[Matrix]) -> bool:
    """out = (scale_0 M_0 | scale_1 M_1ᵀ | ...) one after another, in the dtype of `out`.

    Products are in float32, or float64 if the matrix is. The result has the same bits with each implementation.

    Args:
        out: [n], contiguous, as many elements as the matrices have; mutated.
        matrices: Contiguous, on the CPU.

    Returns:
        True when all of `out` is finite; otherwise its content is undefined.
    """
    convert = _native.convert if _native.serves(out) else _torch.convert
    return convert(out, matrices)


def place(out: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
    """out[:r, column : column + w] = M for each (column, M [r, w]).

    Args:
        out: [n, width], contiguous, on the CPU; mutated.
        parts: Contiguous, in the dtype of `out`, which has room for them.
    """
    place = _native.place if _native.serves(out) else _torch.place
    place(out, parts)
