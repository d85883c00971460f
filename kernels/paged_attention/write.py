"""Kernel that normalises and rotates queries and keys, and writes keys and values to the cache."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..tuning.configs import KVWriteConfig
from .native import Shape
from .options import DEFAULT_OPTIONS, AttentionOptions
from .schedule import default_write

# The limit of keys, KEY_LIMIT in torch.py, and the largest number of float8 e4m3.
_KEY_LIMIT = tl.constexpr(1e30)
_FP8_LIMIT = tl.constexpr(448.0)


@triton.jit
def _storable(x, dtype: tl.constexpr, limit: tl.constexpr):
    """`x` (float32) as the cache holds it: in `dtype`, finite, and within `limit` (see `write_kv` in torch.py)."""
    if dtype == tl.float8e4nv:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        x = tl.minimum(tl.maximum(x, -_FP8_LIMIT), _FP8_LIMIT)
    else:
        x = x.to(dtype).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        if limit and dtype != tl.float16:
            x = tl.minimum(tl.maximum(x, -_KEY_LIMIT), _KEY_LIMIT)
    return x.to(dtype)


@triton.jit
def _columns(HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Places of a head's pairs: first and second element, each [BLOCK_HALF]. The first ROTARY_HALF pairs are rotated,
    the others are any two of the elements that are not."""
    pair = tl.arange(0, BLOCK_HALF)
    if ROTARY_HALF == HALF and not INTERLEAVED:
        return pair, pair + HALF
    first = pair
    second = pair + ROTARY_HALF
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    rotated = pair < ROTARY_HALF
    return tl.where(rotated, first, pair + ROTARY_HALF), tl.where(rotated, second, pair + HALF)


@triton.jit
def _prepared(
    low, high, low_scale, high_scale, root_squared, cos, sin, mask,
    ROTARY_HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """First and second elements of pairs of heads [heads, pairs], normalised if NORM (see kernels/rms_norm) and
    rotated, in float32.

    `low_scale` and `high_scale` point to their weights; `cos` and `sin` point to a token's angles [2 * ROTARY_HALF], of
    which sin brings its sign.
    """
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = 1.0 / tl.sqrt(squares + root_squared)
        low = low * inverse[:, None] * tl.load(low_scale, mask=mask, other=0.0)
        high = high * inverse[:, None] * tl.load(high_scale, mask=mask, other=0.0)
    columns = tl.arange(0, BLOCK_HALF)
    there = columns < ROTARY_HALF
    cos_low = tl.load(cos + columns, mask=there, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + columns, mask=there, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + ROTARY_HALF + columns, mask=there, other=1.0).to(tl.float32)
    sin_high = tl.load(sin + ROTARY_HALF + columns, mask=there, other=0.0).to(tl.float32)
    return low * cos_low + high * sin_low, high * cos_high + low * sin_high


@triton.jit
def rotated(
    source, inside, cos, sin, scale, root_squared,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_HALF: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Vectors [M, BLOCK_D] float32 at `source` [M], normalised if NORM and rotated, as `_prepared` does, but whole: as
    a matrix product takes them. `cos` and `sin` [M] point to each one's angles, `scale` [M] to its weights."""
    columns = tl.arange(0, BLOCK_D)
    turned = columns < 2 * ROTARY_HALF
    if INTERLEAVED:
        partner = tl.where(turned, columns ^ 1, columns)
        angle = columns // 2 + columns % 2 * ROTARY_HALF
    else:
        partner = tl.where(columns < ROTARY_HALF, columns + ROTARY_HALF, columns - ROTARY_HALF)
        partner = tl.where(turned, partner, columns)
        angle = columns
    own = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(own * own, 1) + root_squared)
        own = own * inverse[:, None] * tl.load(scale[:, None] + columns[None, :], mask=inside, other=0.0)
        other = other * inverse[:, None] * tl.load(scale[:, None] + partner[None, :], mask=inside, other=0.0)
    there = inside & turned[None, :]
    cosines = tl.load(cos[:, None] + angle[None, :], mask=there, other=1.0).to(tl.float32)
    sines = tl.load(sin[:, None] + angle[None, :], mask=there, other=0.0).to(tl.float32)
    return own * cosines + other * sines


@triton.jit
def write_rotated(
    source, value_offset, here, cos, sin, scale, root_squared, keys, values, slots,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_HALF: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write the keys at `source` [BLOCK_M], rotated, and the values `value_offset` after them to a head's part of the
    cache, at the slots at `slots` [BLOCK_M] (negative: nowhere); only those that are `here`."""
    slot = tl.load(slots, mask=here, other=-1).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = (here & (slot >= 0))[:, None] & (columns < HEAD_DIM)[None, :]
    k = rotated(
        source, mask, cos, sin, scale + tl.zeros([BLOCK_M], tl.int64), root_squared,
        HEAD_DIM, BLOCK_D, ROTARY_HALF, NORM, INTERLEAVED,
    )  # fmt: skip
    place = slot[:, None] * HEAD_DIM + columns[None, :]
    tl.store(keys + place, _storable(k, keys.dtype.element_ty, True), mask=mask)
    v = tl.load(source[:, None] + value_offset + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(values + place, _storable(v, values.dtype.element_ty, False), mask=mask)


@triton.jit
def write_kernel(
    q, q_token_stride, q_head_stride, k, k_token_stride, k_head_stride, v, v_token_stride, v_head_stride,
    cos, sin, angle_stride, scale, root_squared,
    keys, values, key_head_stride, value_head_stride, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUERIES: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Normalise, if NORM, and rotate k and, with QUERIES, q [T, HEADS, D] (mutated); write k and v [T, KV_HEADS, D] to
    `slots` [T] (negative: nowhere) of the cache; keys and values are mutated. With IN_PLACE k and v then hold what the
    cache does, if it has their dtype. A program takes some heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    there = tl.arange(0, BLOCK_HALF) < HALF
    first, second = _columns(HALF, ROTARY_HALF, BLOCK_HALF, INTERLEAVED)
    query_parts: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS if QUERIES else 0
    key_parts: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    angles = token * angle_stride
    slot = tl.load(slots + token).to(tl.int64)
    if part < query_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
        mask = (heads < HEADS) & there[None, :]
        source = q + token * q_token_stride + heads * q_head_stride
        low = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = scale + heads * (2 * HALF)
        low, high = _prepared(
            low, high, weight + first[None, :], weight + second[None, :], root_squared, cos + angles, sin + angles,
            mask, ROTARY_HALF, BLOCK_HALF, NORM,
        )  # fmt: skip
        tl.store(source + first[None, :], low.to(q.dtype.element_ty), mask=mask)
        tl.store(source + second[None, :], high.to(q.dtype.element_ty), mask=mask)
    elif slot >= 0:
        if part < query_parts + key_parts:
            heads = (part - query_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
            mask = (heads < KV_HEADS) & there[None, :]
            source = k + token * k_token_stride + heads * k_head_stride
            low = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
            high = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
            weight = scale + (HEADS + heads) * (2 * HALF)
            low, high = _prepared(
                low, high, weight + first[None, :], weight + second[None, :], root_squared, cos + angles, sin + angles,
                mask, ROTARY_HALF, BLOCK_HALF, NORM,
            )  # fmt: skip
            target = keys + heads * key_head_stride + slot * (2 * HALF)
            tl.store(target + first[None, :], _storable(low, keys.dtype.element_ty, True), mask=mask)
            tl.store(target + second[None, :], _storable(high, keys.dtype.element_ty, True), mask=mask)
            if IN_PLACE:
                tl.store(source + first[None, :], _storable(low, k.dtype.element_ty, True), mask=mask)
                tl.store(source + second[None, :], _storable(high, k.dtype.element_ty, True), mask=mask)
        else:
            columns = tl.arange(0, BLOCK_HALF)
            heads = (part - query_parts - key_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
            mask = (heads < KV_HEADS) & there[None, :]
            source = v + token * v_token_stride + heads * v_head_stride
            low = tl.load(source + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            high = tl.load(source + HALF + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            target = values + heads * value_head_stride + slot * (2 * HALF)
            tl.store(target + columns[None, :], _storable(low, values.dtype.element_ty, False), mask=mask)
            tl.store(target + HALF + columns[None, :], _storable(high, values.dtype.element_ty, False), mask=mask)
            if IN_PLACE:
                tl.store(source + columns[None, :], _storable(low, v.dtype.element_ty, False), mask=mask)
                tl.store(source + HALF + columns[None, :], _storable(high, v.dtype.element_ty, False), mask=mask)


def write_constants(
    shape: Shape,
    config: KVWriteConfig,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    norm: bool,
    queries: bool,
    in_place: bool = False,
) -> dict[str, Any]:
    """Constants of `write_kernel`."""
    half = shape.head_dim // 2
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HALF": half,
        "ROTARY_HALF": (options.rotary_dim or shape.head_dim) // 2,
        "BLOCK_HEADS": config.block_heads,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "NORM": norm,
        "INTERLEAVED": options.interleaved,
        "QUERIES": queries,
        "IN_PLACE": in_place,
    }


def _write_case(
    name: str, dtype: str, shape: Shape, cache: str, *, norm: bool, options: AttentionOptions = DEFAULT_OPTIONS
) -> CompileCase:
    config = default_write(shape.head_dim)
    strides = "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride v_head_stride"
    return make_case(
        f"paged_attention write {name}{dtype} d{shape.head_dim}",
        write_kernel,
        write_constants(shape, config, options, norm=norm, queries="queries" in name, in_place="place" in name),
        {"q k v cos sin": f"*{dtype}", "keys values": f"*{cache}", "slots": "*i32", "root_squared": "fp32"}
        | {"scale": "*fp32" if norm else f"*{dtype}", f"{strides} angle_stride": "i64"}
        | {"key_head_stride value_head_stride": "i64"},
        num_warps=config.num_warps,
    )


def write_cases() -> list[CompileCase]:
    """Cases of the kernel: with and without norms, caches, and rotations of a part of a head."""
    common, wide, odd = Shape(32, 8, 128), Shape(16, 8, 256), Shape(24, 8, 80)
    return [
        _write_case("queries ", "bf16", common, "bf16", norm=False),
        _write_case("", "bf16", common, "bf16", norm=False),
        _write_case("queries in place ", "bf16", common, "bf16", norm=True),
        _write_case("norm ", "bf16", common, "bf16", norm=True),
        _write_case("norm queries ", "fp32", wide, "fp32", norm=True),
        _write_case("", "fp16", odd, "fp16", norm=False),
        _write_case("part ", "bf16", common, "bf16", norm=False, options=AttentionOptions(rotary_dim=96)),
        _write_case(
            "interleaved ",
            "bf16",
            common,
            "bf16",
            norm=False,
            options=AttentionOptions(rotary_dim=64, interleaved=True),
        ),
        _write_case("fp8 ", "bf16", common, "fp8e4nv", norm=False),
    ]
