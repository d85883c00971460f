"""The reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """One to be converted."""

    values: Tensor
    """[n, m]."""
    transposed: bool = False
    """Whether the result is [m, n]."""
    scale: float = 1.0

    def scaled(self) -> Tensor:
        """The product, [n, m] in float32 or float64."""
        return self.values.to(torch.promote_types(self.values.dtype, torch.float32)) * self.scale


def convert(out: Tensor, matrices: Sequence[Matrix]) -> bool:
    """See the package."""
    start = 0
    for matrix in matrices:
        values = matrix.scaled()
        part = out[start : start + values.numel()]
        part.view(values.shape[::-1] if matrix.transposed else values.shape).copy_(
            values.t() if matrix.transposed else values
        )
        start += values.numel()
    # No sum with an infinity or a NaN in it is finite. In its own dtype: asked for float32, torch takes forty times as
    # long, and where the sum of finite weights overflows, they are looked at one by one.
    return bool(out.sum().isfinite()) or bool(out.isfinite().all())


def place(out: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    for column, part in parts:
        out[: part.shape[0], column : column + part.shape[1]] = part
