"""oneDNN with prepacked weights on a CPU that supports the dtype; `F.linear` elsewhere and on a GPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from .pieces import multiply_pieces

SIZES = (
    *range(1, 8),
    *range(8, 16, 2),
    *range(16, 64, 4),
    *range(64, 128, 8),
    *range(128, 256, 16),
    *range(256, 513, 32),
)
"""Rows of a product of oneDNN. It prepares each number of rows of each shape separately, which takes 1 to 3 ms and
about 0.6 MiB, and keeps that: the demo's five shapes took 800 MiB for steps of 1 to 300 rows (AVX2, one thread)."""
KEPT_PRODUCTS = 128
"""Prepared products that oneDNN, and torch's layer above it, each keep: about 80 MiB. Their default is 1,024. Steps of
few sizes need 5 to 10 for each."""
# Both read their variable at the first product. A user's value is left.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, str(KEPT_PRODUCTS))
_EXACT = frozenset((0, *SIZES))


def _prepacks(weight: Tensor) -> bool:
    """True when oneDNN has a prepacked product for this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return False


class PackedLinear:
    """Packed weight [out, in] and bias [out]; immutable. Made by `pack`."""

    fuses_adapters = False
    __slots__ = ("_bias", "_prepacked", "_weight", "in_features", "num_bytes", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], prepacked: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._prepacked = prepacked
        self.out_features, self.in_features = shape
        self.num_bytes = shape[0] * shape[1] * weight.dtype.itemsize

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor.

        Args:
            x: [T, in], of the weight's dtype.
            residual: [T, out]; added before the result is rounded to the dtype.
        """
        if self._prepacked and x.shape[0] not in _EXACT:
            return multiply_pieces(self._multiply, x, residual, SIZES)
        return self._multiply(x, residual)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self._prepacked:
            if residual is None:
                return _pointwise(x, self._weight, self._bias, "none", (), "")
            return _pointwise_binary(x, residual, self._weight, self._bias, "add")
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)

    @property
    def plain(self) -> Tensor | None:
        """Weight [out, in]; None if it is prepacked."""
        return None if self._prepacked else self._weight

    @property
    def bias(self) -> Tensor | None:
        """Bias [out]."""
        return self._bias

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]."""
        if self._bias is None:
            return self(x)
        return PackedLinear(self._weight, None, (self.out_features, self.in_features), self._prepacked)(x)


if torch.backends.mkldnn.is_available():
    # The operator's overloads are looked up once: a lookup takes as long as a small product.
    _pointwise = torch.ops.mkldnn._linear_pointwise.default
    _pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary


@torch.inference_mode()
def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack `weight` [out, in] and `bias` [out]. On a CPU the result is a copy, so that `weight` may be freed.

    oneDNN reads a prepacked weight without packing it in every call, as `F.linear` does.
    """
    shape = (weight.shape[0], weight.shape[1])
    if not _prepacks(weight):
        kept = weight.clone() if weight.device.type == "cpu" else weight
        return PackedLinear(kept, bias, shape, prepacked=False)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, shape, prepacked=True)


def row_squares(weight: Tensor) -> Tensor:
    """See the package."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
