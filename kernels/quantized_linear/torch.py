"""Reference: rows of the weight are dequantised piece by piece in each call, then multiplied in the dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linear.invariant import product
from .weight import QuantizedWeight

# Inputs whose products of int8 numbers float32 sums exactly: 1024 · 127² < 2^24.
_EXACT = 1024


class _Block(NamedTuple):
    codes: Tensor
    """[O, I], or of 4 bits [O, ceil(I / 2)]: two in a byte, the first one in the lower half."""
    form: QuantizedWeight
    """The weight, whose codes are a placeholder without memory."""

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        return replace(self.form.rows(start, stop), codes=self._unpacked(self.codes[start:stop]))

    def take(self, index: Tensor) -> QuantizedWeight:
        offsets = None if self.form.offsets is None else self.form.offsets[index]
        codes = self._unpacked(self.codes[index])
        return replace(self.form, codes=codes, scales=self.form.scales[index], offsets=offsets)

    def _unpacked(self, codes: Tensor) -> Tensor:
        if self.form.bits == 8:
            return codes
        return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : self.form.shape[1]]


class TorchQuantizedLinear:
    """Packed weight [out, in] and bias [out]; immutable."""

    fuses_adapters = False
    __slots__ = ("_batch_invariant", "_bias", "_blocks", "_dtype", "in_features", "num_bytes", "out_features")

    def __init__(
        self, blocks: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool
    ) -> None:
        """Pack `blocks`: see the package."""
        self._blocks = [_packed(block) for block in blocks]
        self._bias = None if bias is None else bias.to(dtype)
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self.out_features, self.in_features = sum(block.shape[0] for block in blocks), blocks[0].shape[1]
        self.num_bytes = sum(
            tensor.nbytes
            for block in self._blocks
            for tensor in (block.codes, block.form.scales, block.form.offsets, block.form.order)
            if tensor is not None
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor.

        Args:
            x: [T, in], of the dtype.
            residual: [T, out], of the dtype.
        """
        y = self.without_bias(x)
        if self._bias is not None:
            y += self._bias
        return y if residual is None else y.add_(residual)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        y = x.new_empty(x.shape[0], self.out_features)
        first = 0
        for block in self._blocks:
            order = block.form.order
            inputs = x if order is None else x.index_select(1, order)
            form = replace(block.form, order=None)
            for start, rows in form.chunks():
                stop = start + rows.shape[0]
                weight = replace(block.rows(start, stop), order=None)
                multiply = self._product if form.input_bits is None else _integer_product
                y[:, first + start : first + stop] = multiply(inputs, weight)
            first += form.shape[0]
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of W in the dtype: [n, in]."""
        result = torch.empty(len(ids), self.in_features, dtype=self._dtype, device=ids.device)
        first = 0
        for block in self._blocks:
            last = first + block.form.shape[0]
            if len(self._blocks) == 1:
                return block.take(ids).dequantized().to(self._dtype)
            here = ((ids >= first) & (ids < last)).nonzero().flatten()
            result[here] = block.take(ids[here] - first).dequantized().to(self._dtype)
            first = last
        return result

    def _product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        dense = weight.dequantized().to(self._dtype)
        return product(x, dense) if self._batch_invariant else F.linear(x, dense)


def _packed(weight: QuantizedWeight) -> _Block:
    codes = weight.codes
    if weight.bits == 4:
        codes = F.pad(codes, (0, codes.shape[1] % 2)).view(codes.shape[0], -1, 2)
        codes = codes[..., 0] | codes[..., 1] << 4
    else:
        codes = codes.clone()
    placeholder = torch.empty((), dtype=weight.codes.dtype, device=codes.device).expand(weight.shape)
    return _Block(codes, replace(weight, codes=placeholder))


def _integer_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Product [T, O] float32 of x [T, I], rounded to int8, and the codes; the same bits with any other rows."""
    largest = x.float().abs().amax(1, keepdim=True)
    scales = largest / 127
    codes = torch.where(largest > 0, x.float() / scales, 0.0).round_()
    total = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for start in range(0, x.shape[1], _EXACT):
        part = slice(start, start + _EXACT)
        total += F.linear(codes[:, part], weight.codes[:, part].float())
    total *= weight.scales[:, 0]
    if weight.offsets is not None:
        total += codes.sum(1, keepdim=True) * weight.offsets[:, 0]
    return total * scales
