"""Masked-dense shrink and expand with aten and oneDNN: the CPU path, and the reference for other backends.

Two dense products over all rank rows in use and one mask between them; no loop over adapters (DESIGN §4). The mask is
a bitwise AND on the floats' bits, not a multiplication: it is faster, and a row of another adapter that overflowed to
infinity becomes zero, where 0 * inf would put a NaN into this token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Above this many elements of S * sum(out_s) the zero blocks of the folded B cost more memory traffic than the calls
# they save (2 cores, bf16, 96 rows: 512->3072 in 2 slices 27 µs folded, 48 sliced; 896->9728 at 32 tokens 191 and 135).
_MAX_FOLDED = 8192

# Overloads looked up once: it takes as long as a small product.
_pointwise = torch.ops.mkldnn._linear_pointwise.default
_pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary


def keep_mask(owned: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of `shrink_expand` for activations of `dtype`: all bits where `owned` [T, n] (bool) holds, else none."""
    return owned.to(_BITS[dtype.itemsize]).neg_()


def shrink_expand(y: Tensor, x: Tensor, a: Tensor, b: Sequence[Tensor], keep: Tensor | None) -> None:
    """See `outrider.kernels.lora.shrink_expand`; the shapes have been checked."""
    num_rows, num_slices, in_features = a.shape
    h = F.linear(x, a.reshape(num_rows * num_slices, in_features))
    if num_slices == 1:
        if keep is not None:
            h.view(keep.dtype).bitwise_and_(keep)
        y.addmm_(h, b[0])
        return
    # [T, n * S] -> [S, T, n]: the mask (or a copy) does the transposition on the way.
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


def _can_prepack(sample: Tensor) -> bool:
    return (
        sample.device.type == "cpu"
        and sample.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedRows:
    """The rank rows of a set of adapters at one projection, copied into the layout in which they are used fastest.

    `A` is stored slice by slice, [S * n, in], so that one product shrinks for all slices and each slice's part is
    contiguous. In bfloat16 on a CPU both weights are in oneDNN's blocked format, and where the projection is small `B`
    is block-diagonal, [sum(out_s), S * n]: one call expands into all slices. Worth making for rows that are used for
    several steps: it costs 5 to 15 uses.
    """

    def __init__(self, a: Tensor, b: Sequence[Tensor]) -> None:
        """`a` [n, S, in] and `b`, S tensors [n, out_s]; both are copied."""
        num_rows, num_slices, in_features = a.shape
        self._num_slices = num_slices
        self._prepacked = _can_prepack(a)
        self._folded: Tensor | None = None
        self._slices: list[Tensor] = []
        self._a = a.transpose(0, 1).reshape(num_slices * num_rows, in_features).clone()
        out_features = sum(part.shape[1] for part in b)
        if self._prepacked and num_slices * out_features <= _MAX_FOLDED:
            folded = a.new_zeros(out_features, num_slices * num_rows)
            start = 0
            for index, part in enumerate(b):
                folded[start : start + part.shape[1], index * num_rows : (index + 1) * num_rows] = part.t()
                start += part.shape[1]
            self._folded = torch.ops.mkldnn._reorder_linear_weight(folded, 8)
        else:
            # [out_s, n] in memory, used transposed: a fifth faster than [n, out_s]
            self._slices = [part.t().clone(memory_format=torch.contiguous_format).t() for part in b]
        if self._prepacked:
            self._a = torch.ops.mkldnn._reorder_linear_weight(self._a, 8)

    def __call__(self, y: Tensor, x: Tensor, keep: Tensor | None) -> None:
        """Add the deltas to `y` [T, sum(out_s)] in place, from `x` [T, in].

        `keep` is [T, S * n]: the mask of `keep_mask` once for each slice, side by side; None keeps all.
        """
        if self._prepacked:
            h = _pointwise(x, self._a, None, "none", (), "")
        else:
            h = F.linear(x, self._a)
        if keep is not None:
            h.view(keep.dtype).bitwise_and_(keep)
        if self._folded is not None:
            y.copy_(_pointwise_binary(h, y, self._folded, None, "add"))
        else:
            _expand_slices(y, h.chunk(self._num_slices, 1), self._slices)
