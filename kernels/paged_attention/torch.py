"""The CPU path, and the reference on a GPU. Who runs together is decided before, once a step, for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

KEY_LIMIT = 1e30
"""No key of a working model is so large, and no sum of 256 products of such keys with its queries overflows float32."""

CACHE_FLOAT8 = torch.float8_e4m3fn
"""The type of a short cache: it holds half as much as bfloat16, and numbers up to..."""
FLOAT8_LIMIT = 448.0


class LayerKV(NamedTuple):
    """One layer's cache; each tensor [Hk, num_blocks, block_size, D]. All is finite: `write_kv` sees to it."""

    k: Tensor
    v: Tensor


@dataclass(slots=True, frozen=True)
class ShortGroup:
    """B rows with few queries each (decode, verification), padded to the same number of queries and of blocks."""

    num_rows: int
    num_queries: int
    """Queries a row, padded: Q."""
    query_index: Tensor | None
    """[B*Q] tokens of the batch; None when the group is the whole batch in order, without padding."""
    padded_index: Tensor | None
    """[n] places in B*Q that are real queries; None when all are."""
    token_index: Tensor | None
    """[n] tokens of the batch that they belong to; None when the group is the whole batch in order."""
    block_index: Tensor
    """[B*num_blocks] cache blocks; a shorter row repeats its last one."""
    key_range: tuple[int, int] | None
    """One row with one query: those of the gathered keys that it sees, a run. None for other groups."""
    bias: Tensor | None
    """[Hk * B, Q * query heads a KV head, gathered keys] in the model's dtype, added to the scores: 0, or -inf where a
    query must not look. None when `key_range` is given, or every query sees every key."""


class QueryTile(NamedTuple):
    """Some consecutive queries of a long row, and the keys that they can see."""

    queries: tuple[int, int]
    """From the row's first query."""
    keys: tuple[int, int]
    """From the row's first gathered key."""
    bias: Tensor | None
    """[queries, keys] in the model's dtype, 0 or -inf; None: causal, with as many keys as queries."""


@dataclass(slots=True, frozen=True)
class LongRow:
    """One row with many queries (a chunk of a prompt)."""

    tokens: tuple[int, int]
    """Its place in the batch."""
    block_index: Tensor
    """[num_blocks]"""
    tiles: list[QueryTile]


class Workspace:
    """Memory that gathered keys and values are written to, reused by all layers and steps.

    Large tensors that are allocated anew come from fresh pages, whose faults cost more than the copy.
    One forward pass at a time may use it; what it returns is valid until the next call.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def gather(self, cache: LayerKV, block_index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks in `dtype`, [Hk, len(block_index), block_size, D] each."""
        return self._gathered(0, cache.k, block_index, dtype), self._gathered(1, cache.v, block_index, dtype)

    def _gathered(self, which: int, part: Tensor, block_index: Tensor, dtype: torch.dtype) -> Tensor:
        heads, _, block_size, dim = part.shape
        shape = (heads, block_index.shape[0], block_size, dim)
        out = self._buffer(which, math.prod(shape), dtype, part.device).view(shape)
        if part.dtype == CACHE_FLOAT8:
            return out.copy_(_movable(part).index_select(1, block_index).view(CACHE_FLOAT8))
        return torch.index_select(part, 1, block_index, out=out)

    def _buffer(self, which: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._buffers[which]
        if buffer is None or buffer.shape[0] < size or buffer.dtype != dtype:
            buffer = self._buffers[which] = torch.empty(max(size, 1 << 16), dtype=dtype, device=device)
        return buffer[:size]


def _movable(x: Tensor) -> Tensor:
    """The same memory in a type that torch can index."""
    return x.view(torch.uint8) if x.dtype == CACHE_FLOAT8 else x


def write_kv(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """Write k and v [T, Hk, D] to `slots` [T] (block * block_size + offset) of the cache.

    What is not finite becomes 0, in k and v too: a hidden position has weight 0, but 0 · NaN is NaN, and would reach
    whoever gets this block next. Keys stay below KEY_LIMIT for the same reason: a hidden score must stay finite, as
    adding -inf to +inf gives NaN. In a float8 cache what is too large becomes the largest number.
    """
    keys, values = k.nan_to_num_(0.0, 0.0, 0.0), v.nan_to_num_(0.0, 0.0, 0.0)
    if kv.k.dtype == CACHE_FLOAT8:
        keys, values = (x.clamp_(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(CACHE_FLOAT8) for x in (keys, values))
    elif k.dtype != torch.float16:
        keys = keys.clamp_(-KEY_LIMIT, KEY_LIMIT)
    heads, _, _, dim = kv.k.shape
    for cache, new in zip(kv, (keys, values), strict=True):
        _movable(cache).view(heads, -1, dim).index_copy_(1, slots, _movable(new).transpose(0, 1))


def attend_short(q: Tensor, kv: LayerKV, group: ShortGroup, out: Tensor | None, workspace: Workspace) -> Tensor:
    """Attention of a group; query heads of one KV head are folded into the queries.

    Args:
        q: [T, H, D] of the whole batch.
        out: [T, H, D], filled for the group's tokens; None when the group is the whole batch.

    Returns:
        [T, H, D]: `out`, or a new tensor.
    """
    heads, head_dim = q.shape[1:]
    keys, values = workspace.gather(kv, group.block_index, q.dtype)
    if group.query_index is not None:
        q = q.index_select(0, group.query_index)
    q = q.view(group.num_rows, group.num_queries, keys.shape[0], -1, head_dim)
    if group.key_range is not None:
        y = _attend_fused(q, keys, values, group.key_range)
    else:
        y = _attend_by_products(q, keys, values, group.bias)
    y = y.reshape(-1, heads, head_dim)
    if group.padded_index is not None:
        y = y.index_select(0, group.padded_index)
    return y if out is None or group.token_index is None else out.index_copy_(0, group.token_index, y)


def _attend_fused(q: Tensor, keys: Tensor, values: Tensor, key_range: tuple[int, int]) -> Tensor:
    """One query, q [1, 1, Hk, fold, D]; keys and values [Hk, blocks, block_size, D]; returns the shape of q."""
    kv_heads, head_dim = keys.shape[0], keys.shape[-1]
    low, high = key_range
    keys = keys.view(1, kv_heads, -1, head_dim)[:, :, low:high]
    values = values.view(1, kv_heads, -1, head_dim)[:, :, low:high]
    return F.scaled_dot_product_attention(q.squeeze(1), keys, values).unsqueeze(1)


def _attend_by_products(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """q [B, Q, Hk, fold, D], keys and values [Hk, blocks, block_size, D]; returns the shape of q.

    For few queries two batched products are up to three times as fast as torch's fused attention, in bfloat16. Scores
    are rounded to the dtype before the softmax, as in HF's eager attention.
    """
    rows, queries, kv_heads, fold, head_dim = q.shape
    # All gathered keys, even those that nobody sees: the product would copy a slice.
    keys = keys.view(kv_heads * rows, -1, head_dim)
    values = values.view(kv_heads * rows, -1, head_dim)
    q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads * rows, queries * fold, head_dim)
    added, beta = (q.new_empty(1), 0) if bias is None or q.dtype == torch.float16 else (bias, 1)
    scores = torch.baddbmm(added, q, keys.transpose(1, 2), beta=beta, alpha=head_dim**-0.5)
    if bias is not None and q.dtype == torch.float16:  # no limit to keys keeps these scores finite
        scores.masked_fill_(bias < 0, -torch.inf)
    y = torch.bmm(torch.softmax(scores, -1), values)
    return y.view(kv_heads, rows, queries, fold, head_dim).permute(1, 2, 0, 3, 4)


def attend_long(q: Tensor, kv: LayerKV, row: LongRow, out: Tensor, workspace: Workspace) -> None:
    """Attention of a chunk of one sequence: q [T, H, D] of the whole batch; fills the row's part of out [T, H, D]."""
    kv_heads, _, _, head_dim = kv.k.shape
    gathered_keys, gathered_values = workspace.gather(kv, row.block_index, q.dtype)
    keys = gathered_keys.view(1, kv_heads, -1, head_dim)
    values = gathered_values.view(1, kv_heads, -1, head_dim)
    q = q[row.tokens[0] : row.tokens[1]].transpose(0, 1).unsqueeze(0)
    for (first, last), (low, high), bias in row.tiles:
        y = F.scaled_dot_product_attention(
            q[:, :, first:last],
            keys[:, :, low:high],
            values[:, :, low:high],
            attn_mask=bias,
            is_causal=bias is None,
            enable_gqa=q.shape[1] != kv_heads,
        )
        out[row.tokens[0] + first : row.tokens[0] + last] = y.squeeze(0).transpose(0, 1)
