"""Rows of a step on a GPU, and the launches of a layer. Needs Triton."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from ..rms_norm import NormWeight
from ..rope import Rotation
from ..staging import staged, to_device
from .invariant import invariant_attention_kernel, invariant_constants
from .native import RowArrays
from .options import WholeRow, Window, window_size
from .schedule import TILE_FIELDS, Capacity, Layout, Planner, TileGroup
from .settle import BLOCK, advance_kernel, settle_kernel
from .torch import LayerKV
from .triton import Features, attention_constants, attention_kernel
from .triton_windows import window_kind
from .whole_prompts import WholePrompts, find_whole_prompts
from .write import write_constants, write_kernel

_LOG2_E = 1.4426950408889634
# Largest window: a larger one hides nothing, and 32 bits hold this one.
_MAX_WINDOW = 1 << 30


class _Prologue(NamedTuple):
    """First part of a launch of attention: normalise and rotate queries."""

    rotation: Rotation
    norm: NormWeight | None
    writes: bool
    """True: and write the tile's new keys and values."""


class DeviceStep:
    """Rows of a step as the kernels read them: one array, copied once for all layers without waiting."""

    def __init__(
        self,
        planner: Planner,
        dtype: torch.dtype,
        block_size: int,
        rows: RowArrays | Capacity,
        device: torch.device,
        first_key: int = 0,
        storage: Tensor | None = None,
    ) -> None:
        """Plan the launches of a step; no query sees positions before `first_key`.

        With a Capacity there are no rows until `refill`, and the tensors and launches stay the same for all rows.
        `storage` is int32 memory for the array of such a step; steps that never run at the same time may share it.

        Raises:
            ValueError: the capacity's rows are not one tile each, or the storage is too small.
        """
        self._planner, self._dtype, self._block_size, self._first_key = planner, dtype, block_size, first_key
        self._device = device
        self._layout = planner.reserve(rows) if isinstance(rows, Capacity) else planner.layout(rows)
        self._parts: tuple[Tensor, Tensor] | None = None
        self._whole: WholePrompts | None = None
        if isinstance(rows, Capacity):
            size = self._layout.size
            self._data = torch.zeros(size, dtype=torch.int32, device=device) if storage is None else storage
            if len(self._data) < size:
                raise ValueError(f"the storage must have at least {size} numbers; got {len(self._data)}")
            empty = np.empty(0, dtype=np.int64)
            self.refill(RowArrays(*(empty for _ in RowArrays._fields)))
        else:
            self._data = to_device(planner.pack(rows, self._layout), device)
            self._parts = self._make_parts()
            if planner.min_fused_tokens is not None:
                self._whole = find_whole_prompts(rows, planner.max_short_queries, first_key, planner.min_fused_tokens)
        # How many programs of each tile and KV head have written their part; 0 between launches.
        self._arrived = torch.zeros(
            self._layout.num_tiles * planner.shape.num_kv_heads, dtype=torch.int32, device=device
        )
        self._slots = self._data[self._layout.first_slot :]
        self._table = self._data[self._layout.first_block :]

    def _make_parts(self) -> tuple[Tensor, Tensor]:
        """Allocate the splits' results. The launches of a step with rows share them; a captured graph takes them from
        the memory that all graphs share."""
        sizes = [
            group.num_tiles * group.num_queries * self._planner.shape.num_heads * group.num_splits
            for group in self._layout.groups
            if group.num_splits > 1
        ]
        size = max(sizes, default=0)
        sums = torch.empty(size, dtype=torch.float32, device=self._device)
        return torch.empty(size * self._planner.shape.head_dim, dtype=torch.float32, device=self._device), sums

    @property
    def layout(self) -> Layout:
        """Shape of the launches: steps of equal layouts can share a captured graph."""
        return self._layout

    def refill(self, rows: RowArrays) -> None:
        """Replace the rows in the same tensors, for the next replay of a captured graph.

        Raises:
            ValueError: they do not fit.
        """
        packed = self._planner.pack(rows, self._layout)
        self._data[: len(packed)].copy_(staged(packed, self._device), non_blocking=True)

    def settle(self, overshoot: Tensor, positions: Tensor) -> None:
        """Move the rows to earlier positions, which only the device knows, in one launch before the others.

        Args:
            overshoot: [B] int64, by how many positions.
            positions: [T] int64 of the tokens; corrected too.
        """
        arrays = self._data, self._table, self._slots, positions, overshoot
        settle_kernel[(self._layout.num_tiles,)](*arrays, BLOCK_SIZE=self._block_size, BLOCK=BLOCK, num_warps=1)

    def advance(self, first: Tensor, left: Tensor, positions: Tensor, step: int) -> None:
        """Put rows of one query `step` positions after their `first`, or `left` if that is less; in one launch.

        Args:
            first, left: [R] int64.
            positions: [R] int64 of the tokens; mutated. Those of padding rows stay.
            step: at least 1. A row whose `left` is smaller has no slot: nothing is written for it.
        """
        arrays = self._data, self._table, self._slots, first, left, positions
        advance_kernel[(self._layout.num_tiles,)](*arrays, step, BLOCK_SIZE=self._block_size, num_warps=1)

    def attend_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: NormWeight | None,
        kv: LayerKV,
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with a projection's output, heads side by side: qkv [T, (H + 2 Hk) · D], which may be mutated; return
        [T, H · D]. With a window a query at position p sees (p - window, p]. If qkv has queries alone, [T, H · D], the
        cache holds the tokens' keys and values already.

        Queries and keys are first normalised, if there is a `norm` (of scale [H + Hk, D]), and rotated, in float32.
        Values that are not finite are written as 0, and keys are limited: see `write_kv`. `sinks` [H] are float32.
        """
        prologue = whole = None
        if qkv.shape[1] == self._planner.shape.num_heads * self._planner.shape.head_dim:
            assert not self._planner.options.shared, "such a model has keys in each layer"
            assert not self._planner.invariant, "such a model is refused"
            prologue = _Prologue(rotation, norm, writes=False)
            self._check(qkv, rotation, kv, kinds=0)
        elif self._planner.options.shared or self._planner.invariant:
            self.write_qkv(qkv, rotation, norm, kv)
        elif self._whole is not None and self._whole.serves(window, sinks, kv, qkv.dtype):
            whole = self._whole
            self.write_qkv(qkv, rotation, norm, kv, in_place=True)
        else:
            prologue = _Prologue(rotation, norm, self._layout.writes)
            if prologue.writes:
                self._check(qkv, rotation, kv)
            else:  # queries, most of what would be read and written, are rotated when they are attended with
                self.write_qkv(qkv, rotation, norm, kv, queries=False)
        out = self._attend(qkv, prologue, kv, window, sinks, has_long=whole is None)
        if whole is not None:
            whole.attend(qkv, out, self._planner.shape, self._planner.options.scale)
        return out

    def write_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: NormWeight | None,
        kv: LayerKV,
        *,
        queries: bool = True,
        in_place: bool = False,
    ) -> Tensor:
        """Normalise, rotate and write as `attend_qkv` does; return the queries [T, H, D], a view of `qkv`. Without
        `queries` they stay as they are; with `in_place` the keys and values of `qkv` become those of the cache."""
        num_heads, num_kv_heads, dim = self._planner.shape
        self._check(qkv, rotation, kv)
        kinds = self._kinds
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], heads[:, -num_kv_heads:]
        config = self._planner.write_config
        parts = kinds * triton.cdiv(num_kv_heads, config.block_heads)
        if queries:
            parts += triton.cdiv(num_heads, config.block_heads)
        constants = write_constants(
            *(self._planner.shape, config, self._planner.options),
            norm=norm is not None,
            queries=queries,
            in_place=in_place,
        )
        scale, root = (norm.scale, norm.root_value) if norm is not None else (q, 0.0)
        write_kernel[(len(q), parts)](
            *(q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1)),
            *(rotation.cos, rotation.sin, rotation.cos.stride(0), scale, root * root),
            *(kv.k, kv.v, kv.k.stride(0), kv.v.stride(0), self._slots),
            **constants,
            num_warps=config.num_warps,
        )
        return q

    @property
    def _kinds(self) -> int:
        """Number of vectors of a KV head in a projection's output."""
        return 1 if self._planner.options.shared else 2

    def _check(self, qkv: Tensor, rotation: Rotation, kv: LayerKV, kinds: int | None = None) -> None:
        num_heads, num_kv_heads, dim = self._planner.shape
        kinds = self._kinds if kinds is None else kinds
        shape = (self._layout.num_tokens, (num_heads + kinds * num_kv_heads) * dim)
        if qkv.shape != shape or qkv.dtype != self._dtype or qkv.stride(1) != 1:
            raise ValueError(f"qkv must be {self._dtype} {shape} with contiguous rows; got {qkv.dtype} {qkv.shape}")
        assert rotation.rows is None, "it does not look up angles"
        for cache in kv:
            inner = (num_kv_heads, cache.shape[1], self._block_size, dim)
            if cache.shape != inner or cache.stride()[1:] != (self._block_size * dim, dim, 1):
                raise ValueError(f"a cache must be {inner}, contiguous but for heads; got {tuple(cache.shape)}")
            if cache[0].numel() >= 1 << 31:
                raise ValueError(f"a head must have less than 2^31 elements in a cache; got {cache[0].numel()}")
            if cache.dtype not in (self._dtype, torch.float8_e4m3fn):
                raise ValueError(f"a cache must be {self._dtype} or torch.float8_e4m3fn; got {cache.dtype}")

    def _attend(
        self,
        qkv: Tensor,
        prologue: _Prologue | None,
        kv: LayerKV,
        window: Window,
        sinks: Tensor | None,
        *,
        has_long: bool = True,
    ) -> Tensor:
        """Attend for all groups, or without `has_long` for that of the short rows."""
        num_heads, _, dim = self._planner.shape
        out = torch.empty(len(qkv), num_heads * dim, dtype=qkv.dtype, device=qkv.device)
        parts = self._parts or self._make_parts()
        tiles = self._data
        for group in self._layout.groups if has_long else self._layout.groups[:-1]:
            results = (out, *(parts if group.num_splits > 1 else (out, out)))
            if self._planner.invariant:
                self._attend_invariant(qkv, kv, group, tiles, results, window, sinks)
            else:
                self._attend_group(qkv, prologue, kv, group, tiles, results, window, sinks)
            tiles = tiles[group.num_tiles * TILE_FIELDS :]
        return out

    def _attend_group(
        self,
        qkv: Tensor,
        prologue: _Prologue | None,
        kv: LayerKV,
        group: TileGroup,
        tiles: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        window: Window,
        sinks: Tensor | None,
    ) -> None:
        """Attend for one group of tiles; `results` are out and, with splits, their parts and sums. Without a prologue
        the queries are already rotated."""
        shape, options = self._planner.shape, self._planner.options
        config = group.config
        out, parts, part_sums = results
        norm = None if prologue is None else prologue.norm
        is_there = window_kind(window), options.soft_cap is not None, sinks is not None
        writes = prologue is not None and prologue.writes
        features = Features(group.num_splits > 1, *is_there, prologue is not None, writes, norm is not None)
        constants = attention_constants(
            *(shape, self._block_size, group.block_m, config.block_n),
            is_float32=qkv.dtype == torch.float32,
            features=features,
            options=options,
        )
        cos, sin = (qkv, qkv) if prologue is None else prologue.rotation[:2]
        scale, root = (qkv, 0.0) if norm is None else (norm.scale, norm.root_value)
        attention_kernel[(group.num_tiles * shape.num_kv_heads, group.num_splits)](
            *(qkv, qkv.stride(0), shape.head_dim, kv.k, kv.v, kv.k.stride(0), kv.v.stride(0)),
            *(cos, sin, cos.stride(0), scale, root * root, self._slots),
            *(tiles, self._table, out, parts, part_sums, self._arrived, part_sums if sinks is None else sinks),
            *((options.scale or shape.head_dim**-0.5) * _LOG2_E, (options.soft_cap or 1.0) * _LOG2_E),
            *(self._first_key, min(window_size(window or 0), _MAX_WINDOW)),
            *(group.num_queries, group.num_splits),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _attend_invariant(
        self,
        qkv: Tensor,
        kv: LayerKV,
        group: TileGroup,
        tiles: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        window: Window,
        sinks: Tensor | None,
    ) -> None:
        """`_attend_group` after the queries are rotated and the keys are written, batch-invariant."""
        assert not isinstance(window, WholeRow), "no model with such layers is batch-invariant"
        shape, options, config = self._planner.shape, self._planner.options, group.config
        constants = invariant_constants(
            *(shape, self._block_size, group.block_m, config.block_n),
            is_float32=qkv.dtype == torch.float32,
            window=window_kind(window),
            cap=options.soft_cap is not None,
            sinks=sinks is not None,
        )
        invariant_attention_kernel[(group.num_tiles * shape.num_kv_heads, group.num_splits)](
            *(qkv, qkv.stride(0), shape.head_dim, kv.k, kv.v, kv.k.stride(0), kv.v.stride(0)),
            *(tiles, self._table, *results, self._arrived, results[2] if sinks is None else sinks),
            *((options.scale or shape.head_dim**-0.5) * _LOG2_E, (options.soft_cap or 1.0) * _LOG2_E),
            *(self._first_key, min(window_size(window or 0), _MAX_WINDOW)),
            *(group.num_queries, int(group.num_splits == 1)),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
