"""Attention in PyTorch: the CPU path, and the reference on a GPU. The grouping of rows is planned once a step for all
layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .options import DEFAULT_OPTIONS, AttentionOptions

KEY_LIMIT = 1e30
"""Limit of keys. No working model has larger ones, and a sum of 256 products of such keys with its queries fits
float32."""

CACHE_FLOAT8 = torch.float8_e4m3fn
"""Dtype of a compressed cache: it needs half the memory of bfloat16, and holds numbers up to `FLOAT8_LIMIT`."""
FLOAT8_LIMIT = 448.0


class LayerKV(NamedTuple):
    """Cache of one layer, two tensors [Hk, num_blocks, block_size, D], or the same one twice. All values are finite:
    `write_kv` ensures it."""

    k: Tensor
    v: Tensor


@dataclass(slots=True, frozen=True)
class ShortGroup:
    """B rows with few queries each (decode, verification), padded to Q queries and the same number of blocks."""

    num_rows: int
    num_queries: int
    """Queries in a row, padded: Q."""
    query_index: Tensor | None
    """[B*Q] tokens of the batch; None when the group is the whole batch in order, without padding."""
    padded_index: Tensor | None
    """[n] indices in B*Q of the real queries; None when all are real."""
    token_index: Tensor | None
    """[n] tokens of the batch at those indices; None when the group is the whole batch in order."""
    block_index: Tensor
    """[B*num_blocks] cache blocks; a shorter row repeats its last block."""
    key_range: tuple[int, int] | None
    """Range of the gathered keys that one row with one query sees; None for other groups."""
    bias: Tensor | None
    """[Hk * B, Q · H / Hk, gathered keys] in the model's dtype, added to the scores: 0, or -inf for keys that a query
    does not see. None when `key_range` is given, or every query sees every key."""


class QueryTile(NamedTuple):
    """Consecutive queries of a long row, and the range of keys that they see."""

    queries: tuple[int, int]
    """Range of queries, counted from the row's first query."""
    keys: tuple[int, int]
    """Range of keys, counted from the row's first gathered key."""
    bias: Tensor | None
    """[queries, keys] in the model's dtype, 0 or -inf; None: causal, with as many keys as queries."""


@dataclass(slots=True, frozen=True)
class LongRow:
    """One row with many queries: a chunk of a prompt."""

    tokens: tuple[int, int]
    """Range of its tokens in the batch."""
    block_index: Tensor
    """[num_blocks] cache blocks."""
    tiles: list[QueryTile]


class Workspace:
    """Memory for gathered keys and values, reused by all layers and steps.

    A newly allocated large tensor has fresh pages, whose faults cost more than the copy. One forward pass at a time may
    use the workspace; results are valid until the next call.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]

    def gather(self, cache: LayerKV, block_index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks in `dtype`: [Hk, len(block_index), block_size, D] each."""
        keys = self._gathered(0, cache.k, block_index, dtype)
        return keys, keys if cache.v is cache.k else self._gathered(1, cache.v, block_index, dtype)

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
    """View of the same memory in a dtype that torch can index."""
    return x.view(torch.uint8) if x.dtype == CACHE_FLOAT8 else x


def write_kv(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """Write k and v [T, Hk, D] to `slots` [T] (block * block_size + offset) of the cache; k, v and kv are mutated.

    Values that are not finite become 0, in k and v too: a hidden position has weight 0, but 0 · NaN is NaN, and would
    reach the next sequence that gets this block. Keys stay below KEY_LIMIT for the same reason: a hidden score must
    stay finite, as -inf + inf is NaN. In a float8 cache too large values become the largest number.
    """
    keys, values = k.nan_to_num_(0.0, 0.0, 0.0), v.nan_to_num_(0.0, 0.0, 0.0)
    if kv.k.dtype == CACHE_FLOAT8:
        keys, values = (x.clamp_(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(CACHE_FLOAT8) for x in (keys, values))
    elif k.dtype != torch.float16:
        keys = keys.clamp_(-KEY_LIMIT, KEY_LIMIT)
    heads, _, _, dim = kv.k.shape
    for cache, new in zip(kv, (keys, values), strict=True):
        _movable(cache).view(heads, -1, dim).index_copy_(1, slots, _movable(new).transpose(0, 1))


def attend_short(
    q: Tensor,
    kv: LayerKV,
    group: ShortGroup,
    out: Tensor | None,
    workspace: Workspace,
    options: AttentionOptions = DEFAULT_OPTIONS,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend for a group; the query heads of one KV head are folded into the queries.

    Args:
        q: [T, H, D] of the whole batch.
        out: [T, H, D], filled for the group's tokens; None when the group is the whole batch.
        sinks: [H] float32.

    Returns:
        [T, H, D]: `out`, or a new tensor.
    """
    heads, head_dim = q.shape[1:]
    keys, values = workspace.gather(kv, group.block_index, q.dtype)
    if group.query_index is not None:
        q = q.index_select(0, group.query_index)
    q = q.view(group.num_rows, group.num_queries, keys.shape[0], -1, head_dim)
    if group.key_range is not None:
        low, high = group.key_range
        keys, values = (x.flatten(1, 2)[:, low:high] for x in (keys, values))
    if group.key_range is not None and options.soft_cap is None and sinks is None:
        y = _attend_fused(q, keys, values, options.scale)
    else:
        y = _attend_by_products(q, keys, values, group.bias, options, sinks)
    y = y.reshape(-1, heads, head_dim)
    if group.padded_index is not None:
        y = y.index_select(0, group.padded_index)
    return y if out is None or group.token_index is None else out.index_copy_(0, group.token_index, y)


def _attend_fused(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Fused attention for one query q [1, 1, Hk, H / Hk, D]; keys and values [Hk, keys, D]; returns the shape of q."""
    y = F.scaled_dot_product_attention(q.squeeze(1), keys.unsqueeze(0), values.unsqueeze(0), scale=scale)
    return y.unsqueeze(1)


def _attend_by_products(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Attention by two batched products: q [B, Q, Hk, H / Hk, D], keys and values [Hk, blocks, block_size, D]; returns
    the shape of q.

    For few queries in bfloat16 this is up to three times as fast as torch's fused attention. Scores are rounded to the
    dtype before the softmax, as in HF's eager attention.
    """
    rows, queries, kv_heads, fold, head_dim = q.shape
    # All gathered keys are used, even those that no query sees: the product would copy a slice.
    keys = keys.view(kv_heads * rows, -1, head_dim)
    values = values.view(kv_heads * rows, -1, head_dim)
    q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads * rows, queries * fold, head_dim)
    # No limit to keys keeps scores in float16 finite, and a cap must not see a bias.
    masks = q.dtype == torch.float16 or options.soft_cap is not None
    added, beta = (q.new_empty(1), 0) if bias is None or masks else (bias, 1)
    scores = torch.baddbmm(added, q, keys.transpose(1, 2), beta=beta, alpha=options.scale or head_dim**-0.5)
    if options.soft_cap is not None:
        scores = soft_cap(scores, options.soft_cap)
    if bias is not None and masks:
        scores.masked_fill_(bias < 0, -torch.inf)
    if sinks is not None:
        sinks = sinks.view(kv_heads, 1, 1, fold).expand(-1, rows, queries, -1).reshape(kv_heads * rows, -1, 1)
    y = torch.bmm(_softmax(scores, sinks), values)
    return y.view(kv_heads, rows, queries, fold, head_dim).permute(1, 2, 0, 3, 4)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [..., keys], with the sinks [..., 1], if there are some, as one key more."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), -1), -1)[..., :-1]


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Capped x, which is mutated: cap · tanh(x / cap) (Gemma 2)."""
    return x.div_(cap).tanh_().mul_(cap)


def attend_long(
    q: Tensor,
    kv: LayerKV,
    row: LongRow,
    out: Tensor,
    workspace: Workspace,
    options: AttentionOptions = DEFAULT_OPTIONS,
    sinks: Tensor | None = None,
) -> None:
    """Attend for a chunk of one sequence: q [T, H, D] of the whole batch; the row's part of out [T, H, D] is filled.
    `sinks` [H] are float32."""
    kv_heads, _, _, head_dim = kv.k.shape
    gathered_keys, gathered_values = workspace.gather(kv, row.block_index, q.dtype)
    keys = gathered_keys.view(1, kv_heads, -1, head_dim)
    values = gathered_values.view(1, kv_heads, -1, head_dim)
    q = q[row.tokens[0] : row.tokens[1]].transpose(0, 1).unsqueeze(0)
    for (first, last), (low, high), bias in row.tiles:
        tile, tile_keys, tile_values = q[:, :, first:last], keys[:, :, low:high], values[:, :, low:high]
        if options.soft_cap is not None or sinks is not None:
            y = _attend_tile(tile, tile_keys, tile_values, bias, options, sinks)
        else:
            y = F.scaled_dot_product_attention(
                tile,
                tile_keys,
                tile_values,
                attn_mask=bias,
                is_causal=bias is None,
                enable_gqa=q.shape[1] != kv_heads,
                scale=options.scale,
            )
        out[row.tokens[0] + first : row.tokens[0] + last] = y.squeeze(0).transpose(0, 1)


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks for a tile of queries q [1, H, Q, D]; keys and values [1, Hk, keys, D];
    returns the shape of q. Without a bias it is causal, with as many keys as queries."""
    heads, queries, head_dim = q.shape[1:]
    kv_heads, num_keys = keys.shape[1:3]
    if bias is None:
        bias = q.new_full((queries, num_keys), -torch.inf).triu_(1)
    folded = q.reshape(kv_heads, -1, head_dim)
    mask = (bias < 0).expand(heads // kv_heads, -1, -1).reshape(1, -1, num_keys)
    scores = torch.bmm(folded, keys[0].transpose(1, 2)).mul_(options.scale or head_dim**-0.5)
    if options.soft_cap is not None:
        scores = soft_cap(scores, options.soft_cap)
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1).repeat_interleave(queries, 1)
    return torch.bmm(_softmax(scores.masked_fill_(mask, -torch.inf), sinks), values[0]).view(q.shape)
