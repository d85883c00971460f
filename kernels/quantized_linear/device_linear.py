"""Quantised weights on a GPU: which launches compute a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ..tuning import bucket, tuned
from ..tuning.configs import QuantizedLinearConfig
from . import device_weight
from .device_weight import DeviceWeight, join
from .triton import (
    INVARIANT_TILE,
    REDUCE_BLOCK,
    ROUND_BLOCK,
    ROUND_WARPS,
    TILES,
    block_size,
    default_config,
    product_kernel,
    reduce_kernel,
    round_kernel,
)
from .triton_dense import dense_rows
from .weight import QuantizedWeight

_MAX_PARTS = 16
"""Most parts of the inputs."""
_LEAST = 256
"""Fewest bytes of a row that a program multiplies."""
DENSE_TOKENS = 256
"""Tokens from which on a library multiplies."""
_DENSE_NUMBERS = 1 << 26
"""Numbers of a weight that are in memory for it at a time."""


def is_served(blocks: Sequence[QuantizedWeight], dtype: torch.dtype) -> bool:
    """True when `TritonQuantizedLinear` can hold these blocks."""
    return all(map(device_weight.is_served, blocks)) and dtype in (torch.float16, torch.bfloat16, torch.float32)


class TritonQuantizedLinear:
    """Packed weight [out, in] and bias [out]; immutable. Blocks of different forms take a launch each."""

    fuses_adapters = False
    __slots__ = ("_batch_invariant", "_bias", "_dtype", "device_weights", "in_features", "num_bytes", "out_features")

    def __init__(
        self, blocks: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool
    ) -> None:
        """Pack `blocks`, for which `is_served` is True: see the package."""
        self.device_weights = join(blocks, dtype)
        """Rows of the weight as the kernels read them, in order."""
        self._bias = None if bias is None else bias.to(dtype)
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self.out_features = sum(weight.outputs for weight in self.device_weights)
        self.in_features = blocks[0].shape[1]
        self.num_bytes = sum(weight.num_bytes for weight in self.device_weights)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor.

        Args:
            x: [T, in], of the dtype.
            residual: [T, out], of the dtype; added before the result is rounded.
        """
        return self._product(x, self._bias, residual)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        return self._product(x, None, None)

    @property
    def bias(self) -> Tensor | None:
        """Bias [out]."""
        return self._bias

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] int64 of the weight: [n, in] in the dtype."""
        (weight,) = self.device_weights
        return weight.dense(ids).to(self._dtype)

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = torch.empty(len(x), self.out_features, dtype=self._dtype, device=x.device)
        if not len(x):
            return y
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        first = 0
        for weight in self.device_weights:
            outputs = slice(first, first + weight.outputs)
            first = outputs.stop
            _multiply(
                _Operands(
                    x if weight.order is None else x.index_select(1, weight.order),
                    weight,
                    y[:, outputs],
                    None if bias is None else bias[outputs],
                    None if residual is None else residual[:, outputs],
                ),
                self._batch_invariant,
            )
        return y


class _Operands(NamedTuple):
    x: Tensor
    weight: DeviceWeight
    y: Tensor
    """[T, O], whose rows may be any distance apart; written."""
    bias: Tensor | None
    residual: Tensor | None

    @property
    def ends(self) -> dict[str, Any]:
        """Constants of the kernel that stores the result."""
        return {"HAS_BIAS": self.bias is not None, "HAS_RESIDUAL": self.residual is not None}


def _multiply(operands: _Operands, batch_invariant: bool) -> None:
    """Launch the kernels of one product."""
    x, weight, y, bias, residual = operands
    num_tokens = len(x)
    if num_tokens >= DENSE_TOKENS and not batch_invariant and not weight.rounds_inputs:
        _multiply_dense(operands)
        return
    tile = INVARIANT_TILE if batch_invariant else next((t for t in TILES if num_tokens <= t), TILES[-1])
    config = config_of(weight, tile, x.device, x.element_size())
    parts = num_parts(weight, config) if batch_invariant or num_tokens <= tile else 1
    is_split = parts > 1 and num_tokens <= tile
    rounded = weight.factors
    if weight.rounds_inputs:
        x, rounded = _round(x)
    added = y if residual is None else residual
    rest = weight.factors, y if bias is None else bias, added
    target = torch.empty(parts, *y.shape, dtype=torch.float32, device=x.device) if is_split else y
    is_aligned = weight.inputs % 16 == weight.outputs % 16 == 0
    constants = weight.constants | {"ALIGNMENT": 16 if is_aligned else 1, "PARTS": parts, "IS_SPLIT": is_split}
    constants |= {"HAS_BIAS": False, "HAS_RESIDUAL": False} if is_split else operands.ends
    grid = triton.cdiv(weight.outputs, config.block_o) * triton.cdiv(num_tokens, tile) * (parts if is_split else 1)
    product_kernel[(grid,)](
        *(x, rounded, weight.codes, *weight.tables, *rest, target),
        *(num_tokens, weight.inputs, weight.outputs, x.stride(0), weight.codes.stride(0)),
        *(added.stride(0), y.stride(0)),
        **constants,
        BLOCK_O=config.block_o,
        BLOCK_T=tile,
        BLOCK_K=block_size(config, weight.group),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        reduce_kernel[(triton.cdiv(weight.outputs, REDUCE_BLOCK) * num_tokens,)](
            *(target, rounded, weight.tables[1], *rest, y),
            *(num_tokens, weight.outputs, added.stride(0), y.stride(0)),
            HAS_OFFSETS=weight.offsets is not None and weight.rounds_inputs,
            IS_ROUNDED=weight.rounds_inputs,
            **operands.ends,
            PARTS=parts,
            BLOCK_O=REDUCE_BLOCK,
        )


def _multiply_dense(operands: _Operands) -> None:
    """Multiply with parts of the weight in the dtype of the product."""
    x, weight, y, bias, residual = operands
    each = max(1, _DENSE_NUMBERS // weight.inputs)
    for first in range(0, weight.outputs, each):
        part = slice(first, min(first + each, weight.outputs))
        dense = dense_rows(weight, part.start, part.stop, x.dtype)
        if residual is None:
            y[:, part] = F.linear(x, dense, None if bias is None else bias[part])
            continue
        added = residual[:, part] if bias is None else residual[:, part] + bias[part]
        y[:, part] = torch.addmm(added, x, dense.t())


def _round(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, I] int8 of inputs, and [T, 2] float32: their scale and the sum of the codes."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    rounded = torch.empty(len(x), 2, dtype=torch.float32, device=x.device)
    round_kernel[(len(x),)](x, codes, rounded, x.shape[1], x.stride(0), BLOCK=ROUND_BLOCK, num_warps=ROUND_WARPS)
    return codes, rounded


def config_of(weight: DeviceWeight, tile: int, device: torch.device, itemsize: int) -> QuantizedLinearConfig:
    """Launch config for inputs of `itemsize` bytes."""
    shape = shape_of(weight, tile, itemsize)
    return tuned(device, default_config(tile, *shape[3:]), *shape)


def shape_of(weight: DeviceWeight, tile: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Shape by which the launch config is found: see `QuantizedLinearConfig`."""
    size = 1 if weight.rounds_inputs else itemsize
    return tile, bucket(weight.inputs), bucket(weight.outputs), weight.bits, size


def num_parts(weight: DeviceWeight, config: QuantizedLinearConfig) -> int:
    """Number of parts of the inputs: as many as give a launch for one tile enough programs."""
    programs, parts = triton.cdiv(weight.outputs, config.block_o), 1
    while programs * parts < config.programs and parts < _MAX_PARTS and weight.codes.shape[1] >= 2 * parts * _LEAST:
        parts *= 2
    return parts
