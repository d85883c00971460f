"""y = x Wᵀ + b (+ residual), with the weight packed once into the machine's fastest layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor, cat

from ..dispatch import use_triton
from .invariant import pack_invariant
from .native import NativeLinear, is_native
from .native import row_squares as _row_squares
from .torch import PackedLinear
from .torch import pack as _pack
from .torch import row_squares as _slow_row_squares
from .trial import prefers_native

if TYPE_CHECKING:
    from .device_few import FewRowsLinear

__all__ = ["NativeLinear", "Packed", "few_rows", "pack", "row_squares"]

Weight: TypeAlias = Tensor | Sequence[Tensor]
"""Weight [out, in], or the blocks of rows that make it up, in order."""


class Packed(Protocol):
    """Packed weight [out, in] and bias [out], here or in `quantized_linear`; a call computes the product."""

    in_features: int
    out_features: int

    @property
    def fuses_adapters(self) -> bool:
        """True: a call does the work of adapters too, as that of `NativeLinear`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in memory."""
        ...

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) [T, out] as a new tensor."""
        ...

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        ...


def pack(weight: Weight, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Packed:
    """Pack `weight` [out, in] and `bias` [out]. On a CPU the result is a copy, so that `weight` may be freed.

    With `batch_invariant` a row's result does not depend, bit for bit, on other rows.
    """
    blocks = [weight] if isinstance(weight, Tensor) else weight
    shape = sum(map(len, blocks)), blocks[0].shape[1]
    if all(map(is_native, blocks)) and prefers_native(*shape, batch_invariant=batch_invariant):
        return NativeLinear(blocks, bias)
    whole = blocks[0] if len(blocks) == 1 else cat(list(blocks))
    return pack_invariant(whole, bias) if batch_invariant else _pack(whole, bias)


def few_rows(packed: Packed, sizes: Sequence[int]) -> FewRowsLinear | None:
    """Product of few tokens with a packed weight on a GPU, by a trial of its shape; `sizes` are the outputs of its
    slices. None: the weight is quantised or must be batch-invariant, has too many slices, or the library is faster."""
    if not isinstance(packed, PackedLinear) or packed.plain is None or not use_triton(packed.plain):
        return None
    from . import device_few

    if len(sizes) > device_few.MAX_SLICES or packed.plain.stride(1) != 1:
        return None
    most_rows = device_few.tried_rows(packed.plain)
    return device_few.FewRowsLinear(packed.plain, packed.bias, sizes, most_rows) if most_rows else None


def row_squares(weight: Tensor) -> Tensor:
    """Squared norm of each row of a weight [out, in]: [out] float32. The native kernel is used because torch needs
    longer than the file takes to read."""
    squares = _row_squares(weight)
    return _slow_row_squares(weight) if squares is None else squares
