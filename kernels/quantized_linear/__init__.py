"""y = x Wᵀ + b (+ residual) for a weight that is stored as codes with scales: see `QuantizedWeight`.

With `input_bits` 8 the inputs are rounded too: x ≈ s · q, s = max |x| / 127 for each row, q = round(x / s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
from torch import Tensor

from ..dispatch import use_triton
from .native import NativeQuantizedLinear, is_native
from .torch import TorchQuantizedLinear
from .weight import QuantizedWeight, row_squares

__all__ = ["NativeQuantizedLinear", "QuantizedLinear", "QuantizedWeight", "pack", "row_squares"]

if TYPE_CHECKING:
    from .device_linear import TritonQuantizedLinear

QuantizedLinear: TypeAlias = Union[NativeQuantizedLinear, TorchQuantizedLinear, "TritonQuantizedLinear"]
"""Packed weight and bias; a call computes the product."""


def pack(
    blocks: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool = False
) -> QuantizedLinear:
    """Pack `blocks`, the rows of a weight [out, in] in order, and `bias` [out], for inputs and outputs of `dtype`.

    The blocks may differ in all but the number of inputs and in `input_bits`; the result is a copy, so that they may be
    freed. With `batch_invariant` a row's result does not depend, bit for bit, on other rows.
    """
    if is_native(blocks, dtype):
        return NativeQuantizedLinear(blocks, bias)
    if use_triton(blocks[0].codes):
        from .device_linear import TritonQuantizedLinear, is_served

        if is_served(blocks, dtype):
            return TritonQuantizedLinear(blocks, bias, dtype, batch_invariant=batch_invariant)
    return TorchQuantizedLinear(blocks, bias, dtype, batch_invariant=batch_invariant)
