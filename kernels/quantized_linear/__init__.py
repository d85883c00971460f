"""y = x Wᵀ + b (+ residual) for a weight that is stored as codes with scales: see `QuantizedWeight`.

With `input_bits` 8 the inputs are rounded too: x ≈ s · q, s = max |x| / 127 for each row, q = round(x / s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union, runtime_checkable

import torch
from torch import Tensor

from ..dispatch import use_triton
from ..native import tiles
from .native import NativeQuantizedLinear, is_native
from .torch import TorchQuantizedLinear
from .weight import QuantizedWeight, row_squares

__all__ = [
    "NativeQuantizedLinear",
    "QuantizedLinear",
    "QuantizedWeight",
    "RowSource",
    "pack",
    "pack_table",
    "row_squares",
]

if TYPE_CHECKING:
    from .device_linear import TritonQuantizedLinear

QuantizedLinear: TypeAlias = Union[NativeQuantizedLinear, TorchQuantizedLinear, "TritonQuantizedLinear"]
"""Packed weight and bias; a call computes the product."""


@runtime_checkable
class RowSource(Protocol):
    """Packed weight whose rows can be looked up, so that a tied table needs no copy of its own."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the weight in the dtype: [n, in]."""
        ...


def pack_table(weight: QuantizedWeight, dtype: torch.dtype) -> TorchQuantizedLinear:
    """Pack a weight [vocab, in] of which rows are looked up."""
    return TorchQuantizedLinear([weight], None, dtype, batch_invariant=False)


def pack(
    blocks: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool = False
) -> QuantizedLinear:
    """Pack `blocks`, the rows of a weight [out, in] in order, and `bias` [out], for inputs and outputs of `dtype`.

    The blocks may differ in all but the number of inputs and in `input_bits`; the result is a copy, so that they may be
    freed. With `batch_invariant` a row's result does not depend, bit for bit, on other rows.
    """
    if is_native(blocks, dtype):
        tiles.prepare()
        return NativeQuantizedLinear(blocks, bias)
    if use_triton(blocks[0].codes):
        from .device_linear import TritonQuantizedLinear, is_served

        if is_served(blocks, dtype):
            return TritonQuantizedLinear(blocks, bias, dtype, batch_invariant=batch_invariant)
    return TorchQuantizedLinear(blocks, bias, dtype, batch_invariant=batch_invariant)
