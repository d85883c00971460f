"""Attention in which the bits of a query's result do not depend on the rest of the step.

One compiled kernel with one launch config serves decodes, verification rows and prompts: a query lies in a tile of the
same size whether the tile's other queries are there or not. Its keys are cut into *units* of UNIT_KEYS keys from key 0
on. Split s of SPLITS attends to units s, s + SPLITS, ... in ascending order, and the splits' parts are added in the
order of s. A unit or a split without keys for a query changes no bit of its sums: weights are 0, and factors 1.

So the division of a tile among programs is free: for few tiles a program takes one split and the last program to finish
adds the parts; for many tiles a program takes all splits and adds them in registers, with the same operations.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..split_sums import is_last
from .native import Shape
from .schedule import INVARIANT_SPLITS, TILE_FIELDS, UNIT_KEYS, invariant_config
from .triton import attend_chunks, tile_constants
from .triton_windows import first_in_window

# Maximum before the first key: finite, so that a difference is never NaN.
_LEAST = tl.constexpr(-3e38)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit
def _merge(acc, top, total, values, sums):
    """State with one more part: its weighted mean `values` [M, D], and the log2 of its sum of weights [M], which is
    -inf without keys. The fused operations are explicit, so that no compiler fuses them otherwise elsewhere."""
    new_top = tl.maximum(top, sums)
    fading = tl.exp2(top - new_top)
    weights = tl.exp2(sums - new_top)
    wide = tl.broadcast_to(weights[:, None], acc.shape)
    return tl.fma(values, wide, acc * fading[:, None]), new_top, tl.fma(total, fading, weights)


@triton.jit
def _first_state(sinks, has_sinks, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr):
    """State before the first part: with the sinks [BLOCK_M], if `has_sinks`."""
    top = tl.full([BLOCK_M], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        top = tl.where(has_sinks, tl.load(sinks) * 1.4426950408889634, top)
        total = tl.where(has_sinks, 1.0, total)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), top, total


@triton.jit
def _attend_split(
    q, keys, values, table, split, begin, end, num_keys, scale, soft_cap, positions, first_key, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weighted mean [BLOCK_M, BLOCK_D] of the values in those of chunks `begin` to `end` that are in the split's units,
    and the log2 of the sums of weights."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Chunks are counted within the split: the first unit of the window, and an end in the middle of the last unit.
    first_unit = begin // UNIT
    num_units = tl.cdiv(end, UNIT)
    start = tl.cdiv(tl.maximum(first_unit - split, 0), SPLITS) * UNIT
    stop = tl.cdiv(tl.maximum(num_units - split, 0), SPLITS) * UNIT
    is_at_end = (num_units + SPLITS - 1 - split) % SPLITS == 0
    stop -= tl.where(is_at_end, num_units * UNIT - end, 0)
    acc, top, total = attend_chunks(
        acc, top, total, q, keys, values, table, start, stop, split * UNIT, 0, num_keys, tl.arange(0, BLOCK_D),
        scale, soft_cap, positions, first_key, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, True, PRECISION, UNIT, UNIT * SPLITS,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    return acc * (1.0 / divisor)[:, None], tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor))


@triton.jit
def _add_splits(
    parts, part_sums, part, inside, real, columns, sinks, first_unit, used,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """State of a tile whose `used` splits from that of `first_unit` on have written their parts from `part` on."""
    acc, top, total = _first_state(sinks, True, BLOCK_M, BLOCK_D, HAS_SINKS)
    for split in tl.range(0, SPLITS):
        there = tl.zeros([BLOCK_M], tl.int32) + (split + SPLITS - first_unit % SPLITS) % SPLITS < used
        sums = tl.load(part_sums + part + split, mask=real & there, other=float("-inf"), cache_modifier=".cg")
        place = (part + split)[:, None] * HEAD_DIM + columns[None, :]
        values = tl.load(parts + place, mask=inside & there[:, None], other=0.0, cache_modifier=".cg")
        acc, top, total = _merge(acc, top, total, values, sums)
    return acc, top, total


@triton.jit
def _store(target, acc, total, inside):
    """The mean of the values, to `target` [M, D]; without any key 0."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(target, result.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_queries", "takes_all"])
def invariant_attention_kernel(
    q, q_token_stride, q_head_stride, keys, values, key_head_stride, value_head_stride,
    tiles, table, out, parts, part_sums, arrived, sinks, scale, soft_cap, first_key, window, max_queries, takes_all,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile: out [T, H, D] from q [T, H, D], which is rotated, and keys that are written.

    With `takes_all` a program takes all splits of a tile and KV head. Else there are SPLITS programs of one split each;
    they write parts [tiles, max_queries, H, SPLITS, D] float32 and part_sums [tiles, max_queries, H, SPLITS], and count
    themselves in `arrived` [tiles * KV_HEADS], which is 0 before and after a launch. It is an argument at run time, so
    that both are the same instructions."""
    tile, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    record = tiles + tile * _TILE_FIELDS
    num_queries = tl.load(record + 1)
    if num_queries == 0:
        return
    position = tl.load(record + 2)
    num_keys = position + num_queries
    least = first_key
    if HAS_WINDOW:
        least = tl.maximum(first_key, first_in_window(position, window, HAS_WINDOW))
    begin = least // BLOCK_N
    end = tl.cdiv(num_keys, BLOCK_N)
    first_unit = begin // UNIT
    num_units = tl.cdiv(end, UNIT)
    used = tl.maximum(tl.minimum(num_units - first_unit, SPLITS), 1)
    if tl.program_id(1) >= used:
        return
    is_alone = (takes_all != 0) | (used == 1)
    split_begin = tl.where(takes_all != 0, 0, (first_unit + tl.program_id(1)) % SPLITS)
    split_end = tl.where(takes_all != 0, tl.minimum(num_units, SPLITS), split_begin + 1)

    query = tl.arange(0, BLOCK_M) // GROUP
    query_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    real = query < num_queries
    token = (tl.load(record) + query).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (columns < HEAD_DIM)[None, :]
    table += tl.load(record + 3)
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    source = q + token * q_token_stride + query_head * q_head_stride
    q_tile = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0)
    acc, top, total = _first_state(sinks + query_head, is_alone, BLOCK_M, BLOCK_D, HAS_SINKS)
    for split in tl.range(split_begin, split_end):
        part_values, sums = _attend_split(
            q_tile, keys, values, table, split, begin, end, num_keys, scale, soft_cap, position + query, first_key,
            window, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, UNIT, SPLITS, HAS_WINDOW, HAS_CAP, PRECISION,
        )  # fmt: skip
        acc, top, total = _merge(acc, top, total, part_values, sums)
    place = (token * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + columns[None, :]
    if is_alone:
        _store(out + place, acc, total, inside)
    else:
        part = ((tile.to(tl.int64) * max_queries + query) * (KV_HEADS * GROUP) + query_head) * SPLITS
        mine = part + split_begin
        tl.store(parts + mine[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside)
        tl.store(part_sums + mine, tl.where(total == 0.0, float("-inf"), top), mask=real)
        if is_last(arrived + tl.program_id(0), used):
            acc, top, total = _add_splits(
                parts, part_sums, part, inside, real, columns, sinks + query_head, first_unit, used,
                HEAD_DIM, BLOCK_M, BLOCK_D, SPLITS, HAS_SINKS,
            )  # fmt: skip
            _store(out + place, acc, total, inside)


def invariant_constants(
    shape: Shape, block_size: int, block_m: int, block_n: int, *, is_float32: bool, window: int, cap: bool, sinks: bool
) -> dict[str, Any]:
    """Constants of `invariant_attention_kernel`."""
    return {
        **tile_constants(shape, block_size, block_m, block_n, is_float32=is_float32),
        "UNIT": UNIT_KEYS // block_n,
        "SPLITS": INVARIANT_SPLITS,
        "HAS_WINDOW": window,
        "HAS_CAP": cap,
        "HAS_SINKS": sinks,
    }


def _case(name: str, dtype: str, shape: Shape, block_m: int, arch: int) -> CompileCase:
    """Case for one architecture, with a window, a cap, sinks or an fp8 cache if in its `name`."""
    config = invariant_config(shape.head_dim, 4 if dtype == "fp32" else 2, arch)
    return make_case(
        f"paged_attention invariant {name}{dtype} d{shape.head_dim} m{block_m} sm{arch}",
        invariant_attention_kernel,
        invariant_constants(
            *(shape, 16, block_m, config.block_n),
            is_float32=dtype == "fp32",
            window="window" in name,
            cap="cap" in name,
            sinks="sinks" in name,
        ),
        {
            "q out": f"*{dtype}",
            "keys values": "*fp8e4nv" if "fp8" in name else f"*{dtype}",
            "tiles table arrived": "*i32",
            "parts part_sums sinks": "*fp32",
            "q_token_stride q_head_stride key_head_stride value_head_stride": "i64",
            "scale soft_cap": "fp32",
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        archs=(arch,),
    )


def invariant_cases() -> list[CompileCase]:
    """Cases of the kernel: dtypes, wide heads, windows, caps, sinks and an fp8 cache."""
    common, wide, gpt_oss = Shape(32, 8, 128), Shape(16, 8, 256), Shape(64, 8, 64)
    return [
        _case(name, dtype, shape, block_m, arch)
        for arch in (80, 90, 100)
        for name, dtype, shape, block_m in (
            ("", "bf16", common, 64),
            ("window ", "bf16", common, 64),
            ("window cap ", "bf16", wide, 64),
            ("window sinks ", "fp16", gpt_oss, 64),
            ("", "fp32", common, 32),
            ("fp8 ", "bf16", common, 64),
        )
        # On Blackwell heads of 256 spill 80 bytes of a thread, which costs time.
        if arch < 100 or shape is not wide
    ]
