"""Batch-invariant backend: a query's result depends, bit for bit, on its own row alone. The kernel explains how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.linear.invariant import pieces
from ...kernels.paged_attention import (
    LayerKV,
    PairRun,
    TileGroup,
    TrustedTiles,
    Workspace,
    attend_tiles,
    trusted_tiles,
    write_kv,
)
from ...kernels.rope import apply_rope_invariant
from ..batch import SequenceRows
from . import AttentionSpec
from .separate import SeparateSteps
from .tables import RowTables

# Fewest keys in a chunk. A multiple of 16, so that a vector of floats never spans two chunks.
_MIN_KEYS = 128
_LANES = 16
# Most queries of a tile for which padding is cheaper than another tile.
_CHEAP_QUERIES = 8
# Most scores computed at once, over all heads: bounds the memory.
_MAX_SCORES = 1 << 22
# Most chunks by which a tile is padded to run with longer ones.
_MAX_PADDING = 2


class _Tile(NamedTuple):
    """Queries of a row from its query `first` on, in a tile of `size`, and the chunks that they see."""

    row: int
    first: int
    num_queries: int
    size: int
    chunks: tuple[int, int]


@dataclass(slots=True, frozen=True)
class InvariantPlan:
    """Plan of `InvariantAttention` for one step."""

    slots: Tensor
    """[T] int64: cache slot of each token."""
    by_window: dict[int | None, list[TileGroup]]


class InvariantAttention(SeparateSteps):
    """Tiles of queries against chunks of keys at fixed positions. Implements AttentionBackend."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec, apply_rope_invariant)
        self._workspace = Workspace()
        self._trusted(_MIN_KEYS)  # when the model is made, not in its first step

    def _trusted(self, keys: int) -> TrustedTiles:
        spec = self._spec
        fold = spec.num_heads // spec.num_kv_heads
        return trusted_tiles(spec.num_kv_heads, fold, spec.head_dim, keys, spec.dtype, torch.get_num_threads())

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> InvariantPlan:
        """See AttentionBackend."""
        tables = RowTables(rows, block_size)
        unit = math.lcm(block_size, _LANES)
        keys = -(-_MIN_KEYS // unit) * unit
        trusted = self._trusted(keys)
        by_window = {}
        for window in self._spec.windows:
            tiles = _tiles(tables, trusted.queries, keys, window)
            by_window[window] = [
                self._group(group, tables, trusted.pairs, keys, window) for group in self._split(tiles, keys)
            ]
        return InvariantPlan(self._tensor(tables.slots(positions)), by_window)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        plan: InvariantPlan,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See SeparateSteps."""
        write_kv(k, v, kv, plan.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in plan.by_window[window]:
            attend_tiles(q, kv, group, out, self._workspace, self._spec.options, sinks)
        return out.view(q.shape[0], -1)

    def _split(self, tiles: Sequence[_Tile], keys: int) -> list[list[_Tile]]:
        """Split tiles of one size into groups with about as many chunks, each small enough for the memory."""
        groups: list[list[_Tile]] = []
        for tile in sorted(tiles, key=lambda t: (t.size, t.chunks[0] - t.chunks[1])):
            longest = groups[-1][0] if groups else None
            num_chunks = tile.chunks[1] - tile.chunks[0]
            if longest is not None and longest.size == tile.size:
                most = longest.chunks[1] - longest.chunks[0]
                scores = (len(groups[-1]) + 1) * tile.size * self._spec.num_heads * most * keys
                if most - num_chunks <= _MAX_PADDING and scores <= _MAX_SCORES:
                    groups[-1].append(tile)
                    continue
            groups.append([tile])
        return groups

    def _group(
        self, tiles: list[_Tile], tables: RowTables, pair_sizes: tuple[int, ...], keys: int, window: int | None
    ) -> TileGroup:
        size = tiles[0].size
        num_chunks = max(tile.chunks[1] - tile.chunks[0] for tile in tiles)
        row = np.array([tile.row for tile in tiles])
        first = np.array([tile.first for tile in tiles])
        count = np.array([tile.num_queries for tile in tiles])
        low = np.array([tile.chunks[0] for tile in tiles])
        place = np.arange(size)
        real = place < count[:, None]
        within = first[:, None] + np.minimum(place, count[:, None] - 1)
        tokens = tables.token_starts[row, None] + within
        positions = (tables.starts[row, None] + within)[:, :, None]
        key_positions = (low[:, None] * keys + np.arange(num_chunks * keys))[:, None, :]
        hidden = tables.hidden(positions, key_positions, window)
        bias = torch.zeros(hidden.shape, dtype=torch.float32, device=self._spec.device)
        per_chunk = keys // tables.block_size
        blocks = tables.blocks(row, low * per_chunk, num_chunks * per_chunk).reshape(-1, per_chunk)
        return TileGroup(
            num_tiles=len(tiles),
            num_queries=size,
            num_chunks=num_chunks,
            query_index=self._tensor(tokens.reshape(-1)),
            place_index=self._tensor(np.flatnonzero(real)),
            token_index=self._tensor(tokens[real]),
            bias=bias.masked_fill_(self._tensor(hidden), -torch.inf).unsqueeze(2),
            runs=self._runs(blocks, num_chunks, pair_sizes),
        )

    def _runs(self, blocks: np.ndarray, num_chunks: int, pair_sizes: tuple[int, ...]) -> list[PairRun]:
        """Runs of calls for all pairs; `blocks` [pairs, blocks in a chunk]."""
        runs, start = [], 0
        for count, size in pieces(len(blocks), pair_sizes, cheap=0):
            pair = np.minimum(np.arange(start, start + size), start + count - 1)
            runs.append(PairRun(count, self._tensor(pair // num_chunks), self._tensor(blocks[pair].reshape(-1))))
            start += count
        return runs


def _tiles(tables: RowTables, sizes: tuple[int, ...], keys: int, window: int | None) -> list[_Tile]:
    """Queries of all rows, cut into tiles of trusted sizes."""
    tiles = []
    for row, (start, length) in enumerate(zip(tables.starts.tolist(), tables.query_lens.tolist(), strict=True)):
        first = 0
        for count, size in pieces(length, sizes, _CHEAP_QUERIES):
            low = 0 if window is None else max(start + first - window + 1, 0) // keys
            tiles.append(_Tile(row, first, count, size, (low, (start + first + count - 1) // keys + 1)))
            first += count
    return tiles
