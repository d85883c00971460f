"""Division of a step's rows in tiles and launches of the GPU kernels: pure functions of host arrays without Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..tuning.configs import AttentionConfig, KVWriteConfig
from ..tuning.store import NO_CONFIGS, Configs
from .native import RowArrays, Shape
from .options import DEFAULT_OPTIONS, AttentionOptions

TILE_FIELDS = 8
"""Numbers of a tile: first token, queries (0: an empty tile), position of the first query, index of the row's first
block in the block table, first position of the row, row, queries of the row; then a zero for alignment."""
# Arrays begin at multiples of 16 bytes: the kernels are recompiled for pointers with another alignment.
_ALIGNMENT = 4

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256
# Splits of a tile of short rows, for any number of rows: one long context among many short ones must not delay the
# launch.
_MIN_SPLITS, _MAX_SPLITS = 4, 64
MIN_SPLIT_KEYS = 256
"""Fewest keys of a split: below, a split costs more than it gains."""
MAX_WRITING = 32
"""Most queries times heads of a tile whose program rotates and writes: registers of more would spill."""
WHOLE_KEYS = 1024
"""Most keys of a tile that one program attends to, whatever the number of splits: 16 chunks of 64 keys, several of
which are in flight, take about as long as writing the parts of splits, waiting for the last one and adding them."""
UNIT_KEYS = 512
"""Keys of a unit of batch-invariant attention, counted from key 0: a multiple of every chunk. A context of one unit is
attended to by one program; 32,768 keys of a row give 16 programs four units each."""
INVARIANT_SPLITS = 16
"""Splits among which the units of batch-invariant attention are dealt out, for any context and number of rows. A row of
8 KV heads then has 128 programs, about one for each multiprocessor of an H100."""
# Programs for each multiprocessor: for short rows, and for long ones.
_SHORT_PROGRAMS, _LONG_PROGRAMS = 4, 2
DEFAULT_WRITE = KVWriteConfig(block_heads=8, num_warps=2)
"""Launch config of the write for heads of a power of two."""


class Gpu(NamedTuple):
    """Properties of a device that the schedule depends on."""

    num_processors: int
    """Number of multiprocessors."""
    arch: int
    """Compute capability times ten."""


def describe_gpu(device: torch.device) -> Gpu:
    """Properties of a CUDA device, or a stand-in for the interpreter, which has no multiprocessors."""
    if device.type != "cuda":
        return Gpu(1, 90)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, 10 * properties.major + properties.minor)


class TileGroup(NamedTuple):
    """Tiles that one launch computes."""

    num_tiles: int
    num_queries: int
    """Most queries in a tile."""
    num_splits: int
    """Programs that share a tile's keys; a power of two."""
    block_m: int
    """Queries times query heads for each KV head; a power of two, at least 16."""
    config: AttentionConfig


class Layout(NamedTuple):
    """Sizes of a step's launches. They do not depend on the lengths of contexts."""

    num_tokens: int
    num_blocks: int
    """Blocks of all rows together."""
    short: TileGroup | None
    """Group of the rows that are one tile each."""
    long: TileGroup | None
    """Group of the rows that have several tiles."""

    @property
    def groups(self) -> list[TileGroup]:
        """Groups that are present, in the order of their tiles."""
        return [group for group in (self.short, self.long) if group is not None]

    @property
    def writes(self) -> bool:
        """True when the launch of attention can rotate queries and write keys: each row is one small tile."""
        return self.long is None and self.short is not None and self.short.block_m <= MAX_WRITING

    @property
    def num_tiles(self) -> int:
        """Tiles of all groups."""
        return sum(group.num_tiles for group in self.groups)

    @property
    def first_slot(self) -> int:
        """Index of the slots in the packed array."""
        return self.num_tiles * TILE_FIELDS

    @property
    def first_block(self) -> int:
        """Index of the block table in the packed array."""
        return self.first_slot + -(-self.num_tokens // _ALIGNMENT) * _ALIGNMENT

    @property
    def size(self) -> int:
        """Most numbers in the packed array."""
        return self.first_block + self.num_blocks


class Capacity(NamedTuple):
    """Room for rows, so that captured launches serve any rows that fit."""

    num_rows: int
    """Most short rows."""
    num_queries: int
    """Most queries in a short row."""
    num_tokens: int
    num_blocks: int
    """Blocks of all rows together."""
    has_long: bool = False
    """True if rows of more queries, as prompts are, fit too."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Planner of steps for one model on one device."""

    shape: Shape
    itemsize: int
    """Bytes of an element of a query."""
    gpu: Gpu
    num_splits: int | None = None
    """Splits of all tiles; None: as many as keep the device busy."""
    configs: Configs = NO_CONFIGS
    """Launch configs that were tuned for the device."""
    options: AttentionOptions = DEFAULT_OPTIONS
    invariant: bool = False
    """True: all tiles have one size and one launch config, for `invariant.py`; their splits change no bit."""
    min_fused_tokens: int | None = None
    """Fewest tokens of each whole prompt of a step to which torch attends; None: it never does. See
    `whole_prompts.py`."""

    @property
    def write_config(self) -> KVWriteConfig:
        """Launch config of the kernel that writes keys and values."""
        return self.configs.get(default_write(self.shape.head_dim), padded_dim(self.shape.head_dim), self.itemsize)

    def tuned_shape(self, block_m: int, *, is_long: bool) -> tuple[int, ...]:
        """Shape by which a tuned AttentionConfig is found."""
        return block_m, padded_dim(self.shape.head_dim), self.itemsize, int(is_long)

    @property
    def _fold(self) -> int:
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def max_short_queries(self) -> int:
        """Most queries of a row that is one tile; at least 1."""
        # Tiles with this many queries, times query heads for each KV head, are still bound by memory; in float32 more
        # would spill.
        return max(1, min(64, self._long_block_m()) // self._fold)

    @property
    def _long_queries(self) -> int:
        """Queries in a tile of a long row."""
        if self.invariant:
            return self.max_short_queries
        return self._long_block_m() // self._fold

    def layout(self, rows: RowArrays) -> Layout:
        """Layout for exactly these rows."""
        short = rows.query_lens <= self.max_short_queries
        few, many = rows.query_lens[short], rows.query_lens[~short]
        queries = self._long_queries
        return Layout(
            len(rows.slots),
            len(rows.blocks),
            self._short_group(len(few), int(few.max())) if len(few) else None,
            self._long_group(int((-(-many // queries)).sum()), queries) if len(many) else None,
        )

    def reserve(self, capacity: Capacity) -> Layout:
        """Layout for any rows within `capacity`.

        Raises:
            ValueError: its short rows may be too long to be a tile each.
        """
        if capacity.num_queries > self.max_short_queries:
            raise ValueError(f"num_queries must be at most {self.max_short_queries}; got {capacity.num_queries}")
        group = self._short_group(capacity.num_rows, capacity.num_queries)
        tiles = self.max_long_tiles(capacity.num_tokens)
        long = self._long_group(tiles, self._long_queries) if capacity.has_long and tiles else None
        return Layout(capacity.num_tokens, capacity.num_blocks, group, long)

    def max_long_tiles(self, num_tokens: int) -> int:
        """Most tiles of long rows with `num_tokens` together, of which each may have one that is not full."""
        return num_tokens // self._long_queries + num_tokens // (self.max_short_queries + 1)

    def _short_group(self, num_rows: int, num_queries: int) -> TileGroup:
        block_m = max(16, 1 << (num_queries * self._fold - 1).bit_length())
        return self._group(num_rows, num_queries, block_m, is_long=False)

    def _long_group(self, num_tiles: int, num_queries: int) -> TileGroup:
        return self._group(num_tiles, num_queries, self._long_block_m(), is_long=True)

    def _group(self, num_tiles: int, num_queries: int, block_m: int, *, is_long: bool) -> TileGroup:
        if self.invariant:
            return self._invariant_group(num_tiles, num_queries, is_long=is_long)
        dim = padded_dim(self.shape.head_dim)
        default = default_config(block_m, dim, self.itemsize, self.gpu.arch, is_long)
        config = self.configs.get(default, *self.tuned_shape(block_m, is_long=is_long))
        splits, wanted = 1 if is_long else _MIN_SPLITS, config.programs * self.gpu.num_processors
        # Parts of a head in a sum are read in a few loads.
        most = min(_MAX_SPLITS, 8192 // dim)
        while splits < most and splits * num_tiles * self.shape.num_kv_heads < wanted:
            splits *= 2
        return TileGroup(num_tiles, num_queries, self.num_splits or splits, block_m, config)

    def _invariant_group(self, num_tiles: int, num_queries: int, *, is_long: bool) -> TileGroup:
        """Group whose tiles are as large and computed as those of every other group. If tiles keep the device busy, a
        program takes all splits, and there is no memory for parts."""
        block_m = max(16, 1 << (self.max_short_queries * self._fold - 1).bit_length())
        config = invariant_config(self.shape.head_dim, self.itemsize, self.gpu.arch)
        busy = self.gpu.num_processors * (1 if is_long else _SHORT_PROGRAMS)
        splits = self.num_splits or (1 if num_tiles * self.shape.num_kv_heads >= busy else INVARIANT_SPLITS)
        return TileGroup(num_tiles, num_queries, INVARIANT_SPLITS if splits > 1 else 1, block_m, config)

    def _long_block_m(self) -> int:
        is_wide = padded_dim(self.shape.head_dim) > 128
        least = (16 if is_wide else 32) if self.itemsize == 4 else (64 if is_wide else 128)
        return max(least, 1 << (self._fold - 1).bit_length())

    def pack(self, rows: RowArrays, layout: Layout) -> np.ndarray[Any, Any]:
        """Packed array [n] int32: the tiles, then from `first_slot` the slots (-1: none), then from `first_block` the
        rows' blocks.

        Raises:
            ValueError: the rows do not fit into the layout.
        """
        first_slot, first_block = layout.first_slot, layout.first_block
        if len(rows.slots) > layout.num_tokens or len(rows.blocks) > layout.num_blocks:
            have = f"{len(rows.slots)} tokens in {len(rows.blocks)} blocks"
            raise ValueError(f"there is room for {layout.num_tokens} tokens in {layout.num_blocks} blocks; got {have}")
        packed = np.zeros(first_block + len(rows.blocks), dtype=np.int32)
        packed[first_slot:first_block] = -1
        is_short = rows.query_lens <= self.max_short_queries
        start = 0
        for group, members in ((layout.short, is_short), (layout.long, ~is_short)):
            queries, room = (0, 0) if group is None else (group.num_queries, group.num_tiles)
            which = np.flatnonzero(members)
            if len(which) == 0:
                start += room
                continue
            tiles = make_tiles(rows, which, max(queries, 1))
            if len(tiles) > room:
                raise ValueError(f"there is room for {room} tiles of {queries} queries; the rows make {len(tiles)}")
            packed[start * TILE_FIELDS :][: tiles.size].reshape(tiles.shape)[:] = tiles
            start += room
        packed[first_slot:][: len(rows.slots)] = rows.slots
        packed[first_block:][: len(rows.blocks)] = rows.blocks
        return packed


def is_supported(shape: Shape, dtype: torch.dtype) -> bool:
    """True when the kernels serve these heads for queries of this dtype."""
    return dtype in _DTYPES and shape.head_dim % 2 == 0 and shape.head_dim <= _MAX_HEAD_DIM


def padded_dim(head_dim: int) -> int:
    """Smallest power of two, at least 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def default_write(head_dim: int) -> KVWriteConfig:
    """Launch config of the write. Loads of padded heads are narrower, and fill the registers of more threads."""
    return DEFAULT_WRITE if head_dim == padded_dim(head_dim) else replace(DEFAULT_WRITE, num_warps=4)


def default_config(block_m: int, head_dim: int, itemsize: int, arch: int, is_long: bool) -> AttentionConfig:
    """Launch config that does not spill, except for float32 heads beyond 128, and fits the shared memory of sm_80 to
    sm_100.

    `itemsize` is the bytes of an element of a query.
    """
    is_wide = padded_dim(head_dim) > 128
    if itemsize == 4:
        blocks = 16 if is_wide else 32, 8 if is_wide or block_m > 16 else 4, 2
    elif is_wide:
        blocks = 32, 8 if block_m > 16 else 4, 2 if block_m > 64 else 3
    elif block_m > 32:
        # Before Hopper the operands of a product are held in registers.
        blocks = 32 if arch < 90 else 64, 4 if block_m == 64 else 8, 5 if arch >= 90 and block_m > 64 else 3
    else:
        # Five stages keep two chunks in flight from memory: one stage loads the block table. Before Hopper 64 keys at a
        # time would spill with them.
        blocks = (64, 4, 4 if arch < 90 else 5) if block_m == 16 else (32, 8, 5)
    return AttentionConfig(*blocks, programs=_LONG_PROGRAMS if is_long else _SHORT_PROGRAMS)


def invariant_config(head_dim: int, itemsize: int, arch: int) -> AttentionConfig:
    """Launch config of all tiles of batch-invariant attention: fewer keys at a time if registers, which hold the sums
    of a split and of all splits, are scarce. It is not tuned: texts would depend on a machine's file."""
    is_wide = padded_dim(head_dim) > 128
    if itemsize == 4:
        blocks = 16 if is_wide else 32, 8, 2
    elif is_wide:
        blocks = 32 if arch < 100 else 16, 8, 2
    else:
        blocks = 32 if arch < 90 else 64, 4 if padded_dim(head_dim) <= 64 else 8, 3
    return AttentionConfig(*blocks, programs=_LONG_PROGRAMS)


def make_tiles(rows: RowArrays, which: np.ndarray[Any, Any], queries: int) -> np.ndarray[Any, Any]:
    """Tiles [n, TILE_FIELDS] int64 of rows `which`, each of at most `queries` queries. The longest contexts come first,
    so that no program starts a long one when the others end."""
    counts = -(-rows.query_lens[which] // queries)
    row = np.repeat(which, counts)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_queries = np.minimum(rows.query_lens[row] - first, queries)
    position = rows.starts[row] + first
    tiles = np.zeros((len(row), TILE_FIELDS), dtype=np.int64)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = rows.token_starts[row] + first, num_queries, position
    tiles[:, 3], tiles[:, 4], tiles[:, 5] = rows.table_starts[row], rows.starts[row], row
    tiles[:, 6] = rows.query_lens[row]
    return tiles[np.argsort(-(position + num_queries), kind="stable")]
