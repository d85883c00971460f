"""Tiles of a step's pairs of token and expert, computed on the device: each has pairs of one expert.

P pairs of a token and its j-th expert, k experts of a token, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Plan(NamedTuple):
    """Arguments of the kernels that depend on the routing, and the size of tiles."""

    order: Tensor
    """[P] int64: pairs, sorted by expert."""
    experts: Tensor
    """[tiles] int64: expert of each tile; E if there is no such tile."""
    pair_ends: Tensor
    """[E] int64: end of each expert's pairs in `order`."""
    tile_ends: Tensor
    """[E] int64: end of each expert's tiles."""
    tile: int
    """Pairs of a tile."""


def plan_tiles(experts: Tensor, num_experts: int) -> Plan:
    """Tiles of the pairs of `experts` [T, k]."""
    num_pairs = experts.numel()
    tile = 16 if num_pairs < 32 * num_experts else 64
    ranked, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(ranked, numbers, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    tile_ends = ((counts + tile - 1) // tile).cumsum(0)
    tiles = torch.arange(num_pairs // tile + min(num_pairs, num_experts), device=experts.device)
    return Plan(order, torch.searchsorted(tile_ends, tiles, right=True), ends, tile_ends, tile)


@triton.jit
def pairs_of_tile(tile, expert, order, pair_ends, tile_ends, TILE: tl.constexpr):
    """Pairs [TILE] of a tile of this expert, and a mask of the existing ones."""
    before = expert > 0
    first = tl.load(pair_ends + expert - 1, mask=before, other=0)
    tile -= tl.load(tile_ends + expert - 1, mask=before, other=0).to(tl.int32)
    place = first + tile * TILE + tl.arange(0, TILE)
    known = place < tl.load(pair_ends + expert)
    return tl.load(order + place, mask=known, other=0), known
