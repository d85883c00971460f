"""Product of up to 16 tokens with all that a layer does around it: RMS norm of the inputs, bias, the adapters' expand,
gated activation and residual in one launch. T tokens, I inputs, O outputs.

With so few tokens the time is that of reading the weight, and each further launch costs as much as a megabyte of it.

The norm's weights multiply the inputs on the way into the product, and the root mean square of a token, which only the
last input completes, divides the sums. If one program's sums are a part of the inputs, the last program to arrive
adds the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..act_and_mul.triton import gated
from ..compile_case import CompileCase, make_case
from ..lora.groups import FEW_TOKENS
from ..lora.triton import split_inputs
from ..split_sums import is_last, store_sums, sum_of_parts

BLOCK_O, BLOCK_K = 32, 128
"""Outputs of a program, and bytes divided by two of a step of its loop over inputs: 8 KiB of the weight."""
BLOCK_R = 32
"""Rank rows at a time."""
NUM_WARPS, NUM_STAGES = 4, 4
"""Launch config: 32 KiB of the weight are in flight on a multiprocessor for each program, 64 KiB with a gate."""
_TOKENS = tl.constexpr(FEW_TOKENS)
_SPLITS = tl.constexpr(8)  # parts of the shrink's sums that are loaded at once
_LISTS = tl.constexpr(8)  # index of the lists of tokens in the array of groups


@triton.jit
def _product_of(
    x_rows, scale, unit, weight_rows, gate_stride, first, stop, IN,
    IS_PADDED: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products [BLOCK_O, BLOCK_T] of the rows at these addresses and, with IS_GATED, of those `gate_stride` elements
    after them, over inputs [first, stop), and with HAS_NORM the squares [BLOCK_T] of these inputs; float32."""
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    sums_up = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_T], tl.float32)
    for start in tl.range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        # The last step of a part ends at its `stop`, unless the inputs do.
        inside = k < IN
        if IS_PADDED:
            inputs = tl.load(x_rows[None, :] + k[:, None], mask=inside[:, None], other=0.0)
            numbers = tl.load(weight_rows[:, None] + k[None, :], mask=inside[None, :], other=0.0)
        else:
            inputs = tl.load(x_rows[None, :] + k[:, None])
            numbers = tl.load(weight_rows[:, None] + k[None, :])
        if HAS_NORM:
            wide = inputs.to(tl.float32)
            squares += wide * wide
            factors = tl.load(scale + k, mask=inside, other=0.0) * unit
            inputs = (wide * factors[:, None]).to(inputs.dtype)
        sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
        if IS_GATED:
            if IS_PADDED:
                above = tl.load(weight_rows[:, None] + gate_stride + k[None, :], mask=inside[None, :], other=0.0)
            else:
                above = tl.load(weight_rows[:, None] + gate_stride + k[None, :])
            sums_up = tl.dot(above, inputs, sums_up, input_precision="ieee")
    return sums, sums_up, tl.sum(squares, axis=0)


@triton.jit
def _add_adapters(
    total, factor, tokens, rows, wanted, part_slice, b, live, groups, h, row_stride, live_stride, h_stride, splits,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_O, BLOCK_T] plus the outputs `rows` of each token's adapter, whose values between shrink and expand
    are `h` times `factor` [BLOCK_T]."""
    num_rows = tl.load(groups + 6)
    pool_rows = groups + tl.load(groups + 4)
    first = tl.load(groups + _LISTS + tokens)
    rank = tl.load(groups + _LISTS + _TOKENS + tokens)
    value = tl.load(groups + _LISTS + 2 * _TOKENS + tokens)
    values = h + (part_slice * splits).to(tl.int64) * h_stride + value - first
    split = tl.arange(0, _SPLITS)[:, None, None]
    for start in tl.range(0, num_rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        row = tl.load(pool_rows + r, mask=r < num_rows, other=0).to(tl.int64)
        alive = tl.load(live + row * live_stride + part_slice, mask=r < num_rows, other=0) != 0
        weights = tl.load(
            b + row[None, :] * row_stride + rows[:, None], mask=alive[None, :] & wanted[:, None], other=0.0
        )
        own = alive[:, None] & (r[:, None] >= first[None, :]) & (r[:, None] < (first + rank)[None, :])
        shrunk = tl.zeros([BLOCK_R, tokens.shape[0]], tl.float32)
        for index in tl.range(0, splits, _SPLITS):
            places = (values[None, :] + r[:, None])[None, :, :] + (index + split).to(tl.int64) * h_stride
            inside = (index + split < splits) & own[None, :, :]
            shrunk += tl.sum(tl.load(places, mask=inside, other=0.0), axis=0)
        shrunk = (shrunk * factor[None, :]).to(weights.dtype)
        total = tl.dot(weights, shrunk, total, input_precision="ieee")
    return total


@triton.jit
def _rows_of_block(
    place, SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr,
    blocks_0: tl.constexpr, blocks_1: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """The slice of a block of outputs, which has one, the block's outputs, and the output after the slice's last."""
    in_1, in_2 = (place >= blocks_0).to(tl.int32), (place >= blocks_0 + blocks_1).to(tl.int32)
    block = place - in_1 * blocks_0 - in_2 * blocks_1
    start, stop = in_1 * SIZE_0 + in_2 * SIZE_1, SIZE_0 + in_1 * SIZE_1 + in_2 * SIZE_2
    return in_1 + in_2, (start + block * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64), stop


@triton.jit
def _exchange_parts(
    total, up, squares, sums, arrival, place, part, num_tokens, rows, tokens, inside, known,
    HEIGHT: tl.constexpr, OUT: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Store a part's sums; return True in the last program of a block to arrive, and there the sums of all parts."""
    target = sums + tokens[None, :] * HEIGHT + rows[:, None]
    column = sums + (HEIGHT - BLOCKS) + place + tokens[None, :] * HEIGHT
    each = num_tokens.to(tl.int64) * HEIGHT
    tl.store(target + part * each, total, mask=inside)
    if IS_GATED:
        tl.store(target + part * each + OUT, up, mask=inside)
    if HAS_NORM:
        tl.store(column + part * each, squares[None, :], mask=known[None, :])
    ends = is_last(arrival, PARTS)
    if ends:
        total = sum_of_parts(target, each, inside, PARTS)
        if IS_GATED:
            up = sum_of_parts(target + OUT, each, inside, PARTS)
        if HAS_NORM:
            squares = tl.sum(sum_of_parts(column, each, known[None, :], PARTS), axis=0)
    return ends, total, up, squares


@triton.jit(
    do_not_specialize=["num_tokens", "h_stride", "units", "max_splits", "split_block"],
    do_not_specialize_on_alignment=["live"],
)
def few_rows_kernel(
    x,  # [T, IN]
    scale,  # [IN] float32, and with `unit` and `root_square` the norm's weights
    weight,  # [OUT, IN], or [2 · OUT, IN] of gate and up
    bias,  # as many as the weight has rows
    residual,  # [T, OUT]
    y,  # [T, OUT]
    sums,  # [PARTS, T, width] float32 of a launch in parts, or anything; `width`: rows of the weight, and blocks
    arrivals,  # [blocks] int32: zeros before and after a launch in parts
    b, live, groups, h,  # of the adapters: see `lora/triton.py`
    unit,  # factor of `scale`, so that no product exceeds the input's dtype
    root_square,  # eps · IN
    num_tokens, IN, x_stride, weight_stride, residual_stride, y_stride,
    row_stride, live_stride, h_stride, units, max_splits, split_block,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr,  # outputs of up to three slices
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ADAPTERS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # name of a gated one, of slices that are gate and up; or ""
    UP_SLICE: tl.constexpr,  # adapters' slice of up: 0 if they have gate and up as one, else 1
    IS_PADDED: tl.constexpr,  # IN is no multiple of BLOCK_K
    PARTS: tl.constexpr,  # of the inputs, each summed by one program
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y = f(norm(x) Wᵀ + b + the adapters' part) + residual."""
    IS_GATED: tl.constexpr = ACTIVATION != ""
    OUT: tl.constexpr = SIZE_0 if IS_GATED else SIZE_0 + SIZE_1 + SIZE_2
    blocks_0: tl.constexpr = (SIZE_0 + BLOCK_O - 1) // BLOCK_O
    blocks_1: tl.constexpr = 0 if IS_GATED else (SIZE_1 + BLOCK_O - 1) // BLOCK_O
    blocks_2: tl.constexpr = 0 if IS_GATED else (SIZE_2 + BLOCK_O - 1) // BLOCK_O
    BLOCKS: tl.constexpr = blocks_0 + blocks_1 + blocks_2
    place = tl.program_id(0) % BLOCKS
    part = tl.program_id(0) // BLOCKS
    part_slice, rows, slice_stop = _rows_of_block(place, SIZE_0, SIZE_1, SIZE_2, blocks_0, blocks_1, BLOCK_O)
    tokens = tl.arange(0, BLOCK_T)
    wanted, known = rows < slice_stop, tokens < num_tokens
    # Rows and tokens past the end repeat one.
    x_rows = x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride
    weight_rows = weight + tl.minimum(rows, slice_stop - 1) * weight_stride
    gate_stride = OUT * weight_stride.to(tl.int64)
    width = tl.cdiv(IN, PARTS * BLOCK_K) * BLOCK_K
    total, up, squares = _product_of(
        x_rows, scale, unit, weight_rows, gate_stride, part * width, tl.minimum((part + 1) * width, IN), IN,
        IS_PADDED, HAS_NORM, IS_GATED, BLOCK_O, BLOCK_T, BLOCK_K,
    )  # fmt: skip
    ends = True
    if PARTS > 1:
        ends, total, up, squares = _exchange_parts(
            total, up, squares, sums, arrivals + place, place, part, num_tokens, rows, tokens,
            wanted[:, None] & known[None, :], known, (2 * OUT if IS_GATED else OUT) + BLOCKS, OUT, BLOCKS, PARTS,
            IS_GATED, HAS_NORM,
        )  # fmt: skip
    if ends:
        factor = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_NORM:
            # If |x|² overflows the factor is 1 / inf = 0, as in the reference.
            factor = tl.rsqrt(squares + root_square) / unit
            total *= factor[None, :]
            up *= factor[None, :]
        if HAS_ADAPTERS:
            slices: tl.constexpr = 1 + (SIZE_1 > 0) + (SIZE_2 > 0) if not IS_GATED else 1 + UP_SLICE
            splits, _ = split_inputs(IN, tl.load(groups + 1) * slices, units, max_splits, split_block)
            total = _add_adapters(
                total, factor, tokens, rows, wanted, part_slice, b, live, groups, h, row_stride, live_stride, h_stride,
                splits, BLOCK_R,
            )  # fmt: skip
            if IS_GATED:
                up = _add_adapters(
                    up, factor, tokens, rows + OUT, wanted, part_slice + UP_SLICE, b, live, groups, h, row_stride,
                    live_stride, h_stride, splits, BLOCK_R,
                )  # fmt: skip
        if IS_GATED:
            if HAS_BIAS:
                total += tl.load(bias + rows, mask=wanted, other=0.0).to(tl.float32)[:, None]
                up += tl.load(bias + OUT + rows, mask=wanted, other=0.0).to(tl.float32)[:, None]
            total = gated(total, up, ACTIVATION)
        store_sums(
            total, y, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride,
            HAS_BIAS and not IS_GATED, HAS_RESIDUAL,
        )  # fmt: skip


def step_inputs(itemsize: int) -> int:
    """Inputs of a step of the loop."""
    return 2 * BLOCK_K // itemsize


def compile_cases() -> list[CompileCase]:
    """Cases of the four products of a layer, with adapters and without, split and not, and of odd sizes."""
    shapes = (
        # name, dtype, inputs, slices, norm, residual, activation, parts
        ("qkv", "bf16", 4096, (4096, 1024, 1024), True, False, "", 1),
        ("qkv parts", "bf16", 4096, (4096, 1024, 1024), True, False, "", 2),
        ("down", "bf16", 14336, (4096, 0, 0), False, True, "", 2),
        ("down", "fp16", 3072, (1024, 0, 0), False, True, "", 6),
        ("gate_up", "bf16", 4096, (14336, 0, 0), True, False, "silu", 1),
        ("gate_up", "fp16", 1024, (3072, 0, 0), True, False, "gelu_pytorch_tanh", 2),
        ("odd", "bf16", 1111, (333, 77, 0), True, False, "", 1),
        ("odd", "fp32", 1111, (333, 0, 0), True, True, "silu", 2),
    )
    return [
        make_case(
            f"linear few {name} {dtype}{' adapters' if has_adapters else ''}",
            few_rows_kernel,
            {
                **dict(zip(("SIZE_0", "SIZE_1", "SIZE_2"), sizes, strict=True)),
                **{"HAS_NORM": has_norm, "HAS_BIAS": name[:3] in ("qkv", "odd"), "HAS_RESIDUAL": has_residual},
                **{"HAS_ADAPTERS": has_adapters, "ACTIVATION": activation, "UP_SLICE": 1 if activation else 0},
                **{"IS_PADDED": inputs % step_inputs(itemsize) != 0, "PARTS": parts},
                **{"BLOCK_O": BLOCK_O, "BLOCK_T": FEW_TOKENS, "BLOCK_K": step_inputs(itemsize), "BLOCK_R": BLOCK_R},
            },
            {
                **{"x weight bias residual y b": f"*{dtype}", "scale sums h": "*fp32", "unit root_square": "fp32"},
                **{"arrivals groups": "*i32", "live": "*u8"},
            },
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        for name, dtype, inputs, sizes, has_norm, has_residual, activation, parts in shapes
        for itemsize in (4 if dtype == "fp32" else 2,)
        for has_adapters in (False, True)
    ]
