"""Reference: one row after the other, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from . import Rows, TokenBuffers


def extend_and_match(buffers: TokenBuffers, rows: Rows, min_n: int, max_n: int, num_drafts: int) -> Tensor:
    """`ngram.extend_and_match` on any device."""
    drafts = rows.generated.new_empty(len(rows.places), num_drafts)
    width = buffers.tokens.shape[1]
    for row, ((slot, base, first), accepted) in enumerate(
        zip(rows.places.tolist(), rows.accepted.tolist(), strict=True)
    ):
        start = int(buffers.lengths[slot]) if base < 0 else base
        end = min(start + 1 + accepted, width)
        text = buffers.tokens[slot]
        text[start:end] = rows.generated[first : first + end - start]
        buffers.lengths[slot] = end
        found = _match(text[:end], min_n, max_n)
        drafts[row] = text[found:end].repeat(num_drafts)[:num_drafts]
    return drafts


def _match(text: Tensor, min_n: int, max_n: int) -> int:
    """Index s of the equation for a text [T]."""
    last = len(text) - 1
    for length in range(min(max_n, last), min_n - 1, -1):
        windows = text[:-1].unfold(0, length, 1)
        (starts,) = (windows == text[len(text) - length :]).all(1).nonzero(as_tuple=True)
        if len(starts):
            return int(starts[-1]) + length
    return last
