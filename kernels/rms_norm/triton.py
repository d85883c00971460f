"""RMS norm in one launch: a program holds one row, or several short ones, in registers, and reads each element once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase
from ..tuning import bucket, tuned
from ..tuning.configs import RMSNormConfig
from .torch import NormWeight

_MAX_WIDTH = 65536
"""Longest row that registers hold: 64 elements for each thread of the largest program."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [outer, inner, WIDTH]
    residual,  # [outer * inner, WIDTH]; added to x first
    total,  # [outer * inner, WIDTH], contiguous: that sum
    scale,  # [repeats, WIDTH] float32
    y,  # [outer * inner, WIDTH], contiguous
    root_square,  # eps * WIDTH
    num_rows,
    inner,
    repeats,
    outer_stride,
    inner_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    starts = (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride
    value = tl.load(x + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    if HAS_RESIDUAL:
        place = residual + rows.to(tl.int64)[:, None] * residual_stride + columns[None, :]
        added = value.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(total + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], value, mask=inside)
    wide = value.to(tl.float32)
    # Where |x|² overflows the factor is 1 / inf = 0, as in the reference.
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) + root_square)
    factors = tl.load(scale + (rows % repeats)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    normed = wide * inverse[:, None] * factors
    tl.store(y + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], normed.to(y.dtype.element_ty), mask=inside)


def default_config(width: int) -> RMSNormConfig:
    """Default launch config for rows that are padded to `width`."""
    # Eight elements for each thread, one 16-byte load of a 2-byte dtype; more for long rows.
    num_warps = 4 if width <= 1024 else 8 if width <= 8192 else 16 if width <= 16384 else 32
    return RMSNormConfig(max(1, 1024 // width), num_warps)


def _launch(x: Tensor, residual: Tensor | None, total: Tensor | None, weight: NormWeight) -> Tensor:
    width = x.shape[-1]
    wide = x if x.dim() == 3 else x.reshape(-1, x.shape[-2] if x.dim() > 3 else 1, width)
    if wide.stride(2) != 1:
        wide = wide.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = wide.shape[0] * wide.shape[1]
    if num_rows == 0:
        return y
    block = bucket(width)
    config = tuned(x.device, default_config(block), block, x.element_size())
    _rms_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
        wide,
        wide if residual is None else residual,
        y if total is None else total,
        weight.scale,
        y,
        weight.root_value**2,
        num_rows,
        wide.shape[1],
        weight.repeats,
        wide.stride(0),
        wide.stride(1),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=config.rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=config.num_warps,
    )
    return y


def serves(x: Tensor, weight: NormWeight) -> bool:
    """True when the kernel computes `rms_norm` of x."""
    repeats = weight.repeats
    return (
        x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and weight.size == x.shape[-1] <= _MAX_WIDTH
        and (repeats == 1 or (weight.scale.dim() == 2 and x.dim() > 1 and x.shape[-2] == repeats))
    )


def rms_norm(x: Tensor, weight: NormWeight) -> Tensor:
    """RMS norm of x [..., H], whose rows may be any distance apart; `serves` must be True."""
    return _launch(x, None, None, weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: NormWeight) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum, of x [T, H] and residual [T, H]: two new tensors; `serves` must be True."""
    if residual.stride(1) != 1:
        raise ValueError(f"residual's rows must be contiguous, its strides are {residual.stride()}")
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, total, weight), total


_SIGNATURE = {
    "root_square": "fp32",
    **dict.fromkeys(("num_rows", "inner", "repeats", "outer_stride", "inner_stride", "residual_stride"), "i32"),
    **dict.fromkeys(("WIDTH", "BLOCK", "ROWS", "HAS_RESIDUAL"), "constexpr"),
}


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: hidden sizes from a head's to a large model's, each dtype, with and without a residual; and
    several heads of a token, with one weight and with their own."""
    cases = []
    shapes = [
        ("bf16", 128),
        ("bf16", 4096),
        ("bf16", 5120),
        ("bf16", 16384),
        ("fp16", 4096),
        ("fp32", 1024),
        ("bf16", 896),
    ]
    for dtype, width in shapes:
        for has_residual in (False, True):
            config = default_config(bucket(width))
            tensors = {
                "x": f"*{dtype}",
                "residual": f"*{dtype}",
                "total": f"*{dtype}",
                "scale": "*fp32",
                "y": f"*{dtype}",
            }
            constants = {"WIDTH": width, "BLOCK": bucket(width), "ROWS": config.rows, "HAS_RESIDUAL": has_residual}
            name = f"rms_norm {dtype} w{width}{' residual' if has_residual else ''}"
            case = CompileCase(name, _rms_norm_kernel, tensors | _SIGNATURE, constants, config.num_warps)
            cases.append(case._replace(ones=("inner", "repeats")))
            if width == 128 and not has_residual:
                cases.append(case._replace(name=f"{name} heads", ones=("repeats",)))
                cases.append(case._replace(name=f"{name} heads' own"))
    return cases
