"""Sum of the parts of attention that several programs have computed for a tile, by the last of them to finish."""

from __future__ import annotations

import triton
import triton.language as tl

# Maximum before the first part: finite, so that a difference is never NaN.
_LEAST = tl.constexpr(-3e38)


@triton.jit
def _add_rows(
    out, parts, part_sums, first, token, num_rows, head, num_splits, used_splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum of the parts of a tile's queries and heads, one after the other, with SPLITS splits at once. `first` is the
    index of the tile's first query, `token` its token."""
    columns = tl.arange(0, BLOCK_D)
    for row in tl.range(0, num_rows):
        query_head = head * GROUP + row % GROUP
        begin = ((first + row // GROUP) * HEADS + query_head) * num_splits
        acc = tl.zeros([BLOCK_D], tl.float32)
        top = tl.full((), _LEAST, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for start in tl.range(0, used_splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            sums = tl.load(
                part_sums + begin + split, mask=split < used_splits, other=float("-inf"), cache_modifier=".cg"
            )
            mask = (sums > float("-inf"))[:, None] & (columns < HEAD_DIM)[None, :]
            place = (begin + split)[:, None] * HEAD_DIM + columns[None, :]
            values = tl.load(parts + place, mask=mask, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, tl.max(sums, 0))
            weights, fading = tl.exp2(sums - new_top), tl.exp2(top - new_top)
            acc = acc * fading + tl.sum(values * weights[:, None], 0)
            total = total * fading + tl.sum(weights, 0)
            top = new_top
        result = acc / tl.where(total == 0.0, 1.0, total)
        place = ((token + row // GROUP) * HEADS + query_head) * HEAD_DIM + columns
        tl.store(out + place, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


@triton.jit
def _add_tile(parts, part_sums, part, inside, real, columns, used_splits, HEAD_DIM: tl.constexpr):
    """Sum [BLOCK_M, BLOCK_D] of the parts from `part` [BLOCK_M] on, one split after the other."""
    acc = tl.zeros([inside.shape[0], inside.shape[1]], tl.float32)
    top = tl.full([inside.shape[0]], _LEAST, tl.float32)
    total = tl.zeros([inside.shape[0]], tl.float32)
    for split in tl.range(0, used_splits):
        sums = tl.load(part_sums + part + split, mask=real, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            parts + (part + split)[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, sums)
        fading, weights = tl.exp2(top - new_top), tl.exp2(sums - new_top)
        # A part without keys for a query is not read: its content is undefined.
        values = tl.where((sums > float("-inf"))[:, None], values, 0.0)
        acc = acc * fading[:, None] + values * weights[:, None]
        total = total * fading + weights
        top = new_top
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def add_parts(
    out, parts, part_sums, first, token, num_queries, head, num_splits, used_splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS, D] of a tile from its parts (see `attention_kernel`). `first` is the index of the tile's first
    query among all, `token` its token. The few rows of a small tile are added one by one, from many splits at once."""
    if BLOCK_M == 16:
        _add_rows(
            out, parts, part_sums, first, token, num_queries * GROUP, head, num_splits, used_splits,
            GROUP, HEADS, HEAD_DIM, BLOCK_D, SPLITS,
        )  # fmt: skip
    else:
        query = tl.arange(0, BLOCK_M) // GROUP
        query_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
        real = query < num_queries
        columns = tl.arange(0, BLOCK_D)
        inside = real[:, None] & (columns < HEAD_DIM)[None, :]
        part = ((first + query) * HEADS + query_head) * num_splits
        added = _add_tile(parts, part_sums, part, inside, real, columns, used_splits, HEAD_DIM)
        place = ((token + query) * HEADS + query_head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out + place, added.to(out.dtype.element_ty), mask=inside)
