"""Canonical form of a quantised weight, into which every format is read and which all kernels take.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """Weight W [O, I] as codes: W[o, order[i]] = level(codes[o, i]) · scales[o, i // group] + offsets[o, i // group].

    `level` is the code's own number, or `levels[code]`. All products are in float32.
    """

    bits: int
    """Bits of a code as a kernel stores it: 4 or 8."""
    codes: Tensor
    """[O, I] uint8 (of 4 bits: below 16), int8 or float8_e4m3fn; one element for each code, not packed."""
    scales: Tensor
    """[O, G] float32, finite."""
    group: int
    """Inputs that share a scale; the last group may be shorter. I: one scale for each output."""
    offsets: Tensor | None = None
    """[O, G] float32: minus zero point times scale, or the minimum of a block; None: zeros."""
    order: Tensor | None = None
    """[I] int64: input that each column of the codes belongs to (GPTQ's `desc_act`); None: the same."""
    levels: Tensor | None = None
    """[2 ** bits] float32: number of each code (NF4, IQ4_NL); None: the code itself."""
    input_bits: int | None = None
    """8: inputs are rounded to int8 with one scale for each row (W8A8); None: they stay as they are."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantized(self) -> Tensor:
        """Compute W [O, I] in float32."""
        numbers = self.codes.float() if self.levels is None else self.levels[self.codes.long()]
        columns = torch.arange(self.shape[1], device=self.codes.device) // self.group
        result = numbers * self.scales[:, columns]
        if self.offsets is not None:
            result += self.offsets[:, columns]
        if self.order is None:
            return result
        return torch.empty_like(result).index_copy_(1, self.order, result)
