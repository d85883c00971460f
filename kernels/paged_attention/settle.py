"""Corrections of planned rows by numbers that only the device knows: rows that start earlier than planned, and rows of
one query that advance to the next position. Needs Triton."""

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


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["first", "left", "positions"])
def advance_kernel(tiles, table, slots, first, left, positions, step, BLOCK_SIZE: tl.constexpr):
    """Put rows of one query at position min(first + step, first + left): `first` and `left` are [R] int64; tiles, slots
    [R] and positions [R] int64 are mutated. A row whose `left` is smaller than `step` gets no slot. One program a row.
    """
    record = tiles + tl.program_id(0) * _TILE_FIELDS
    if tl.load(record + 1) == 0:
        return
    row = tl.load(record + 5)
    steps = tl.load(left + row)
    place = tl.load(first + row) + tl.minimum(steps, step)
    tl.store(record + 2, place.to(tl.int32))
    tl.store(record + 4, place.to(tl.int32))
    tl.store(positions + row, place)
    block = tl.load(table + tl.load(record + 3) + place // BLOCK_SIZE)
    tl.store(slots + row, tl.where(steps < step, -1, block * BLOCK_SIZE + place % BLOCK_SIZE).to(tl.int32))


def settle_cases() -> list[CompileCase]:
    """Cases of the kernels: blocks of a power of two, and of another size."""
    signature = {
        **dict.fromkeys(("tiles", "table", "slots"), "*i32"),
        **dict.fromkeys(("positions", "overshoot"), "*i64"),
        **dict.fromkeys(("BLOCK_SIZE", "BLOCK"), "constexpr"),
    }
    moves = signature | dict.fromkeys(("first", "left"), "*i64") | {"step": "i32"}
    advance = {name: moves[name] for name in advance_kernel.arg_names}
    return [
        CompileCase(f"paged_attention advance b{size}", advance_kernel, advance, {"BLOCK_SIZE": size}, num_warps=1)
        for size in (16, 20)
    ] + [
        CompileCase(
            f"paged_attention settle b{size}",
            settle_kernel,
            signature,
            {"BLOCK_SIZE": size, "BLOCK": BLOCK},
            num_warps=1,
        )
        for size in (16, 20)
    ]
