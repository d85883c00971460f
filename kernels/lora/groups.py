"""Tokens of a step grouped by adapter, as the Triton kernels read them: one int32 array, copied once a step.

    header  | tiles | items | order | rows          offsets of the last three, and the counts, are in the header, and
                                                    whether the tiles are mostly shared; and, for the product of few
                                                    rows (`linear/triton_few.py`), the number of rows, and of each of
                                                    16 tokens the first row, the rank and the first value

A *group* is all tokens of one adapter, contiguous or not: `order` lists the step's adapter tokens group by group, so
that decode rows of one adapter share loads of its weights. A *tile* is up to `tile` tokens of a group with all its
rank rows, an *item* a tile with up to 16 of these rows. The float32 values between shrink and expand lie group by group
too, `tokens * rank` of each: ranks are ragged and nothing is padded.

The kernels take counts and offsets from the array alone, and divide the work by them: a step with one adapter has
fewer and shorter units than one with 64, in the same launches. Grids depend on the number of tokens alone. So a
captured CUDA graph replays for any adapters when the array at the same address has been overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..dispatch import has_triton
from ..staging import staged

BLOCK_ROWS = 16
"""Rank rows of an item: the fewest that a tensor core takes."""
FEW_TOKENS = 16
"""Most tokens of a step that are listed one by one."""
ENTRY = 8
"""Numbers of int32 in a tile or an item."""
HEADER = 8 + 3 * FEW_TOKENS
"""Numbers of int32 before the tiles: eight of the step, and three lists of the first tokens."""
SHARED_TOKENS = 2
"""Average tokens of a tile from which the expand takes small blocks of outputs: there are fewer tiles, and each takes
longer."""
SMALL_STEP = 1024
"""Most tokens of a step that is cut into small tiles, as decodes and verifications are."""

Segment = tuple[int, int, Sequence[int] | NDArray[np.int32]]
"""Run of tokens: (first token, token after the last, rank rows). Segments whose first row is equal have equal rows,
since a row belongs to one adapter."""
Ints = NDArray[np.int64]


def is_grouped(dtype: torch.dtype, device: torch.device) -> bool:
    """True when `device_rows.TritonRows` serves rows of this dtype on this device."""
    return device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16) and has_triton()


def tile_tokens(num_tokens: int) -> int:
    """Tokens of a tile in a step of `num_tokens`."""
    return 16 if num_tokens <= SMALL_STEP else 64


class GroupBuffer:
    """Device memory at one address for the groups of all small steps, so that captured graphs find them."""

    def __init__(self, num_rows: int, max_rank: int, device: torch.device) -> None:
        """Allocate memory for adapters of up to `max_rank` of the pool's `num_rows` rank rows."""
        entries = SMALL_STEP * (1 + -(-max_rank // BLOCK_ROWS))
        self.max_rank = max_rank
        self.data = torch.zeros(HEADER + ENTRY * entries + SMALL_STEP + num_rows, dtype=torch.int32, device=device)


class RowGroups:
    """Groups of one step on the device, valid until the next step is written into the same buffer."""

    def __init__(
        self,
        segments: Sequence[Segment],
        num_tokens: int,
        device: torch.device,
        buffer: GroupBuffer | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        """Group the tokens of a step, and copy the array to the device.

        Args:
            segments: Disjoint runs of tokens with their rows; tokens without a segment keep their values.
            num_tokens: Tokens of the step.
            device: Where the kernels run.
            buffer: Used if the step is small and has no larger ranks. Bounds of launches depend on `num_tokens` then,
                not on the segments.
            invariant: True when no bit of a token's result may depend on the step's other tokens. Tiles have one size
                then, and the kernels one order of sums.

        Raises:
            ValueError: segments beyond the step's tokens.
        """
        self.num_tokens = num_tokens
        self.invariant = invariant
        self.is_few = num_tokens <= FEW_TOKENS and not invariant
        """True when the array lists each token, for a product that expands in its own launch."""
        self.tile = tile_tokens(0 if invariant else num_tokens)
        self.stop = max((stop for _, stop, _ in segments), default=0)
        if self.stop > num_tokens:
            raise ValueError(f"segments end at token {self.stop} of {num_tokens}")
        array, (self.max_tiles, self.max_items, self.h_size) = _array(segments, self.tile)
        rank = max((len(rows) for _, _, rows in segments), default=0)
        if buffer is not None and (num_tokens > SMALL_STEP or rank > buffer.max_rank):
            buffer = None
        self.replayable = buffer is not None
        """True when launches captured with the buffer, for as many tokens or more, serve this step."""
        if buffer is not None:
            self.max_tiles, self.max_items = num_tokens, num_tokens * -(-buffer.max_rank // BLOCK_ROWS)
            self.h_size = num_tokens * buffer.max_rank
        self.data = torch.empty(len(array), dtype=torch.int32, device=device) if buffer is None else buffer.data
        """int32; see the module's docstring."""
        self.data[: len(array)].copy_(staged(array, device), non_blocking=True)


def _array(segments: Sequence[Segment], tile: int) -> tuple[NDArray[np.int32], tuple[int, int, int]]:
    """Build the array; return it with the numbers of tiles, of items and of values between shrink and expand.

    Every step calls this, so it loops over segments and tokens only to read the arguments.
    """
    segments = [segment for segment in segments if segment[1] > segment[0] and len(segment[2])]
    if not segments:
        return np.array([0, 0, HEADER, HEADER, HEADER, *[0] * (HEADER - 5)], np.int32), (0, 0, 0)
    places_of: dict[int, int] = {}
    group_of = np.array([places_of.setdefault(int(rows[0]), len(places_of)) for _, _, rows in segments])
    by_group = np.argsort(group_of, kind="stable")
    bounds = np.array([(start, stop) for start, stop, _ in segments], np.int64)[by_group]
    starts, lengths = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    order = np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
    group_rows = list({int(rows[0]): rows for _, _, rows in segments}.values())  # as `places_of` counts them
    ranks = np.array([len(rows) for rows in group_rows])
    counts = np.bincount(group_of[by_group], lengths).astype(np.int64)
    places = (_starts(counts), _starts(ranks), _starts(counts * ranks))
    tiles = _tiles(counts, ranks, places, tile)
    items = _items(tiles)
    first_item = HEADER + tiles.size
    first_token = first_item + items.size
    is_shared = int(len(order) >= SHARED_TOKENS * len(tiles))
    header = [len(tiles), len(items), first_item, first_token, first_token + len(order), is_shared, int(ranks.sum()), 0]
    tokens = _tokens(order, counts, ranks, places)
    array = np.concatenate([header, tokens.ravel(), tiles.ravel(), items.ravel(), order, *group_rows]).astype(np.int32)
    return array, (len(tiles), len(items), int((counts * ranks).sum()))


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _split(sizes: Ints, piece: int) -> tuple[Ints, Ints]:
    """Pieces of at most `piece` elements: (index into `sizes`, first of its elements) of each."""
    pieces = -(-sizes // piece)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    return owner, (np.arange(len(owner)) - _starts(pieces)[owner]) * piece


def _tiles(counts: Ints, ranks: Ints, places: tuple[Ints, Ints, Ints], tile: int) -> Ints:
    """Tiles [tiles, ENTRY]: first token in `order`, tokens, first row in `rows`, rows, first value between shrink and
    expand, values of a token."""
    group, offset = _split(counts, tile)
    tokens, rows, values = (place[group] for place in places)
    rank = ranks[group]
    entries = np.zeros((len(group), ENTRY), np.int64)
    entries[:, 0], entries[:, 1] = tokens + offset, np.minimum(counts[group] - offset, tile)
    entries[:, 2], entries[:, 3] = rows, rank
    entries[:, 4], entries[:, 5] = values + offset * rank, rank
    return entries


def _tokens(order: Ints, counts: Ints, ranks: Ints, places: tuple[Ints, Ints, Ints]) -> Ints:
    """First row in `rows`, rank, and first value between shrink and expand of each of the first tokens of the step, [3,
    FEW_TOKENS]; 0 for tokens without an adapter."""
    listed = np.zeros((3, FEW_TOKENS), np.int64)
    group = np.repeat(np.arange(len(counts)), counts)
    tokens, rows, values = (place[group] for place in places)
    value = values + (np.arange(len(order)) - tokens) * ranks[group]
    few = order < FEW_TOKENS
    listed[:, order[few]] = np.stack([rows, ranks[group], value])[:, few]
    return listed


def _items(tiles: Ints) -> Ints:
    """Items [items, ENTRY]: tiles with at most BLOCK_ROWS rows each."""
    tile, offset = _split(tiles[:, 3], BLOCK_ROWS)
    entries = tiles[tile]
    entries[:, 2] += offset
    entries[:, 3] = np.minimum(entries[:, 3] - offset, BLOCK_ROWS)
    entries[:, 4] += offset
    return entries
