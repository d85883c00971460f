"""Attention in which a query's result does not depend, bit for bit, on other queries, rows, chunks or blocks.

The keys of a row are divided into chunks at fixed positions. A tile of consecutive queries meets a chunk in one product
of a fixed shape for the scores, and in another for the values; the chunks' results are added in order. A chunk that a
query does not see adds exact zeros, so it may be computed for other queries. `trusted_tiles` tries out which shapes
agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear.invariant import trial_operands
from .options import DEFAULT_OPTIONS, AttentionOptions
from .torch import LayerKV, Workspace, soft_cap

BASE = 8
"""Queries of the tile, and pairs of the call, whose results are the reference."""
_TILES = (1, 2, 4, 8, 16, 32)
_PAIRS = (2, 4, 8, 16, 32)
# Elements of a vector on any machine, or a multiple.
_LANES = 16
# Most matrices of a call in a trial, over all KV heads.
_MAX_TRIAL = 128


class PairRun(NamedTuple):
    """Pairs (tile, chunk) of a group that one call computes."""

    num_pairs: int
    """Pairs that are not padding; they follow those of the last run."""
    tile_index: Tensor
    """[n >= num_pairs] tile of the group of each pair; padded with the last one."""
    block_index: Tensor
    """[n * blocks in a chunk] cache blocks."""


@dataclass(slots=True, frozen=True)
class TileGroup:
    """N tiles of Q queries each, padded to the same number n of chunks. M = Q · H / Hk."""

    num_tiles: int
    num_queries: int
    num_chunks: int
    query_index: Tensor
    """[N * Q] tokens of the batch; a tile that is not full repeats its last token."""
    place_index: Tensor
    """[real queries] places in N * Q."""
    token_index: Tensor
    """[real queries] tokens of the batch at those places."""
    bias: Tensor
    """[N, Q, 1, n * keys in a chunk] float32: 0, or -inf for keys that the query does not see."""
    runs: list[PairRun]
    """Runs that cover all N * n pairs, tile by tile."""


class TrustedTiles(NamedTuple):
    """Shapes that give the same bits on this machine; ascending."""

    queries: tuple[int, ...]
    pairs: tuple[int, ...]


def attend_tiles(
    q: Tensor,
    kv: LayerKV,
    group: TileGroup,
    out: Tensor,
    workspace: Workspace,
    options: AttentionOptions = DEFAULT_OPTIONS,
    sinks: Tensor | None = None,
) -> None:
    """Attend with q [T, H, D] of the whole batch; fill the group's queries in out [T, H, D], which is mutated. `sinks`
    [H] are float32."""
    kv_heads, _, _, head_dim = kv.k.shape
    tiles, queries, chunks = group.num_tiles, group.num_queries, group.num_chunks
    folded = q.index_select(0, group.query_index).view(tiles, queries, kv_heads, -1, head_dim)
    fold = folded.shape[3]
    folded = folded.permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, queries * fold, head_dim)
    by_run = [_scores(folded, kv, run, workspace) for run in group.runs]
    scores = by_run[0] if len(by_run) == 1 else torch.cat(by_run, 1)
    keys = scores.shape[-1]
    weights = torch.empty(kv_heads, tiles, queries * fold, chunks * keys, dtype=torch.float32, device=q.device)
    apart = weights.view(kv_heads, tiles, queries * fold, chunks, keys).transpose(2, 3)
    apart.copy_(scores.view(kv_heads, tiles, chunks, queries * fold, keys))
    # The bias is 0 or -inf: exact, with or without a fused multiply-add.
    by_query = weights.view(kv_heads, tiles, queries, fold, chunks * keys)
    scale = options.scale or head_dim**-0.5
    if options.soft_cap is not None:
        _cap_chunks(weights, scale, options.soft_cap, keys)
        scale = 1.0
    torch.add(group.bias, by_query, alpha=scale, out=by_query)
    if q.dtype == torch.float16:  # hidden scores may be infinite: see `write_kv`
        by_query.masked_fill_(group.bias < 0, -torch.inf)
    weights = _softmax(weights, sinks)
    apart = weights.view(kv_heads, tiles, queries * fold, chunks, keys).transpose(2, 3)
    parts = _weighted_values(apart.to(q.dtype).reshape(kv_heads, tiles * chunks, -1, keys), kv, group, workspace)
    parts = parts.view(kv_heads, tiles, chunks, queries * fold, head_dim)
    total = torch.zeros(kv_heads, tiles, queries * fold, head_dim, dtype=torch.float32, device=q.device)
    for chunk in range(chunks):
        total += parts[:, :, chunk]
    y = total.to(q.dtype).view(kv_heads, tiles, queries, fold, head_dim).permute(1, 2, 0, 3, 4)
    y = y.reshape(tiles * queries, -1, head_dim).index_select(0, group.place_index)
    out.index_copy_(0, group.token_index, y)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [Hk, N, Q · H / Hk, keys], with the sinks of the heads as one key more.

    A whole vector is added, so that no key's place in a vector changes.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    kv_heads, tiles, rows, keys = scores.shape
    block = scores.new_full((kv_heads, tiles, rows, _LANES), -torch.inf)
    fold = len(sinks) // kv_heads
    block.view(kv_heads, tiles, -1, fold, _LANES)[..., 0] = sinks.view(kv_heads, 1, 1, fold)
    return torch.softmax(torch.cat((scores, block), -1), -1)[..., :keys].contiguous()


def _cap_chunks(scores: Tensor, scale: float, cap: float, keys: int) -> None:
    """Scale and cap scores [..., n * keys], which are mutated.

    The tangent of a vector's lane and that of a leftover element may differ in the last bit. Chunk by chunk and in one
    thread, every key is at the same place each time.
    """
    for chunk in scores.view(-1, keys):
        soft_cap(chunk.mul_(scale), cap)


def _scores(folded: Tensor, kv: LayerKV, run: PairRun, workspace: Workspace) -> Tensor:
    """Scores [Hk, run's pairs, M, keys in a chunk] in the model's dtype, from folded [Hk, N, M, D]."""
    kv_heads, _, rows, head_dim = folded.shape
    pairs = run.tile_index.shape[0]
    keys, _ = workspace.gather(kv, run.block_index, folded.dtype)
    q = folded.index_select(1, run.tile_index).view(kv_heads * pairs, rows, head_dim)
    scores = _query_key(q, keys.view(kv_heads * pairs, -1, head_dim))
    return scores.view(kv_heads, pairs, rows, -1)[:, : run.num_pairs]


def _weighted_values(weights: Tensor, kv: LayerKV, group: TileGroup, workspace: Workspace) -> Tensor:
    """Weighted values [Hk, N * n, M, D] float32 from weights [Hk, N * n, M, keys in a chunk] in the model's dtype."""
    kv_heads, _, rows, keys = weights.shape
    head_dim = kv.v.shape[-1]
    parts, start = [], 0
    for run in group.runs:
        pairs = run.tile_index.shape[0]
        _, values = workspace.gather(kv, run.block_index, weights.dtype)
        mine = weights[:, start : start + run.num_pairs]
        if run.num_pairs < pairs:
            mine = torch.nn.functional.pad(mine, (0, 0, 0, 0, 0, pairs - run.num_pairs))
        mine = mine.reshape(kv_heads * pairs, rows, keys)
        y = _weight_value(mine, values.view(kv_heads * pairs, keys, head_dim))
        parts.append(y.view(kv_heads, pairs, rows, head_dim)[:, : run.num_pairs].float())
        start += run.num_pairs
    return torch.cat(parts, 1)


def _query_key(q: Tensor, keys: Tensor) -> Tensor:
    """Product of q [n, M, D] and keys [n, C, D]: [n, M, C]."""
    return torch.bmm(q, keys.transpose(1, 2))


def _weight_value(weights: Tensor, values: Tensor) -> Tensor:
    """Product of weights [n, M, C] and values [n, C, D]: [n, M, D]."""
    return torch.bmm(weights, values)


@functools.cache
@torch.inference_mode()
def trusted_tiles(
    kv_heads: int, fold: int, head_dim: int, keys: int, dtype: torch.dtype, num_threads: int
) -> TrustedTiles:
    """Tile sizes and numbers of pairs whose two products give the bits of BASE queries in calls of BASE pairs.

    Where those bits depend on a query's place or on other queries, a tile is one query and a call one pair: the shape
    is then always the same.
    """
    counts = tuple(count for count in _PAIRS if count * kv_heads <= _MAX_TRIAL or count <= BASE)
    pairs, rows = max(counts), max(_TILES) * fold
    generator = torch.Generator().manual_seed(head_dim)
    pairs *= kv_heads
    q, k = (x.to(dtype) for x in trial_operands((pairs, rows, head_dim), (pairs, keys, head_dim), generator))
    weights, values = (x.to(dtype) for x in trial_operands((pairs, rows, keys), (pairs, head_dim, keys), generator))
    trials = (
        _Trial(_query_key, q, k, kv_heads, fold),
        _Trial(_weight_value, weights, values.transpose(1, 2).contiguous(), kv_heads, fold),
    )
    if not all(trial.is_stable() for trial in trials):
        return TrustedTiles((1,), (1,))
    counts = tuple(count for count in counts if all(trial.agrees(BASE, count) for trial in trials))
    queries = tuple(size for size in _TILES if all(trial.agrees(size, count) for trial in trials for count in counts))
    return TrustedTiles(queries, counts)


class _Trial:
    """Trial of one of the two batched products, on pairs of [rows, K] and the other operand."""

    def __init__(
        self, product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, kv_heads: int, fold: int
    ) -> None:
        self._product = product
        self._left, self._right = left, right
        self._kv_heads, self._fold = kv_heads, fold
        self._expected = self._by_base(left, right)

    def _by_base(self, left: Tensor, right: Tensor) -> Tensor:
        """Products in calls of the base's shape; a call that is not full is filled with the first pairs."""
        rows, count, total = BASE * self._fold, BASE * self._kv_heads, left.shape[0]
        parts = []
        for start in range(0, total, count):
            pairs = torch.arange(start, start + count).remainder_(total)
            tiles = left[pairs].split(rows, 1)
            parts.append(torch.cat([self._product(tile.contiguous(), right[pairs]) for tile in tiles], 1))
        return torch.cat(parts)[:total]

    def is_stable(self) -> bool:
        """True when calls of the base's shape do not depend on a query's place or on other queries."""
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            pairs = torch.randperm(self._left.shape[0], generator=generator)
            rows = torch.randperm(self._left.shape[1], generator=generator)
            moved = self._by_base(self._left[pairs][:, rows], self._right[pairs])
            if not torch.equal(moved, self._expected[pairs][:, rows]):
                return False
        return True

    def agrees(self, queries: int, pairs: int) -> bool:
        """True when calls of `pairs` pairs with tiles of `queries` queries give the base's bits.

        A few small tiles are tried, so that all places in the base's tile occur.
        """
        rows, count = queries * self._fold, pairs * self._kv_heads
        starts = {*range(0, BASE * self._fold, rows), self._left.shape[1] - rows}
        for pair in (slice(0, count), slice(-count, None)):
            for start in starts:
                where = pair, slice(start, start + rows)
                y = self._product(self._left[where].contiguous(), self._right[pair])
                if not torch.equal(y, self._expected[where]):
                    return False
        return True
