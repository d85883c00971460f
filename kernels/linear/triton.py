"""Product with a plain weight whose sums have one order for any number of tokens: one tile, and parts of the inputs
that depend on the weight's shape alone. T tokens, I inputs, O outputs.

A library chooses another kernel, and with it another order of the sum over I, for another number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compile_case import CompileCase, make_case
from ..split_sums import is_last, store_sums, sum_of_parts
from . import triton_few

BLOCK_T = 64
"""Tokens of every tile. Up to this number, products take about the time of reading the weight."""
BLOCK_O, BLOCK_K = 128, 64
"""Outputs of a program, and inputs of a step of its loop."""
NUM_WARPS, NUM_STAGES = 8, 4
"""Launch config for 16-bit numbers."""


@triton.jit
def _product_of(
    x_rows, weight_rows, first, stop, IN,
    IS_PADDED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product [BLOCK_O, BLOCK_T] float32 of the rows at these addresses, over inputs [first, stop)."""
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for start in tl.range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if IS_PADDED:
            numbers = tl.load(weight_rows[:, None] + k[None, :], mask=(k < IN)[None, :], other=0.0)
            inputs = tl.load(x_rows[None, :] + k[:, None], mask=(k < IN)[:, None], other=0.0)
        else:
            numbers = tl.load(weight_rows[:, None] + k[None, :])
            inputs = tl.load(x_rows[None, :] + k[:, None])
        sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_tokens", "IN", "OUT"])
def invariant_kernel(
    x,  # [T, IN]
    weight,  # [OUT, IN]
    bias,  # [OUT]
    residual,  # [T, OUT]
    y,  # [T, OUT]
    sums,  # [PARTS, T, OUT] float32 of a launch in parts, or anything
    arrivals,  # [programs of a part] int32: zeros before and after a launch in parts
    num_tokens, IN, OUT, x_stride, weight_stride, residual_stride, y_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_PADDED: tl.constexpr,  # IN is no multiple of BLOCK_K
    PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # a program has one part; else all
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x Wᵀ + b (+ residual); the bits of a row are the same with IS_SPLIT and without, and in any tile."""
    tiles, blocks = tl.cdiv(num_tokens, BLOCK_T), tl.cdiv(OUT, BLOCK_O)
    place = tl.program_id(0) % (blocks * tiles)
    mine = tl.program_id(0) // (blocks * tiles)
    tokens = (place % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows = (place // tiles * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    wanted, known = rows < OUT, tokens < num_tokens
    # Rows past the end repeat one.
    x_rows = x + tl.minimum(tokens, num_tokens - 1) * x_stride
    weight_rows = weight + tl.minimum(rows, OUT - 1) * weight_stride
    width = tl.cdiv(IN, PARTS * BLOCK_K) * BLOCK_K
    total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for index in tl.range(1 if IS_SPLIT else PARTS):
        first = (mine + index) * width
        stop = tl.minimum(first + width, IN)
        total += _product_of(x_rows, weight_rows, first, stop, IN, IS_PADDED, BLOCK_O, BLOCK_T, BLOCK_K)
    if IS_SPLIT:
        each = num_tokens.to(tl.int64) * OUT
        inside = wanted[:, None] & known[None, :]
        target = sums + tokens[None, :] * OUT + rows[:, None]
        tl.store(target + mine * each, total, mask=inside)
        if is_last(arrivals + place, PARTS):
            store_sums(
                sum_of_parts(target, each, inside, PARTS), y, bias, residual, rows, wanted, tokens, known,
                y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
    else:
        store_sums(
            total, y, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL
        )


def compile_cases() -> list[CompileCase]:
    """Cases of the kernels: split and not, dtypes, and inputs with a tail."""
    return triton_few.compile_cases() + [
        make_case(
            f"linear invariant {dtype} parts{parts}{' split' if is_split else ''}{' padded' if is_padded else ''}",
            invariant_kernel,
            {
                "HAS_BIAS": is_padded, "HAS_RESIDUAL": True, "IS_PADDED": is_padded, "PARTS": parts,
                "IS_SPLIT": is_split, "BLOCK_O": BLOCK_O, "BLOCK_T": BLOCK_T, "BLOCK_K": BLOCK_K,
            },
            {"x weight bias residual y": f"*{dtype}", "sums": "*fp32", "arrivals": "*i32"},
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES if dtype != "fp32" else 2,
            # On Ampere a launch for several tiles spills 8 bytes of a thread, which costs time.
            archs=(90, 100) if parts == 8 and not is_split else (80, 90, 100),
        )
        for dtype, parts, is_split, is_padded in (
            ("bf16", 8, True, False),
            ("bf16", 8, False, False),
            ("bf16", 1, False, True),
            ("fp16", 3, True, True),
            ("fp32", 4, True, False),
            ("fp32", 1, False, True),
        )
    ]  # fmt: skip
