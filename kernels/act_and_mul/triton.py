"""Activation of a gated MLP in one launch over tokens and blocks of outputs; gate and up are read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..tuning import bucket, tuned
from ..tuning.configs import ActAndMulConfig

DEFAULT = ActAndMulConfig(block=1024, num_warps=4)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Product act(gate) · up of float32 numbers."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        value = gate / (1.0 + tl.exp(-1.702 * gate))
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    elif ACTIVATION == "silu":
        value = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        value = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # with tanh: x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u))
        value = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return value * up


@triton.jit
def _act_and_mul_kernel(x, y, x_stride, HALF: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    blocks = tl.cdiv(HALF, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HALF
    gate_columns = columns
    up_columns = HALF + columns
    if ACTIVATION == "clamped_swiglu":
        gate_columns = 2 * columns
        up_columns = 2 * columns + 1
    gate = tl.load(x + row * x_stride + gate_columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + up_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * HALF + columns, gated(gate, up, ACTIVATION).to(y.dtype.element_ty), mask=inside)


def act_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """Product act(x[:, :I]) · x[:, I:] of x [T, 2I], whose rows may be any distance apart."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, half = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, half, dtype=x.dtype, device=x.device)
    if y.numel():
        config = tuned(x.device, DEFAULT, bucket(half), x.element_size())
        grid = (num_rows * triton.cdiv(half, config.block),)
        constants = {"HALF": half, "BLOCK": config.block, "ACTIVATION": activation}
        _act_and_mul_kernel[grid](x, y, x.stride(0), **constants, num_warps=config.num_warps)
    return y


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: every dtype and activation, widths of models, and an odd width."""
    return [
        make_case(
            f"act_and_mul {activation} {dtype} w{half}",
            _act_and_mul_kernel,
            {"HALF": half, "BLOCK": DEFAULT.block, "ACTIVATION": activation},
            {"x y": f"*{dtype}"},
            num_warps=DEFAULT.num_warps,
        )
        for activation, dtype, half in (
            ("silu", "bf16", 14336),
            ("silu", "bf16", 4864),
            ("silu", "fp16", 3072),
            ("silu", "fp32", 1111),
            ("gelu_pytorch_tanh", "bf16", 9216),
            ("gelu", "bf16", 4096),
            ("clamped_swiglu", "bf16", 2880),
        )
    ]
