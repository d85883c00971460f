"""Attention of ragged rows on a GPU. A tile is consecutive queries of a row with all query heads of a KV head.

A program streams a tile's keys and values through the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), in
chunks of BLOCK_N keys at absolute positions, so that a byte of the cache is read once for all of the tile's queries and
heads. For small batches several programs share the chunks of a tile that has many (Flash-Decoding, Dao et al. 2023);
the last one to finish adds their results. The grid does not depend on the rows' lengths, which are in device memory.

A program rotates its queries itself: of 32 heads and 8 KV heads, rotating them in memory would move three times the
bytes of writing keys and values. If every row is one tile it writes the new keys and values of its chunks, too, before
it reads them: nothing else reads them in that step. Else a launch before writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..split_sums import is_last
from .native import Shape
from .options import DEFAULT_OPTIONS, AttentionOptions
from .schedule import MAX_WRITING, MIN_SPLIT_KEYS, TILE_FIELDS, WHOLE_KEYS, default_config, padded_dim
from .settle import settle_cases
from .splits import add_parts
from .triton_windows import IN_ROW, first_in_window
from .write import rotated, write_cases, write_rotated

# Maximum before the first key: finite, so that a difference is never NaN.
_LEAST = tl.constexpr(-3e38)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit
def _scores(
    q, k, key, scale, soft_cap, positions, first_key, window,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] float32, which are still to be multiplied with `scale` unless there is a cap; with
    MASKED, -inf for keys that a query does not see."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_CAP:
        # c · tanh(x / c), with c in units of log2(e) like x; exp2 of a large number is infinite, and the quotient 0.
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(scores * (scale * 2.8853900817779268 / soft_cap)))
    if MASKED:
        if HAS_WINDOW == IN_ROW:
            seen = ((key <= positions) & (key >= first_key))[None, :]
        else:
            seen = (key[None, :] <= positions[:, None]) & (key >= first_key)[None, :]
        if HAS_WINDOW and HAS_WINDOW != IN_ROW:
            seen = seen & (key[None, :] >= first_in_window(positions, window, HAS_WINDOW)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _first_state(sinks, split, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Maximum and sum of weights before the first key; the first split begins with the sinks [BLOCK_M]."""
    top = tl.full([BLOCK_M], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        top = tl.where(split == 0, tl.load(sinks) * 1.4426950408889634, top)
        total = tl.where(split == 0, 1.0, total)
    return top, total


@triton.jit
def attend_chunks(
    acc, top, total, q, keys, values, table, begin, end, gap_begin, gap, num_keys, columns,
    scale, soft_cap, positions, first_key, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr = 0,
    STRIDE: tl.constexpr = 0,
):  # fmt: skip
    """Online softmax over end - begin more chunks: those from `begin`, without the `gap` chunks from `gap_begin`; or
    with UNIT runs of UNIT chunks, STRIDE apart, the first of which starts at chunk `gap_begin`.
    Returns its state: sum of weighted values, maximum, sum of weights."""
    for index in tl.range(begin, end):
        if UNIT > 0:
            chunk = index // UNIT * STRIDE + gap_begin + index % UNIT
        else:
            chunk = tl.where(index < gap_begin, index, index + gap)
        key = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (columns < HEAD_DIM)[None, :]
        # 32 bits suffice: a head's part of a layer's cache has less than 2^31 elements.
        if MASKED or BLOCK_N % BLOCK_SIZE != 0:
            there = key < num_keys
            block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
            mask = there[:, None] & mask
        else:
            count: tl.constexpr = BLOCK_N // BLOCK_SIZE
            blocks = tl.load(table + chunk * count + tl.arange(0, count))
            block = tl.broadcast_to(blocks[:, None], (count, BLOCK_SIZE)).reshape(BLOCK_N)
        place = (block * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * HEAD_DIM + columns[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0).to(q.dtype)
        scores = _scores(
            q, k, key, scale, soft_cap, positions, first_key, window, HAS_WINDOW, HAS_CAP, MASKED, PRECISION
        )
        # The factor is positive and goes into the exponent, where it costs no instruction of its own.
        factor = 1.0 if HAS_CAP else scale
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_top[:, None])
        fading = tl.exp2(top - new_top)
        v = tl.load(values + place, mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fading[:, None], input_precision=PRECISION)
        total = total * fading + tl.sum(weights, 1)
        top = new_top
    return acc, top, total


@triton.jit
def _chunk_range(
    position, num_keys, first_key, window, split, num_splits,
    BLOCK_N: tl.constexpr, MIN_CHUNKS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr, HAS_SPLITS: tl.constexpr,
    TWO_LOOPS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Chunks of a program: (begin, end, whole_begin, whole_end), and the number of splits that have chunks, at least 1.
    With TWO_LOOPS every query of the tile sees all of the chunks from whole_begin to whole_end. `position` is the first
    query's; the last query sees `num_keys` keys."""
    least = first_key
    most = first_key
    if HAS_WINDOW:
        least = tl.maximum(first_key, first_in_window(position, window, HAS_WINDOW))
        most = tl.maximum(first_key, first_in_window(num_keys - 1, window, HAS_WINDOW))
    begin = least // BLOCK_N
    end = tl.cdiv(num_keys, BLOCK_N)
    used_splits = 1
    if HAS_SPLITS:
        total = end - begin
        count = tl.maximum(tl.cdiv(total, num_splits), MIN_CHUNKS)
        count = tl.where(total <= WHOLE_CHUNKS, WHOLE_CHUNKS, count)
        used_splits = tl.maximum(tl.cdiv(total, count), 1)
        begin += split * count
        end = tl.minimum(begin + count, end)
    whole_begin = end
    whole_end = end
    if TWO_LOOPS:
        whole_begin = tl.minimum(tl.maximum(begin, tl.cdiv(most, BLOCK_N)), end)
        whole_end = tl.maximum(tl.minimum(end, (position + 1) // BLOCK_N), whole_begin)
    return begin, end, whole_begin, whole_end, used_splits


@triton.jit
def _attend(
    q, keys, values, table, sinks, split, begin, end, whole_begin, whole_end, num_keys,
    scale, soft_cap, positions, first_key, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, TWO_LOOPS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of the queries q [BLOCK_M, BLOCK_D] over a program's chunks; returns its state."""
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = _first_state(sinks, split, BLOCK_M, HAS_SINKS)
    if TWO_LOOPS:
        acc, top, total = attend_chunks(
            acc, top, total, q, keys, values, table, whole_begin, whole_end, whole_end, 0, num_keys, columns,
            scale, soft_cap, positions, first_key, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, False, PRECISION,
        )  # fmt: skip
    gap = whole_end - whole_begin
    return attend_chunks(
        acc, top, total, q, keys, values, table, begin, end - gap, whole_begin, gap, num_keys, columns,
        scale, soft_cap, positions, first_key, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_CAP, True, PRECISION,
    )  # fmt: skip


@triton.jit
def _queries(
    vectors, head_stride, query_head, inside, cos, sin, angles, norm, root_squared, is_mine, keys, values, slots, head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATES: tl.constexpr, WRITES: tl.constexpr, ROTARY_HALF: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, BLOCK_D] of a tile, whose tokens' heads are at `vectors` [BLOCK_M]. With ROTATES they are
    rotated first; with WRITES so are the new keys of the tokens that are `is_mine`, which are written with their
    values."""
    columns = tl.arange(0, BLOCK_D)
    if ROTATES:
        tile = rotated(
            vectors + query_head * HEAD_DIM, inside, cos + angles, sin + angles, norm + query_head * HEAD_DIM,
            root_squared, HEAD_DIM, BLOCK_D, ROTARY_HALF, NORM, INTERLEAVED,
        ).to(vectors.dtype.element_ty)  # fmt: skip
    else:
        # With a constant stride, addresses would share terms with the output's, which would stay in registers.
        tile = tl.load(vectors[:, None] + query_head[:, None] * head_stride + columns[None, :], mask=inside, other=0.0)
    if WRITES:
        first_of_token = tl.arange(0, BLOCK_M) % GROUP == 0  # one of its rows writes
        write_rotated(
            vectors + (KV_HEADS * GROUP + head) * HEAD_DIM, KV_HEADS * HEAD_DIM, first_of_token & is_mine,
            cos + angles, sin + angles, norm + (KV_HEADS * GROUP + head) * HEAD_DIM, root_squared, keys, values, slots,
            HEAD_DIM, BLOCK_M, BLOCK_D, ROTARY_HALF, NORM, INTERLEAVED,
        )  # fmt: skip
        tl.debug_barrier()  # other threads of the program read these keys
    return tile


@triton.jit(do_not_specialize=["max_queries", "num_splits"])
def attention_kernel(
    q, q_token_stride, q_head_stride, keys, values, key_head_stride, value_head_stride,
    cos, sin, angle_stride, norm, root_squared, slots,
    tiles, table, out, parts, part_sums, arrived, sinks, scale, soft_cap, first_key, window, max_queries, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_CHUNKS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr, SPLITS: tl.constexpr, HAS_SPLITS: tl.constexpr,
    TWO_LOOPS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, ROTATES: tl.constexpr, WRITES: tl.constexpr, ROTARY_HALF: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile: out [T, H, D]. q [T, H, D] lies in a projection's output, followed by the token's keys and
    values; with ROTATES it is not rotated yet, and with WRITES neither are the keys, which are written to the cache.

    With splits, programs write parts [tiles, max_queries, H, num_splits, D] float32 and part_sums [tiles, max_queries,
    H, num_splits], the log2 of a part's sum of weights, and count themselves in `arrived` [tiles * KV_HEADS], which is
    0 before and after a launch."""
    tile, head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    record = tiles + tile * _TILE_FIELDS
    num_queries = tl.load(record + 1)
    if num_queries == 0:
        return
    position = tl.load(record + 2)
    num_keys = position + num_queries
    if HAS_WINDOW == IN_ROW:
        num_keys = tl.load(record + 4) + tl.load(record + 6)
    begin, end, whole_begin, whole_end, used_splits = _chunk_range(
        position, num_keys, first_key, window, split, num_splits, BLOCK_N, MIN_CHUNKS, WHOLE_CHUNKS, HAS_SPLITS,
        TWO_LOOPS, HAS_WINDOW,
    )  # fmt: skip
    if split >= used_splits:
        return
    query = tl.arange(0, BLOCK_M) // GROUP
    query_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    real = query < num_queries
    token = (tl.load(record) + query).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (columns < HEAD_DIM)[None, :]
    table += tl.load(record + 3)
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    q_tile = _queries(
        q + token * q_token_stride, q_head_stride, query_head, inside, cos, sin, token * angle_stride, norm,
        root_squared, real & (position + query >= begin * BLOCK_N) & (position + query < end * BLOCK_N),
        keys, values, slots + token, head, GROUP, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, ROTATES, WRITES,
        ROTARY_HALF, NORM, INTERLEAVED,
    )  # fmt: skip
    seen_until = position + query
    if HAS_WINDOW == IN_ROW:
        seen_until = num_keys - 1  # of all queries
    acc, top, total = _attend(
        q_tile, keys, values, table, sinks + query_head, split, begin, end, whole_begin, whole_end, num_keys,
        scale, soft_cap, seen_until, first_key, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, TWO_LOOPS, HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)  # 0: no key is for this query
    result = acc * (1.0 / divisor)[:, None]
    place = (token * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + columns[None, :]
    if used_splits == 1:
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
        return
    if HAS_SPLITS:
        first = tile.to(tl.int64) * max_queries
        part = ((first + query) * (KV_HEADS * GROUP) + query_head) * num_splits
        tl.store(parts + (part + split)[:, None] * HEAD_DIM + columns[None, :], result, mask=inside)
        tl.store(part_sums + part + split, tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor)), mask=real)
        if is_last(arrived + tl.program_id(0), used_splits):
            add_parts(
                out, parts, part_sums, first, tl.load(record).to(tl.int64), num_queries, head, num_splits, used_splits,
                GROUP, KV_HEADS * GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, SPLITS,
            )  # fmt: skip


class Features(NamedTuple):
    """Parts of `attention_kernel` that a launch needs."""

    splits: bool
    window: int
    """See `window_kind`."""
    cap: bool
    sinks: bool
    rotates: bool = False
    writes: bool = False
    norm: bool = False


def tile_constants(shape: Shape, block_size: int, block_m: int, block_n: int, *, is_float32: bool) -> dict[str, Any]:
    """Constants of every attention kernel's tiles."""
    return {
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": padded_dim(shape.head_dim),
        "PRECISION": "tf32x3" if is_float32 else "tf32",
    }


def attention_constants(
    shape: Shape,
    block_size: int,
    block_m: int,
    block_n: int,
    *,
    is_float32: bool,
    features: Features,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> dict[str, Any]:
    """Constants of `attention_kernel`."""
    return {
        **tile_constants(shape, block_size, block_m, block_n, is_float32=is_float32),
        "MIN_CHUNKS": MIN_SPLIT_KEYS // block_n,
        "WHOLE_CHUNKS": max(1, WHOLE_KEYS // block_n),
        "SPLITS": min(64, 4096 // padded_dim(shape.head_dim)),  # as many as registers hold
        "HAS_SPLITS": features.splits,
        # Masks are cheap compared with loads from memory, but not with matrix products.
        "TWO_LOOPS": block_m > 64,
        "HAS_WINDOW": features.window,
        "HAS_CAP": features.cap,
        "HAS_SINKS": features.sinks,
        "ROTATES": features.rotates,
        "WRITES": features.writes,
        # Constants of what is not launched are the same for all.
        "ROTARY_HALF": (options.rotary_dim or shape.head_dim) // 2 if features.rotates else 0,
        "NORM": features.norm,
        "INTERLEAVED": options.interleaved and features.rotates,
    }


def _attention_case(
    name: str, dtype: str, shape: Shape, block_size: int, block_m: int, arch: int = 90, *, cache: str | None = None
) -> CompileCase:
    """Case for Ampere alone or for Hopper and later, with a window, row, cap or sinks if in its `name`; `cache`: dtype
    of the cache, if it differs."""
    is_float32, is_split = dtype == "fp32", block_m <= 64
    config = default_config(block_m, shape.head_dim, 4 if is_float32 else 2, arch, not is_split)
    writes = block_m <= MAX_WRITING
    window = IN_ROW.value if "row" in name else "window" in name
    constants = attention_constants(
        *(shape, block_size, block_m, config.block_n),
        is_float32=is_float32,
        features=Features(is_split, window, "cap" in name, "sinks" in name, True, writes, "norm" in name),
    )
    full = f"paged_attention {name}{dtype} d{shape.head_dim} m{block_m}{' ampere' if arch < 90 else ''}"
    return make_case(
        full,
        attention_kernel,
        constants,
        {
            "q out": f"*{dtype}",
            "keys values": f"*{cache or dtype}",
            "cos sin": f"*{dtype}",
            "norm": "*fp32" if "norm" in name else f"*{dtype}",
            "tiles table slots arrived": "*i32",
            "parts part_sums sinks": "*fp32",
        }
        | {"q_token_stride q_head_stride key_head_stride value_head_stride angle_stride": "i64"}
        | {"scale soft_cap root_squared": "fp32"},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        archs=(80,) if arch < 90 else (90, 100),
    )


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels."""
    from .invariant import invariant_cases  # which imports this module

    common, wide, odd, gpt_oss = Shape(32, 8, 128), Shape(16, 8, 256), Shape(24, 8, 80), Shape(64, 8, 64)
    cases = [
        _attention_case("fp8 ", "bf16", common, 16, 16, cache="fp8e4nv"),
        _attention_case("fp8 ", "bf16", common, 16, 128, cache="fp8e4nv"),
        *write_cases(),
        *settle_cases(),
        *invariant_cases(),
    ]
    for arch in (80, 90):
        cases += [_attention_case("", "bf16", common, 16, block_m, arch) for block_m in (16, 128)]
        cases += [_attention_case("norm ", "bf16", common, 16, m, arch) for m in (16, 32, 128)]
        cases += [_attention_case("row norm ", "bf16", common, 16, m, arch) for m in (32, 64, 128)]
        cases += [_attention_case("window ", "bf16", common, 16, m, arch) for m in (16, 32, 64, 128)]
        cases += [_attention_case("window cap ", "bf16", wide, 16, m, arch) for m in (16, 32, 64)]
        cases += [_attention_case("window cap ", "bf16", common, 16, m, arch) for m in (16, 128)]
        cases += [_attention_case("window ", "fp32", common, 16, m, arch) for m in (16, 32)]
        cases += [
            _attention_case(f"sinks {w}", "bf16", gpt_oss, 16, m, arch) for w in ("", "window ") for m in (16, 128)
        ]
        cases += [
            _attention_case("", "fp16", Shape(14, 2, 64), 128, 16, arch),
            _attention_case("", "fp16", odd, 64, 128, arch),
        ]
    return cases
