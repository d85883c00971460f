"""Shrink and expand for all adapters of a step in two launches a projection, reading the rank rows in place: Punica's
SGMV and BGMV (Chen et al. 2023) with ragged ranks (S-LoRA, Sheng et al. 2023).

Programs walk over the units of work that the step's array lists (`groups.py`). A unit with one token is bound by memory
and uses multiply-adds; a unit with several tokens uses tensor cores and reads its weights once for all.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..tuning.configs import LoRAExpandConfig, LoRAShrinkConfig
from .groups import BLOCK_ROWS, HEADER

_HEADER = tl.constexpr(HEADER)
MAX_SPLITS = 16
"""Most parts of a shrink's sums; the expand adds them up."""
MIN_SPLIT_INPUTS = 256
"""Fewest inputs in a part of a shrink's sums: fewer are read in less time than the part takes to start."""
GAIN_BLOCK, GAIN_WARPS = 1024, 4
SHRINK_CONFIGS = {
    16: LoRAShrinkConfig(block=256, dot_block=256, num_warps=8, num_stages=3, units=512, programs=8),
    64: LoRAShrinkConfig(block=128, dot_block=64, num_warps=4, num_stages=4, units=128, programs=8),
}
EXPAND_CONFIGS = {
    16: LoRAExpandConfig(block=512, dot_block=128, num_warps=2, num_stages=2, programs=8),
    64: LoRAExpandConfig(block=256, dot_block=64, num_warps=8, num_stages=2, programs=8),
}
"""Default launch configs by the number of tokens in a tile (`groups.tile_tokens`). If the warps of a program lie
side by side along the outputs, as 2 do along 512, a thread adds up all rank rows of its outputs: on an H200 64 adapters
at 28,672 outputs take 44 µs, and with 4 warps at 256 outputs 120 µs. 128 units are one for each multiprocessor of an
H100: 2,048 tokens of 4 adapters have 32 tiles, which without splits would leave three quarters of it idle."""
INVARIANT_SPLITS = 8
"""Most parts of a shrink's sums when they must be as many in every step: an adapter alone has 8 programs a slice, and
the parts of a long prompt still take little memory."""
INVARIANT_UNITS = 1 << 30
"""More units of work than any launch has, so that the number of parts is always the maximum."""
EXPAND_SPLITS = {1: MAX_SPLITS, 16: 4, 64: 2}
"""Parts of the shrink's sums that an expand loads at once, by the number of tokens: as many as registers hold."""


def with_norm(config: LoRAShrinkConfig) -> LoRAShrinkConfig:
    """Config of a shrink that multiplies its inputs by a norm's weights, in float32: with more inputs at a time some
    registers spill."""
    return replace(config, dot_block=min(config.dot_block, 128))


def fit_registers(config: LoRAExpandConfig, alignment: int, itemsize: int, *, embeds: bool) -> LoRAExpandConfig:
    """Config of an expand that keeps all values in registers: loads of outputs that are not aligned need more of them,
    and so does a loop in stages over the rows of an embedding. The compiler gives the threads of 8 warps too few for
    float32 (on Ampere) and for embeddings (on Blackwell)."""
    if alignment == 1:
        config = replace(config, dot_block=min(config.dot_block, 64))
    if embeds or itemsize == 4:
        config = replace(config, num_warps=min(config.num_warps, 4))
    return replace(config, num_stages=1) if embeds else config


@triton.jit
def split_inputs(features, num_units, wanted, most, block):
    """(parts, inputs of a part) of the sums over `features` inputs: parts enough for `wanted` units of work in a launch
    that has `num_units` without splits, at most `most`. Parts are multiples of `block`, and none is empty: a loop that
    Triton unrolls runs even if it starts after its end."""
    splits = tl.maximum(1, tl.minimum(tl.cdiv(wanted, tl.maximum(num_units, 1)), most))
    chunk = tl.cdiv(tl.cdiv(features, splits), block) * block
    return tl.cdiv(features, chunk), chunk


@triton.jit
def _rows_of(pool_rows, first, num_rows, live, live_stride, part_slice, ROWS: tl.constexpr):
    """Indices `first` to `first + ROWS` in a group's list of rows, the pool's rows there, and a mask of those that have
    weights."""
    r = first + tl.arange(0, ROWS)
    row = tl.load(pool_rows + r, mask=r < num_rows, other=0).to(tl.int64)
    alive = tl.load(live + row * live_stride + part_slice, mask=r < num_rows, other=0) != 0
    return r, row, alive


@triton.jit
def _shrink_token(
    x, scale, scale_unit, weights, alive, start, stop,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Products [ROWS] of one token's inputs [start, stop) with rows of A."""
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(start, stop, BLOCK, loop_unroll_factor=2):
        k = first + tl.arange(0, BLOCK)
        inputs = tl.load(x + k, mask=k < FEATURES, other=0.0).to(tl.float32)
        if HAS_NORM:
            inputs *= tl.load(scale + k, mask=k < FEATURES, other=0.0) * scale_unit
        inside = alive[:, None] & (k < FEATURES)[None, :]
        tile = tl.load(weights[:, None] + k[None, :], mask=inside, other=0.0)
        sums += tile.to(tl.float32) * inputs[None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _shrink_tile(
    x, scale, scale_unit, known, weights, alive, start, stop,
    FEATURES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Products [TILE, ROWS] of the inputs [start, stop) of the tokens at `x` [TILE] with rows of A."""
    products = tl.zeros([TILE, ROWS], tl.float32)
    for first in tl.range(start, stop, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inputs = tl.load(x[:, None] + k[None, :], mask=known[:, None] & (k < FEATURES)[None, :], other=0.0)
        if HAS_NORM:
            factors = tl.load(scale + k, mask=k < FEATURES, other=0.0) * scale_unit
            inputs = (inputs.to(tl.float32) * factors[None, :]).to(inputs.dtype)
        inside = alive[None, :] & (k < FEATURES)[:, None]
        tile = tl.load(weights[None, :] + k[:, None], mask=inside, other=0.0)
        products = tl.dot(inputs, tile, products, input_precision="ieee")
    return products


# Arguments that change with the batch are not specialised: a GPU would compile a kernel in the step that needs it. Nor
# is `live`, a few columns of a table of all sites.
@triton.jit(do_not_specialize=["h_stride", "units", "max_splits"], do_not_specialize_on_alignment=["live"])
def shrink_kernel(
    x,  # [T, FEATURES]
    a,  # row r, slice s: a + r * row_stride + s * FEATURES
    live,  # [R, SLICES] uint8
    groups,
    h,  # [SLICES, splits, h_stride] float32
    scale,  # [FEATURES] float32 of a norm whose root mean square divides the results later
    scale_unit,  # factor of `scale`
    x_stride,
    row_stride,
    live_stride,
    h_stride,
    units,  # units of work below which the inputs are split
    max_splits,
    FEATURES: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # inputs at a time for one token
    DOT_BLOCK: tl.constexpr,  # and for several
    SINGLE: tl.constexpr,  # tokens of a tile that uses multiply-adds: 1, or 0 for none
    HAS_NORM: tl.constexpr,
):
    """h[s, split, place] = x[t, chunk] · A[row, s, chunk], for the tokens and rows of each item; with HAS_NORM inputs
    are multiplied by scale · scale_unit first."""
    items = groups + tl.load(groups + 2)
    order = groups + tl.load(groups + 3)
    pool_rows = groups + tl.load(groups + 4)
    num_items = tl.load(groups + 1)
    unit_size: tl.constexpr = BLOCK if BLOCK > DOT_BLOCK else DOT_BLOCK
    splits, chunk = split_inputs(FEATURES, num_items * SLICES, units, max_splits, unit_size)
    parts = SLICES * splits
    for unit in tl.range(tl.program_id(0), num_items * parts, tl.num_programs(0)):
        item = items + unit // parts * 8
        part = unit % parts
        part_slice = part // splits
        start = tl.multiple_of(part % splits * chunk, BLOCK)
        stop = tl.minimum(start + chunk, FEATURES)
        num_tokens = tl.load(item + 1)
        num_rows = tl.load(item + 3)
        r, row, alive = _rows_of(pool_rows + tl.load(item + 2), 0, num_rows, live, live_stride, part_slice, ROWS)
        if tl.max(alive.to(tl.int32), axis=0) > 0:
            weights = a + row * row_stride + part_slice * FEATURES
            token_ids = order + tl.load(item)
            out = h + part.to(tl.int64) * h_stride + tl.load(item + 4)
            if num_tokens == SINGLE:
                source = x + tl.load(token_ids).to(tl.int64) * x_stride
                sums = _shrink_token(
                    source, scale, scale_unit, weights, alive, start, stop, FEATURES, ROWS, BLOCK, HAS_NORM
                )  # fmt: skip
                tl.store(out + r, sums, mask=r < num_rows)
            else:
                m = tl.arange(0, TILE)
                known = m < num_tokens
                sources = x + tl.load(token_ids + m, mask=known, other=0).to(tl.int64) * x_stride
                products = _shrink_tile(
                    sources, scale, scale_unit, known, weights, alive, start, stop,
                    FEATURES, TILE, ROWS, DOT_BLOCK, HAS_NORM,
                )  # fmt: skip
                places = m[:, None] * tl.load(item + 5) + r[None, :]
                tl.store(out + places, products, mask=known[:, None] & (r < num_rows)[None, :])


@triton.jit
def _sum_splits(h, mask, h_stride, splits, SPLITS: tl.constexpr):
    """Values between shrink and expand at `h` [TILE, ROWS], summed over the splits, SPLITS of which are loaded at
    once."""
    split = tl.arange(0, SPLITS)[:, None, None]
    total = tl.zeros([h.shape[0], h.shape[1]], tl.float32)
    for first in tl.range(0, splits, SPLITS):
        inside = (first + split < splits) & mask[None, :, :]
        places = h[None, :, :] + (first + split).to(tl.int64) * h_stride
        total += tl.sum(tl.load(places, mask=inside, other=0.0), axis=0)
    return total


@triton.jit
def _expand_tile(
    y, b, live, pool_rows, h, ids, token_ids, n, wanted, num_tokens, num_rows, values_stride, part_slice,
    y_stride, row_stride, live_stride, h_stride, splits,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, EMBEDDING: tl.constexpr,
):  # fmt: skip
    """Add to y [T, out] the outputs `n` of up to TILE tokens, over all rank rows of their adapter; y is mutated."""
    m = tl.arange(0, TILE)
    known = m < num_tokens
    token = tl.load(token_ids + m, mask=known, other=0).to(tl.int64)
    target = y + token[:, None] * y_stride + n[None, :]
    here = known[:, None] & wanted[None, :]
    if TILE == 1:  # early, to wait for it once; of more tokens it would take registers from the products
        before = tl.load(target, mask=here, other=0.0)
    totals = tl.zeros([TILE, BLOCK], tl.float32)
    found = 0
    for first in tl.range(0, num_rows, ROWS):
        r, row, alive = _rows_of(pool_rows, first, num_rows, live, live_stride, part_slice, ROWS)
        mask = known[:, None] & alive[None, :]
        if EMBEDDING:
            column = tl.load(ids + token, mask=known, other=0)
            factors = tl.load(h + row[None, :] * row_stride + column[:, None], mask=mask, other=0.0)
        else:
            factors = _sum_splits(h + m[:, None] * values_stride + r[None, :], mask, h_stride, splits, SPLITS)
        inside = alive[:, None] & wanted[None, :]
        weights = tl.load(b + row[:, None] * row_stride + n[None, :], mask=inside, other=0.0)
        if TILE == 1:
            column_of_factors = tl.reshape(factors, [ROWS, 1]).to(tl.float32)
            totals += tl.sum(weights.to(tl.float32) * column_of_factors, axis=0)[None, :]
        else:
            totals = tl.dot(factors.to(weights.dtype), weights, totals, input_precision="ieee")
        found = tl.maximum(found, tl.max(alive.to(tl.int32), axis=0))
    if found > 0:
        if TILE > 1:
            before = tl.load(target, mask=here, other=0.0)
        tl.store(target, (before.to(tl.float32) + totals).to(y.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize=[
        *("h_stride", "num_blocks", "num_small_blocks"),
        *("features", "num_slices", "units", "max_splits", "split_block"),
    ],
    do_not_specialize_on_alignment=["live"],
)
def expand_kernel(
    y,  # [T, out], added to
    b,  # row r: b + r * row_stride, the slices side by side
    live,
    groups,
    h,  # as the shrink left it; of an embedding A itself, row r: h + r * row_stride
    ids,  # [T] of an embedding
    blocks,  # [num_blocks + num_small_blocks, 4]: slice, first output, output after the last
    y_stride, row_stride, live_stride, h_stride,
    num_blocks,  # of BLOCK outputs
    num_small_blocks,  # of DOT_BLOCK outputs, for steps whose tiles hold several tokens
    features, num_slices, units, max_splits, split_block,  # as the shrink had them; the last is its larger block
    ALIGNMENT: tl.constexpr,  # of the slices, in elements
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # outputs at a time for one token
    DOT_BLOCK: tl.constexpr,  # and for several
    SPLITS: tl.constexpr,  # parts of the shrink's sums that are loaded at once for several tokens
    ONE_SPLITS: tl.constexpr,  # and for one
    EMBEDDING: tl.constexpr,
    SINGLE: tl.constexpr,  # as in the shrink
):  # fmt: skip
    """y[t, n] += sum of h[s, :, place] B[row, n] over all rank rows of the token's adapter; y [T, out] is mutated."""
    order = groups + tl.load(groups + 3)
    pool_rows = groups + tl.load(groups + 4)
    if tl.load(groups + 5) != 0:
        blocks += num_blocks * 4
        num_blocks = num_small_blocks
    splits = 1
    if not EMBEDDING:
        splits, _ = split_inputs(features, tl.load(groups + 1) * num_slices, units, max_splits, split_block)
    for unit in tl.range(tl.program_id(0), tl.load(groups) * num_blocks, tl.num_programs(0)):
        tile = groups + _HEADER + unit // num_blocks * 8
        block = blocks + unit % num_blocks * 4
        part_slice = tl.load(block)
        first = tl.multiple_of(tl.load(block + 1), ALIGNMENT)
        stop = tl.multiple_of(tl.load(block + 2), ALIGNMENT)
        token_ids = order + tl.load(tile)
        num_tokens = tl.load(tile + 1)
        rows = pool_rows + tl.load(tile + 2)
        num_rows = tl.load(tile + 3)
        values = h
        if not EMBEDDING:
            values += (part_slice * splits).to(tl.int64) * h_stride + tl.load(tile + 4)
        if num_tokens == SINGLE:
            n = first + tl.arange(0, BLOCK)
            _expand_tile(
                y, b, live, rows, values, ids, token_ids, n, n < stop, num_tokens, num_rows, tl.load(tile + 5),
                part_slice, y_stride, row_stride, live_stride, h_stride, splits, 1, ROWS, BLOCK, ONE_SPLITS, EMBEDDING,
            )  # fmt: skip
        else:
            for part in tl.range(first, stop, DOT_BLOCK):
                n = tl.multiple_of(part, ALIGNMENT) + tl.arange(0, DOT_BLOCK)
                _expand_tile(
                    y, b, live, rows, values, ids, token_ids, n, n < stop, num_tokens, num_rows, tl.load(tile + 5),
                    part_slice, y_stride, row_stride, live_stride, h_stride, splits, TILE, ROWS, DOT_BLOCK, SPLITS,
                    EMBEDDING,
                )  # fmt: skip


@triton.jit
def gain_kernel(
    y,  # [T, OUT], changed
    excess,  # [slots, OUT]
    slots,  # [T] int32
    bias,  # [OUT]
    residual,  # [T, OUT]
    y_stride,
    excess_stride,
    residual_stride,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """y[t] += (y[t] - bias - residual[t]) · excess[slots[t]] for tokens with a slot; y [T, OUT] is mutated."""
    token = (tl.program_id(0) // tl.cdiv(OUT, BLOCK)).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(0) % tl.cdiv(OUT, BLOCK) * BLOCK + tl.arange(0, BLOCK)
        wanted = n < OUT
        value = tl.load(y + token * y_stride + n, mask=wanted, other=0.0).to(tl.float32)
        base = value
        if HAS_RESIDUAL:
            base -= tl.load(residual + token * residual_stride + n, mask=wanted, other=0.0).to(tl.float32)
        if HAS_BIAS:
            base -= tl.load(bias + n, mask=wanted, other=0.0).to(tl.float32)
        value += base * tl.load(excess + slot * excess_stride + n, mask=wanted, other=0.0).to(tl.float32)
        tl.store(y + token * y_stride + n, value.to(y.dtype.element_ty), mask=wanted)


def compile_cases() -> list[CompileCase]:
    """Cases of both tiles of both kernels: each dtype, merged slices, an odd width, and embeddings."""
    cases = []
    for dtype, features, tile in [
        *(("bf16", 4096, tile) for tile in (16, 64)),
        *(("fp16", 14336, tile) for tile in (16, 64)),
        *(("fp32", 896, tile) for tile in (16, 64)),
        ("bf16", 1111, 16),
    ]:
        shrinks, expands, one_slice = SHRINK_CONFIGS[tile], EXPAND_CONFIGS[tile], dtype == "bf16" and features == 4096
        pool = {"live": "*u8", "groups": "*i32"}
        common = {"TILE": tile, "ROWS": BLOCK_ROWS, "SINGLE": 1}
        label = f"{dtype} tile{tile}"
        shrink = common | {"FEATURES": features, "SLICES": 3, "BLOCK": shrinks.block, "DOT_BLOCK": shrinks.dot_block}
        shrink["HAS_NORM"] = False
        types = pool | {"x a": f"*{dtype}", "h scale": "*fp32", "scale_unit": "fp32"}
        name = f"lora shrink {label} in{features}"
        cases.append(make_case(name, shrink_kernel, shrink, types, **_launch(shrinks)))
        cases += [_one_slice(cases[-1])] if one_slice else []
        cases += [_invariant(cases[-1])] if one_slice and tile == 16 else []
        if tile == 16:
            normed = with_norm(shrinks)
            constants = shrink | {"HAS_NORM": True, "BLOCK": normed.block, "DOT_BLOCK": normed.dot_block}
            cases.append(make_case(f"{name} norm", shrink_kernel, constants, types, **_launch(normed)))
        alignment = 16 if features % 16 == 0 else 1
        itemsize = 4 if dtype == "fp32" else 2
        expands = fit_registers(expands, alignment, itemsize, embeds=False)
        expand = common | {"ALIGNMENT": alignment, "EMBEDDING": False}
        expand |= {"BLOCK": expands.block, "DOT_BLOCK": expands.dot_block}
        expand |= {"SPLITS": EXPAND_SPLITS[tile], "ONE_SPLITS": EXPAND_SPLITS[1]}
        types = pool | {"y b": f"*{dtype}", "h": "*fp32", "ids": "*i64", "blocks": "*i32"}
        name = f"lora expand {label} a{alignment}"
        cases.append(make_case(name, expand_kernel, expand, types, **_launch(expands)))
        if one_slice:
            cases.append(_one_slice(cases[-1]))
            cases += [_invariant(cases[-1])] if tile == 16 else []
            embedding, types = expand | {"EMBEDDING": True}, types | {"h": f"*{dtype}"}
            launch = _launch(fit_registers(expands, alignment, itemsize, embeds=True))
            case = make_case(f"lora embedding {label}", expand_kernel, embedding, types, **launch)
            cases.append(case._replace(ones=("live_stride",)))
        gains = {"OUT": features, "BLOCK": GAIN_BLOCK, "HAS_BIAS": tile == 16, "HAS_RESIDUAL": True}
        types = {"slots": "*i32", "y excess bias residual": f"*{dtype}"}
        name = f"lora gains {dtype} out{features}{' bias' if tile == 16 else ''}"
        cases.append(make_case(name, gain_kernel, gains, types))
    return cases


def _launch(config: LoRAShrinkConfig | LoRAExpandConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _one_slice(case: CompileCase) -> CompileCase:
    """Case of a projection whose slices are not merged."""
    constants = case.constexprs | ({"SLICES": 1} if "SLICES" in case.constexprs else {})
    return case._replace(name=f"{case.name} one slice", constexprs=constants, ones=("live_stride",))


def _invariant(case: CompileCase) -> CompileCase:
    """Case in which every tile uses tensor cores, also one of a single token."""
    return case._replace(name=f"{case.name} invariant", constexprs=case.constexprs | {"SINGLE": 0})
