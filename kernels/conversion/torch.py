"""Reference conversion in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """One matrix to convert."""

    values: Tensor
    """[n, m]."""
    transposed: bool = False
    """True: the result is the transpose, [m, n]."""
    scale: float = 1.0

    def scaled(self) -> Tensor:
        """Product of scale and values, [n, m] in float32 or float64."""
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
    # A sum with an infinity or a NaN in it is not finite. It is computed in the dtype itself: float32 sums take torch
    # forty times as long. If the sum of finite weights overflows, the weights are checked one by one.
    return bool(out.sum().isfinite()) or bool(out.isfinite().all())


def place(out: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    for column, part in parts:
        out[: part.shape[0], column : column + part.shape[1]] = part
