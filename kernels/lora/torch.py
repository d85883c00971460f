"""Masked shrink and expand with dense products: the CPU path, and the reference for other backends.

Two dense products over all rank rows in use, with one mask between them and no loop over adapters. The mask is a
bitwise AND on the floats' bits: it is faster than a multiplication, and turns an infinity in a row of another adapter
into zero, where 0 · inf would give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep_mask(owned: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask of `shrink_expand` for activations of `dtype`: all bits set where `owned` [T, n] bool is True, else none."""
    return owned.to(_BITS[dtype.itemsize]).neg_()


def shrink_expand(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], keep: Tensor | None) -> None:
    """Add the deltas to `y` as `outrider.kernels.lora.shrink_expand` does; the caller has checked the shapes."""
    num_rows, num_slices, in_features = a.shape
    h = F.linear(x, a.reshape(num_rows * num_slices, in_features))
    if num_slices == 1:
        if keep is not None:
            h.view(keep.dtype).bitwise_and_(keep)
        y.addmm_(h, b[0])
        return
    # [T, n · S] -> [S, T, n]: the mask, or else a copy, transposes on the way.
    by_slice = h.view(-1, num_rows, num_slices).permute(2, 0, 1)
    parts = torch.empty(num_slices, x.shape[0], num_rows, dtype=x.dtype, device=x.device)
    if keep is None:
        parts.copy_(by_slice)
    else:
        torch.bitwise_and(by_slice.view(keep.dtype), keep, out=parts.view(keep.dtype))
    _expand_slices(y, parts.unbind(0), b)


def _expand_slices(y: Tensor, parts: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    start = 0
    for part, weight in zip(parts, b, strict=True):
        y.narrow(1, start, weight.shape[1]).addmm_(part, weight)
        start += weight.shape[1]
