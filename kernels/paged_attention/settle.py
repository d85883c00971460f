"""Correction of rows that start earlier than planned, by a number that only the device knows. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..compile_case import CompileCase
from .schedule import TILE_FIELDS

BLOCK = 32
"""Queries of a tile that are corrected at once."""
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def settle_kernel(tiles, table, slots, positions, overshoot, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Move rows back by `overshoot` [B] int64 positions: tiles, slots [T] and positions [T] int64 are mutated.

    A program corrects one tile. It must be a single warp, which reads the tile before it writes there.
    """
    record = tiles + tl.program_id(0) * _TILE_FIELDS
    num_queries = tl.load(record + 1)
    if num_queries == 0:
        return
    early = tl.load(overshoot + tl.load(record + 5)).to(tl.int32)
    token = tl.load(record)
    position = tl.load(record + 2) - early
    row_position = tl.load(record + 4) - early
    table += tl.load(record + 3)
    tl.debug_barrier()
    tl.store(record + 2, position)
    tl.store(record + 4, row_position)
    for first in range(0, num_queries, BLOCK):
        query = first + tl.arange(0, BLOCK)
        real = query < num_queries
        place = position + query
        block = tl.load(table + place // BLOCK_SIZE, mask=real, other=0)
        tl.store(slots + token + query, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=real)
        tl.store(positions + token + query, place.to(tl.int64), mask=real)


def settle_cases() -> list[CompileCase]:
    """Cases of the kernel: blocks of a power of two, and of another size."""
    signature = {
        **dict.fromkeys(("tiles", "table", "slots"), "*i32"),
        **dict.fromkeys(("positions", "overshoot"), "*i64"),
        **dict.fromkeys(("BLOCK_SIZE", "BLOCK"), "constexpr"),
    }
    return [
        CompileCase(
            f"paged_attention settle b{size}",
            settle_kernel,
            signature,
            {"BLOCK_SIZE": size, "BLOCK": BLOCK},
            num_warps=1,
        )
        for size in (16, 20)
    ]
