"""RMS norm in one launch: a program holds one row, or several short ones, in registers, and reads each element once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..tuning import bucket, tuned
from ..tuning.configs import RMSNormConfig
from .torch import NormWeight

_MAX_WIDTH = 65536
"""Longest row that registers hold: 64 elements for each thread of the largest program."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [num_rows, WIDTH]
    residual,  # [num_rows, WIDTH]; added to x first
    total,  # [num_rows, WIDTH], contiguous: that sum
    scale,  # [WIDTH] float32
    y,  # [num_rows, WIDTH], contiguous
    root_square,  # eps * WIDTH
    num_rows,
    row_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < WIDTH)
    value = tl.load(x + rows * row_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + rows * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + rows * WIDTH + columns, value, mask=inside)
    wide = value.to(tl.float32)
    # If |x|² overflows the factor is 1 / inf = 0, as in the reference.
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) + root_square)
    factors = tl.load(scale + columns, mask=columns < WIDTH, other=0.0)
    normed = wide * inverse[:, None] * factors
    tl.store(y + rows * WIDTH + columns, normed.to(y.dtype.element_ty), mask=inside)


def default_config(width: int) -> RMSNormConfig:
    """Default launch config for rows that are padded to `width`."""
    # Eight elements for each thread, one 16-byte load of a 2-byte dtype; more for long rows.
    num_warps = 4 if width <= 1024 else 8 if width <= 8192 else 16 if width <= 16384 else 32
    return RMSNormConfig(max(1, 1024 // width), num_warps)


def serves(x: Tensor, weight: NormWeight) -> bool:
    """True when the kernels compute norms of x: rows of one weight, as hidden states are."""
    return x.dim() == 2 and weight.repeats == 1 and weight.size == x.shape[1] <= _MAX_WIDTH


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor:
    """RMS norm of x [T, H], whose rows may be any distance apart; `serves` must be True."""
    return _launch(x, None, None, weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: NormWeight) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum, of x and residual [T, H], whose rows are contiguous: two new tensors; `serves` must
    be True."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, total, weight), total


def _launch(x: Tensor, residual: Tensor | None, total: Tensor | None, weight: NormWeight) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x.shape
    if num_rows == 0:
        return y
    block = bucket(width)
    config = tuned(x.device, default_config(block), block, x.element_size())
    _rms_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
        x,
        x if residual is None else residual,
        y if total is None else total,
        weight.scale,
        y,
        weight.root_value**2,
        num_rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=config.rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=config.num_warps,
    )
    return y


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: hidden sizes of small and large models, each dtype, with and without a residual."""
    shapes = [
        ("bf16", 128),
        ("bf16", 4096),
        ("bf16", 5120),
        ("bf16", 16384),
        ("fp16", 4096),
        ("fp32", 1024),
        ("bf16", 896),
    ]
    return [
        make_case(
            f"rms_norm {dtype} w{width}{' residual' if has_residual else ''}",
            _rms_norm_kernel,
            {"WIDTH": width, "BLOCK": bucket(width), "ROWS": config.rows, "HAS_RESIDUAL": has_residual},
            {"x residual total y": f"*{dtype}", "scale": "*fp32", "root_square": "fp32"},
            num_warps=config.num_warps,
        )
        for dtype, width in shapes
        for config in [default_config(bucket(width))]
        for has_residual in (False, True)
    ]
