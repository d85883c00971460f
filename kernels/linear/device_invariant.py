"""Batch-invariant products on a GPU: see `triton.py`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .triton import BLOCK_K, BLOCK_O, BLOCK_T, NUM_STAGES, NUM_WARPS, invariant_kernel

_PROGRAMS = 264
"""Programs that large devices run at a time, two on each of 132 multiprocessors. It is not read from the device, so
that devices agree."""
_MAX_PARTS = 16
_LEAST = 512
"""Fewest inputs of a part."""


class TritonInvariantLinear:
    """Weight and bias whose results for a row do not depend on other rows; the weight is not copied.

    Two calls must not run concurrently: they share the count of finished programs.
    """

    fuses_adapters = False
    __slots__ = ("_arrivals", "_bias", "_parts", "_weight", "in_features", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep `weight` [out, in] and `bias` [out]."""
        self._weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes
        blocks = triton.cdiv(self.out_features, BLOCK_O)
        self._parts = max(1, min(_MAX_PARTS, _PROGRAMS // blocks, self.in_features // _LEAST))
        self._arrivals = torch.zeros(blocks, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor; see `PackedLinear`."""
        return self._multiply(x, self._bias, residual)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        return self._multiply(x, None, None)

    def _multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        num_tokens, outputs = len(x), self.out_features
        y = torch.empty(num_tokens, outputs, dtype=x.dtype, device=x.device)
        if not num_tokens:
            return y
        x = x if x.stride(1) == 1 else x.contiguous()
        added = y if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
        is_split = self._parts > 1 and num_tokens <= BLOCK_T
        sums = torch.empty(self._parts, *y.shape, dtype=torch.float32, device=x.device) if is_split else y
        programs = triton.cdiv(outputs, BLOCK_O) * triton.cdiv(num_tokens, BLOCK_T)
        invariant_kernel[(programs * (self._parts if is_split else 1),)](
            *(x, self._weight, y if bias is None else bias, added, y, sums, self._arrivals),
            *(num_tokens, self.in_features, outputs),
            *(x.stride(0), self._weight.stride(0), added.stride(0), y.stride(0)),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            IS_PADDED=self.in_features % BLOCK_K != 0,
            PARTS=self._parts,
            IS_SPLIT=is_split,
            BLOCK_O=BLOCK_O,
            BLOCK_T=BLOCK_T,
            BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS,
            num_stages=2 if x.dtype == torch.float32 else NUM_STAGES,
        )
        return y
