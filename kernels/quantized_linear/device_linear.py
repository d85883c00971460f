"""Quantised weights on a GPU: which launches compute a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ..tuning import bucket, tuned
from ..tuning.configs import QuantizedLinearConfig
from . import device_weight
from .device_weight import DeviceWeight, join
from .float8 import SCALED_TOKENS, multiply_scaled, round_inputs
from .triton import (
    FLOAT32_TILE,
    INVARIANT_TILE,
    ROUND_BLOCK,
    ROUND_WARPS,
    TILES,
    block_size,
    default_config,
    product_kernel,
    round_kernel,
)
from .triton_dense import dense_rows
from .weight import QuantizedWeight

_MAX_PARTS = 16
"""Most parts of the inputs."""
_LEAST = 256
"""Fewest bytes of a row that a program multiplies."""
_NEARLY = 1.1
"""Quotient of two times of which the shorter is not worth more parts."""
_TOKENS_A_BYTE = 88
"""Tokens with which tensor cores multiply a number while memory reads a byte: on an H100 at 0.6 of their 990 TFLOP/s,
and 3.35 TB/s."""
DENSE_TOKENS = 512
"""Tokens from which on a library multiplies: below, writing and reading the numbers, four bytes for each, takes longer
than making them again for each tile of tokens."""
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


def _multiply(operands: _Operands, batch_invariant: bool) -> None:
    """Launch the kernels of one product."""
    x, weight, y, bias, residual = operands
    num_tokens = len(x)
    is_float8 = weight.float8_scale is not None
    if is_float8 and num_tokens >= SCALED_TOKENS and not batch_invariant:
        multiply_scaled(*operands)
        return
    if num_tokens >= DENSE_TOKENS and not batch_invariant and not weight.rounds_inputs:
        _multiply_dense(operands)
        return
    tile = _tile(num_tokens, x.element_size(), batch_invariant)
    config = config_of(weight, tile, x.device, x.element_size())
    tiles, blocks = triton.cdiv(num_tokens, tile), triton.cdiv(weight.outputs, config.block_o)
    # The order of a row's sums is that of its parts, which must not depend on the number of tokens.
    parts = num_parts(weight, config, tile, 1 if batch_invariant else tiles)
    is_split = parts > 1 and blocks * tiles <= len(weight.arrivals) and not (batch_invariant and tiles > 1)
    if not is_split and not batch_invariant:
        parts = 1
    rounded = weight.factors
    if weight.rounds_inputs:
        x, rounded = _round(x)
    elif is_float8:
        x, rounded = round_inputs(x, weight, as_codes=False)
    added = y if residual is None else residual
    sums = torch.empty(parts, *y.shape, dtype=torch.float32, device=x.device) if is_split else weight.factors
    is_aligned = weight.inputs % 16 == weight.outputs % 16 == 0
    product_kernel[(blocks * tiles * (parts if is_split else 1),)](
        *(x, rounded, weight.codes, *weight.tables, weight.factors, y if bias is None else bias, added, y),
        *(sums, weight.arrivals),
        *(num_tokens, weight.inputs, weight.outputs, x.stride(0), weight.codes.stride(0)),
        *(added.stride(0), y.stride(0)),
        **weight.constants,
        IS_PADDED=weight.is_padded,
        ALIGNMENT=16 if is_aligned else 1,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ROUNDED=2 if weight.rounds_inputs else int(is_float8),
        PARTS=parts,
        IS_SPLIT=is_split,
        BLOCK_O=config.block_o,
        BLOCK_T=tile,
        BLOCK_K=block_size(config, weight.group, weight.chunk),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _tile(num_tokens: int, itemsize: int, batch_invariant: bool) -> int:
    """Tokens of a tile: the least that holds all, or the largest."""
    if batch_invariant:
        return INVARIANT_TILE
    most = FLOAT32_TILE if itemsize == 4 else TILES[-1]
    return next((tile for tile in TILES if num_tokens <= tile), most) if num_tokens <= most else most


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


def num_parts(weight: DeviceWeight, config: QuantizedLinearConfig, tile: int, tiles: int = 1) -> int:
    """Number of parts of the inputs in a launch for `tiles` tiles of `tile` tokens.

    `config.programs` run at a time, so that a launch takes as long as its rounds of programs, in which the codes are
    read and multiplied; and with several parts the sums of each are written and read. Both are counted in bytes. Of
    nearly equal times the one with the fewest parts is taken.
    """
    programs = triton.cdiv(weight.outputs, config.block_o) * tiles
    numbers = weight.codes.numel() * 8 // weight.bits
    work = tiles * max(weight.codes.nbytes, numbers * tile / _TOKENS_A_BYTE)
    sums = 2 * 4 * tiles * tile * weight.outputs

    def num_bytes(parts: int) -> float:
        rounds = triton.cdiv(programs * parts, config.programs) * config.programs / (programs * parts)
        return rounds * work + (parts * sums if parts > 1 else 0)

    most = max(1, min(_MAX_PARTS, weight.codes.shape[1] // _LEAST))
    times = [num_bytes(parts) for parts in range(1, most + 1)]
    return next(index + 1 for index, time in enumerate(times) if time <= _NEARLY * min(times))
