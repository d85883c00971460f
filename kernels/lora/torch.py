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
    """Mask of `shrink_expand` for activations of `dtype`: all bits set for True in `owned` [T, n] bool, else none."""
    return owned.to(_BITS[dtype.itemsize]).neg_()


def shrink_expand(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], keep: Tensor | None) -> None:
    """Add the adapters' deltas to `y` in place: for slice s, `y[:, s] += ((x a[:, s]ᵀ) ∘ keep) b[s]`.

    Args:
        y: [T, sum(out_s)], the slices side by side; mutated.
        x: [T, in].
        a: [n, S, in], `n` rank rows of one or several adapters.
        b: S tensors [n, out_s], the scale folded in.
        keep: from `keep_mask`, [T, n]: which rows are of the token's adapter; None when all are.

    Raises:
        ValueError: shapes that do not match.
    """
    num_rows, num_slices, in_features = a.shape
    if len(b) != num_slices or any(part.shape[0] != num_rows for part in b):
        raise ValueError(f"a has {num_rows} rows and {num_slices} slices; b has {[tuple(part.shape) for part in b]}")
    if x.shape[1] != in_features or y.shape != (x.shape[0], sum(part.shape[1] for part in b)):
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a {tuple(a.shape)} and b")
    if keep is not None and keep.shape != (x.shape[0], num_rows):
        raise ValueError(f"keep must be {(x.shape[0], num_rows)}, got {tuple(keep.shape)}")
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
    start = 0
    for part, weight in zip(parts.unbind(0), b, strict=True):
        y.narrow(1, start, weight.shape[1]).addmm_(part, weight)
        start += weight.shape[1]
