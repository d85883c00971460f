"""Attention with PyTorch alone: the CPU path without the C++ kernel, and the reference on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import (
    LayerKV,
    LongRow,
    QueryTile,
    ShortGroup,
    WholeRow,
    Window,
    Workspace,
    attend_long,
    attend_short,
    first_seen,
    window_size,
    write_kv,
)
from ...kernels.rope import Rotation, apply_rope, apply_rope_invariant, rope_of_part
from ..batch import SequenceRows
from . import AttentionBackend, AttentionSpec
from .tables import RowTables

if TYPE_CHECKING:
    from ..layers.norm import RMSNorm

# Most queries of a row that runs in a group; products of longer rows are large enough alone.
MAX_SHORT_QUERIES = 16
# Most queries up to which short rows are padded to a common number; this costs little, as keys dominate.
_FEW_QUERIES = 8
# Queries in a tile of a long row: bounds the mask's memory, and keys after a tile's last query are not read.
_TILE = 512
# Padded keys in a group that cost about as much as another group.
_PADDING_LIMIT = 1024


@dataclass(slots=True, frozen=True)
class _WindowPlan:
    """Plan for the layers with one window."""

    groups: list[ShortGroup]
    long_rows: list[LongRow]


@dataclass(slots=True, frozen=True)
class TorchPlan:
    """Plan of `TorchAttention` for one step."""

    slots: Tensor
    """[T] int64: cache slot of each token."""
    by_window: dict[Window, _WindowPlan]


def split_by_length(rows: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
    """Groups of `rows` that are worth padding to their longest row; each in ascending order."""
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(rows, key=lambda r: -int(lengths[r])):
        length = int(lengths[row])
        if not groups or padding + longest - length > _PADDING_LIMIT:
            groups.append([])
            longest, padding = length, 0
        padding += longest - length
        groups[-1].append(row)
    return [sorted(group) for group in groups]


class TorchAttention(AttentionBackend):
    """Backend that runs rows with few queries in padded groups, long rows one by one."""

    _rotate = staticmethod(apply_rope)

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._workspace = Workspace()
        self._rope: Callable[[Tensor, Tensor, Tensor], Tensor] = self._rotate
        options = spec.options
        if options.rotary_dim is not None or options.interleaved:
            self._rope = rope_of_part(
                self._rotate, options.rotary_dim or spec.head_dim, interleaved=options.interleaved
            )

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> TorchPlan:
        """See AttentionBackend."""
        tables = RowTables(rows, block_size)
        few = [b for b, n in enumerate(rows.query_lens) if n <= _FEW_QUERIES]
        more = [b for b, n in enumerate(rows.query_lens) if _FEW_QUERIES < n <= MAX_SHORT_QUERIES]
        many = [b for b, n in enumerate(rows.query_lens) if n > MAX_SHORT_QUERIES]
        by_window = {}
        for window in self._spec.windows:
            sizes = tables.lengths
            if window is not None:
                sizes = np.minimum(sizes, window_size(window) + tables.query_lens)
            groups = self._split(few, sizes) + self._split(more, sizes)
            by_window[window] = _WindowPlan(
                [self._group(np.asarray(group), tables, window) for group in groups],
                [self._long_row(row, tables, window) for row in many],
            )
        return TorchPlan(self._tensor(tables.slots(positions)), by_window)

    def forward_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: RMSNorm | None,
        kv: LayerKV,
        plan: TorchPlan,
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend: norm, rotation, write and attention one by one."""
        spec = self._spec
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        has_keys = heads.shape[1] > spec.num_heads
        num_qk = spec.num_heads + spec.num_kv_heads if has_keys else spec.num_heads
        qk = heads[:, :num_qk] if norm is None else norm(heads[:, :num_qk])
        assert rotation.rows is None, "it does not look up angles"
        qk = self._rope(qk, rotation.cos, rotation.sin)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        if has_keys:
            write_kv(k, k if spec.options.shared else heads[:, num_qk:], kv, plan.slots)
        work, extra = plan.by_window[window], (self._workspace, spec.options, sinks)
        if not work.long_rows and len(work.groups) == 1:
            return attend_short(q, kv, work.groups[0], None, *extra).reshape(q.shape[0], -1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in work.groups:
            attend_short(q, kv, group, out, *extra)
        for row in work.long_rows:
            attend_long(q, kv, row, out, *extra)
        return out.view(q.shape[0], -1)

    def _split(self, rows: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
        return split_by_length(rows, lengths)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._spec.device)

    def _group(self, rows: np.ndarray, tables: RowTables, window: Window) -> ShortGroup:
        query_lens = tables.query_lens[rows]
        num_queries = int(query_lens.max())
        first = tables.first_blocks(rows, window)
        num_blocks = int((tables.num_blocks[rows] - first).max())
        place = np.arange(num_queries)
        real = place < query_lens[:, None]
        # A padded query repeats its row's last query.
        within = np.minimum(place, query_lens[:, None] - 1)
        tokens = tables.token_starts[rows, None] + within
        last_seen = within
        if isinstance(window, WholeRow):
            last_seen = np.broadcast_to(query_lens[:, None] - 1, within.shape)
        positions = (tables.starts[rows, None] + last_seen)[:, :, None]
        key_positions = first[:, None] * tables.block_size + np.arange(num_blocks * tables.block_size)
        hidden = tables.hidden(positions, key_positions[:, None, :], window)
        key_range = None
        if hidden.shape[:2] == (1, 1):
            seen = np.flatnonzero(~hidden)
            key_range = int(seen[0]), int(seen[-1]) + 1
        in_order = len(rows) == len(tables.starts)
        return ShortGroup(
            num_rows=len(rows),
            num_queries=num_queries,
            query_index=None if in_order and real.all() else self._tensor(tokens.reshape(-1)),
            padded_index=None if real.all() else self._tensor(np.flatnonzero(real)),
            token_index=None if in_order else self._tensor(tokens[real]),
            block_index=self._tensor(tables.blocks(rows, first, num_blocks).reshape(-1)),
            key_range=key_range,
            bias=self._group_bias(hidden) if key_range is None and hidden.any() else None,
        )

    def _group_bias(self, hidden: np.ndarray) -> Tensor:
        """Bias of a group from `hidden` [B, Q, keys]."""
        rows, queries, keys = hidden.shape
        kv_heads = self._spec.num_kv_heads
        fold = self._spec.num_heads // kv_heads
        bias = self._bias(self._tensor(hidden)).view(1, rows, queries, 1, keys)
        return bias.expand(kv_heads, -1, -1, fold, -1).reshape(kv_heads * rows, queries * fold, keys)

    def _bias(self, hidden: Tensor) -> Tensor:
        bias = torch.zeros(hidden.shape, dtype=self._spec.dtype, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)

    def _long_row(self, row: int, tables: RowTables, window: Window) -> LongRow:
        index = np.asarray([row])
        first = tables.first_blocks(index, window)
        blocks = tables.blocks(index, first, int(tables.num_blocks[row] - first[0]))[0]
        base = int(first[0]) * tables.block_size
        start, count = int(tables.starts[row]), int(tables.query_lens[row])
        token = int(tables.token_starts[row])
        least = max(tables.first_key - base, 0)
        tiles = [
            self._tile((begin, min(begin + _TILE, count)), (start, start + count), base, least, window)
            for begin in range(0, count, _TILE)
        ]
        return LongRow((token, token + count), self._tensor(blocks), tiles)

    def _tile(self, queries: tuple[int, int], row: tuple[int, int], base: int, least: int, window: Window) -> QueryTile:
        """Tile of some `queries` of a row of positions [start, end), over keys gathered from position `base` on, of
        which no query sees the first `least`."""
        (begin, end), (start, row_end) = queries, row
        sees_row = isinstance(window, WholeRow)
        low = least if window is None else max(first_seen(start + begin, window) - base, least)
        high = (row_end if sees_row else start + end) - base
        if (
            not sees_row
            and high - low == end - begin
            and (window is None or first_seen(start + end - 1, window) <= start + begin)
        ):
            return QueryTile((begin, end), (low, high), None)
        positions = torch.arange(start + begin, start + end, device=self._spec.device)[:, None]
        keys = torch.arange(base + low, base + high, device=self._spec.device)
        if sees_row:
            return QueryTile((begin, end), (low, high), self._bias(keys.expand(end - begin, -1) >= row_end))
        hidden = keys > positions
        if window is not None:
            first = first_seen(np.arange(start + begin, start + end), window)
            hidden |= keys < self._tensor(first)[:, None]
        return QueryTile((begin, end), (low, high), self._bias(hidden))


class InvariantAttention(TorchAttention):
    """Batch-invariant backend: each query is a group of its own. The shapes of its products then depend on its position
    alone, so a query's result has the same bits in any batch and any chunk of a prompt."""

    _rotate = staticmethod(apply_rope_invariant)

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> TorchPlan:
        """See AttentionBackend."""
        ones, tables = [1] * len(positions), zip(rows.block_tables, rows.query_lens, strict=True)
        of_tokens = [table for table, count in tables for _ in range(count)]
        assert not any(isinstance(window, WholeRow) for window in self._spec.windows), "queries are alone here"
        alone = SequenceRows(rows.token_ids, ones, positions.tolist(), of_tokens, rows.first_key)
        return super().plan(alone, positions, block_size)

    def _split(self, rows: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
        return [[row] for row in rows]
