"""Weights of experts as MXFP4 (OCP Microscaling Formats 1.0, sections 5.2 and 6.3): FP4 numbers of the form E2M1, 32 of
which share a power of two.

E experts, O outputs, I inputs; a checkpoint holds `NAME_blocks` [E, O, I / 32, 16] and `NAME_scales` [E, O, I / 32],
both uint8. A byte has two numbers, the lower half first; a scale is an exponent plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...platform.core.errors import InvalidRequestError
from .weight_files import StoredTensor

_GROUP = 32
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of E2M1 by their three lower bits; the fourth is the sign."""


def unpacked(tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Tensors of a checkpoint in which each pair of blocks and scales is the weight [E, I, O] that it stands for, in
    `dtype`, which is computed when it is read. Pairs that do not fit together stay as they are."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        base = name.removesuffix("_blocks")
        scales = tensors.get(f"{base}_scales")
        if base == name or scales is None or blocks.shape[:-1] != scales.shape or len(blocks.shape) != 4:
            continue
        if blocks.shape[3] != _GROUP // 2:
            continue
        experts, outputs, groups, _ = blocks.shape
        del found[name], found[f"{base}_scales"]
        found[base] = StoredTensor((experts, groups * _GROUP, outputs), _Reader(name, blocks, scales, dtype))
    return found


class _Reader:
    """Function that reads a weight."""

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype) -> None:
        self._name = name
        self._parts = blocks, scales
        self._dtype = dtype

    def __call__(self) -> Tensor:
        """Read the weight [E, I, O].

        Raises:
            InvalidRequestError: blocks or scales are not uint8.
        """
        blocks, scales = (part.dense() for part in self._parts)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise InvalidRequestError(f"the tensor {self._name} and its scales must be uint8", param="model")
        return torch.stack([dequantized(*part, self._dtype) for part in zip(blocks, scales, strict=True)]).mT


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight [O, I] in `dtype`, from blocks [O, I / 32, 16] and scales [O, I / 32] of uint8."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=dtype)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [O, I / 32, 32]
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return (numbers[codes.int()].float() * powers.unsqueeze(-1)).to(dtype).flatten(1)
