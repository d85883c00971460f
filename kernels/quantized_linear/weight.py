"""Canonical form of a quantised weight, into which every format is read and which all kernels use.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_LEAST_GROUP = 16
"""Inputs of the smallest group into which `columns` cuts one: each takes a scale, and kernels read them in chunks."""
_CHUNK = 1 << 20
"""Weights that are dequantised at once: 4 MiB of float32."""


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
    """8: inputs are rounded to int8 with one scale for each row (W8A8), codes are int8 and `group` is I; None: inputs
    stay as they are."""
    float8_scale: float | None = None
    """Scale with which the checkpoint's inputs are rounded to float8 e4m3, as its weights are; 0: each row has its own;
    None: they are not rounded. Devices that do not multiply float8 leave inputs as they are."""
    float8_bound: float = math.inf
    """Largest |x| that a row's own scale is made for; larger inputs are cut off there."""
    coarse_inputs: bool = False
    """True: kernels may round inputs to int8 if that is faster, with one scale for each group of a row."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.codes.shape[0], self.codes.shape[1]

    def to(self, device: torch.device) -> QuantizedWeight:
        """Copy to a device; self if it is there already."""
        if self.codes.device == device:
            return self
        offsets, order, levels = (
            None if tensor is None else tensor.to(device) for tensor in (self.offsets, self.order, self.levels)
        )
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, offsets=offsets, order=order, levels=levels)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Outputs `start` to `stop` - 1."""
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop], offsets=offsets)

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Inputs `start` to `stop` - 1. If they cut groups, their groups are smaller ones with the same scales.

        Raises:
            ValueError: their groups would be too small, or the inputs are in another order.
        """
        if self.order is not None:
            raise ValueError("its groups are of inputs that lie apart (desc_act)")
        inputs = self.shape[1]
        group = math.gcd(self.group, start, self.group if stop == inputs else stop)
        if group < min(_LEAST_GROUP, self.group) and self.scales.shape[1] > 1:
            raise ValueError(
                f"inputs {start} to {stop - 1} cut its groups of {self.group} into groups of {group}; "
                f"{_LEAST_GROUP} is the least"
            )
        groups = torch.arange(start, stop, group, device=self.scales.device) // self.group
        offsets = None if self.offsets is None else self.offsets[:, groups]
        codes = self.codes[:, start:stop].contiguous()
        return replace(self, codes=codes, scales=self.scales[:, groups], offsets=offsets, group=group)

    def take(self, index: Tensor) -> QuantizedWeight:
        """Outputs `index` [n] in this order."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], offsets=offsets)

    def take_columns(self, index: Tensor) -> QuantizedWeight | None:
        """Inputs `index` [I] in this order; None if that would part the inputs of a group."""
        if self.order is not None:
            return None
        codes = self.codes[:, index]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        if len(index) % self.group:
            return None
        groups = index.view(-1, self.group)
        first = groups[:, :1]
        if (first % self.group).any() or not (groups == first + torch.arange(self.group)).all():
            return None
        moved = first.flatten() // self.group
        offsets = None if self.offsets is None else self.offsets[:, moved]
        return replace(self, codes=codes, scales=self.scales[:, moved], offsets=offsets)

    def has_form_of(self, other: QuantizedWeight) -> bool:
        """True if `cat` may join the two."""
        fields = "bits", "group", "input_bits", "float8_scale", "float8_bound", "coarse_inputs"
        if any(getattr(self, name) != getattr(other, name) for name in fields) or self.shape[1] != other.shape[1]:
            return False
        if self.order is not None or other.order is not None or (self.offsets is None) != (other.offsets is None):
            return False
        own, others = self.levels, other.levels
        return own is others or (own is not None and others is not None and torch.equal(own, others))

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Outputs of all parts, which have the same form."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat(offsets) if offsets else None,
        )

    def chunks(self) -> Iterator[tuple[int, QuantizedWeight]]:
        """Pieces of a few megabytes: first output, and the rows from there."""
        outputs, inputs = self.shape
        step = max(1, _CHUNK // max(1, inputs))
        for start in range(0, outputs, step):
            yield start, self.rows(start, min(start + step, outputs))

    def dequantized(self) -> Tensor:
        """Compute W [O, I] in float32."""
        result = self.codes.float() if self.levels is None else self.levels[self.codes.long()]
        result *= self._spread(self.scales)
        if self.offsets is not None:
            result += self._spread(self.offsets)
        if self.order is None:
            return result
        return torch.empty_like(result).index_copy_(1, self.order, result)

    def _spread(self, values: Tensor) -> Tensor:
        """Values [O, G] of the groups for each input, or [O, 1] if all inputs share them."""
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group, 1)[:, : self.shape[1]]


def row_squares(weight: QuantizedWeight) -> Tensor:
    """Squared norm of each row of W: [O] float32."""
    chunks = [torch.linalg.vector_norm(rows.dequantized(), dim=1) for _, rows in weight.chunks()]
    return torch.cat(chunks).square_() if chunks else weight.scales.new_zeros(0)
