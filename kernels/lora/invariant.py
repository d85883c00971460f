"""Adapters' part of a projection in which a token's result does not depend, bit for bit, on other tokens.

The masked product over several adapters' rows would sum over rows of all of them. So each adapter's tokens are computed
separately, with its rows alone, in pieces of trusted sizes (see `kernels.linear.invariant`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..linear.invariant import product


def shrink_expand_invariant(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor]) -> None:
    """Add the deltas of one adapter to its tokens, as `shrink_expand` does: `y[:, s] += (x a[:, s]ᵀ) b[s]` for slice s;
    y is mutated."""
    num_rows, num_slices, in_features = a.shape
    h = product(x, a.reshape(num_rows * num_slices, in_features)).view(-1, num_rows, num_slices)
    start = 0
    for index, part in enumerate(b):
        expand_invariant(y.narrow(1, start, part.shape[1]), h[:, :, index].contiguous(), part)
        start += part.shape[1]


def expand_invariant(y: Tensor, h: Tensor, b: Tensor) -> None:
    """y [T, out] += h [T, n] b [n, out]; the product is rounded before it is added; y is mutated.

    The product is computed in float32: a sum of a few numbers in bfloat16 would hide its order from the trial that
    chooses the sizes.
    """
    y.add_(product(h.float(), b.t().float().contiguous()).to(y.dtype))
