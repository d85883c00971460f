"""Rotation in one launch: every element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase
from ..tuning import bucket, tuned
from ..tuning.configs import RopeConfig

DEFAULT = RopeConfig(block_heads=8, num_warps=4)


@triton.jit
def rotate_pairs(low, high, cos, sin, columns, mask, HALF: tl.constexpr):
    """Halves of rotated heads, in float32: low · cos + high · sin and high · cos + low · sin, where sin brings its
    sign.

    `low` and `high` [heads, pairs] are the first and second halves of heads; `cos` and `sin` point to a token's angles
    [2 * HALF]; `columns` [pairs] are the pairs' numbers and `mask` [pairs] marks those that exist.
    """
    cos_low = tl.load(cos + columns, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + columns, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    return low * cos_low + high * sin_low, high * cos_high + low * sin_high


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    y,
    x_token_stride,
    x_head_stride,
    angle_stride,
    num_heads,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """y [T, heads, 2 * HALF] = x rotated; a program takes BLOCK_HEADS heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    mask = (heads < num_heads)[:, None] & (columns < HALF)[None, :]
    source = x + token * x_token_stride + heads[:, None] * x_head_stride + columns[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    angles = token * angle_stride
    low, high = rotate_pairs(low, high, cos + angles, sin + angles, columns, columns < HALF, HALF)
    target = y + token * num_heads * (2 * HALF) + heads[:, None] * (2 * HALF) + columns[None, :]
    tl.store(target, low.to(y.dtype.element_ty), mask=mask)
    tl.store(target + HALF, high.to(y.dtype.element_ty), mask=mask)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kernels.rope.apply_rope` on a GPU; sums are rounded to x's dtype once."""
    if x.stride(2) != 1:
        x = x.contiguous()
    num_tokens, num_heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    config = tuned(x.device, DEFAULT, bucket(head_dim), x.element_size())
    rope_kernel[(num_tokens, triton.cdiv(num_heads, config.block_heads))](
        *(x, cos, sin, y, x.stride(0), x.stride(1), cos.stride(0), num_heads),
        HALF=head_dim // 2,
        BLOCK_HEADS=config.block_heads,
        BLOCK_HALF=bucket(head_dim // 2),
        num_warps=config.num_warps,
    )
    return y


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel."""
    cases = []
    for dtype, head_dim in (("bf16", 64), ("bf16", 128), ("fp16", 80), ("fp32", 256)):
        pointers = dict.fromkeys(("x", "cos", "sin", "y"), f"*{dtype}")
        numbers = dict.fromkeys(("x_token_stride", "x_head_stride", "angle_stride", "num_heads"), "i32")
        half = head_dim // 2
        constants = {"HALF": half, "BLOCK_HEADS": DEFAULT.block_heads, "BLOCK_HALF": bucket(half)}
        signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
        name = f"rope {dtype} d{head_dim}"
        cases.append(CompileCase(name, rope_kernel, signature, constants, DEFAULT.num_warps))
    return cases
