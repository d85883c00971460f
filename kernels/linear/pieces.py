"""Rows of a product in pieces of a few sizes, each padded with zeros: a library that prepares a kernel for each number
of rows then prepares few."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, cat

# Most rows for which a product takes the time of reading the weights, so that padding is nearly free.
_CHEAP = 32
_ALIGNMENT = 64


class Product(Protocol):
    """Product of an input [T, in], to which a residual [T, out] is added."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor: ...


def pieces(num_rows: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pieces (rows, size of the padded piece) that cover `num_rows` rows in order; `sizes` ascend and are not empty.

    Padding is preferred to another piece up to a size of `_CHEAP`, and up to half of the rows.
    """
    result = []
    rest = num_rows
    while rest:
        size = next((size for size in sizes if size >= rest), sizes[-1])
        smaller = [s for s in sizes if s < rest]
        if size > max(_CHEAP, rest * 3 // 2) and smaller:
            size = smaller[-1]
        result.append((min(size, rest), size))
        rest -= min(size, rest)
    return result


def multiply_pieces(product: Product, x: Tensor, residual: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
    """Product of x [T, in], T > 0, computed in `pieces` of these sizes: a new tensor."""
    parts, start = [], 0
    for count, size in pieces(x.shape[0], sizes):
        stop = start + count
        added = None if residual is None else padded(residual[start:stop], size)
        parts.append(product(padded(x[start:stop], size), added)[:count])
        start = stop
    return parts[0] if len(parts) == 1 else cat(parts)


def padded(x: Tensor, size: int) -> Tensor:
    """x [n, ...] padded with zeros to [size, ...]; x itself when nothing is missing.

    The copy starts at a cache line: a library may use a short loop for the first elements at an odd address.
    """
    if x.shape[0] == size and not x.data_ptr() % _ALIGNMENT:
        return x
    result = x.new_zeros(size, *x.shape[1:])
    result[: x.shape[0]] = x
    return result
