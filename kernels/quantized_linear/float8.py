"""Products of float8 weights with inputs that are rounded to float8 e4m3, as the checkpoint specifies.

    x ≈ s · q,  s = min(max |x|, bound) / 448 of each row, or the checkpoint's number;  q = float8(x / s), ties to even
    y = s · factors · (q · codes) + b

Sums are in float32, so that y differs from x Wᵀ by the rounding of inputs alone. Few tokens are
multiplied by `product_kernel`, which reads the weight once and adds bias and residual; from `SCALED_TOKENS` on
`torch._scaled_mm` multiplies float8 by tensor cores. Both have the same q and s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from .device_weight import DeviceWeight, chunk_of
from .triton_codes import inputs_of

SCALED_TOKENS = 17
"""Tokens from which on `torch._scaled_mm` multiplies: up to 16 a product takes the time of reading the weight."""
LARGEST = tl.constexpr(448.0)
"""Largest number of float8 e4m3."""
BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _nearest(value):
    """Nearest number of float8 e4m3 to `value` float32, ties to even; its steps are those of 3 bits, and 2^-9 at least.
    NaN stays. Done by arithmetic, of which Triton's interpreter gives the same results as a device."""
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))  # keeps NaN
    bits = value.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Numbers near 1.5 · 2^14 have steps of 2^-9.
    near = tl.where(tl.abs(value) < 0.015625, value + 24576.0 - 24576.0, near)
    return tl.where(value == value, near, value)


@triton.jit(do_not_specialize=["fixed", "bound"])
def float8_kernel(
    x,  # [T, IN]
    rounded,  # [T, COLUMNS] float8 e4m3, or of another dtype that holds its numbers
    scales,  # [T] float32
    IN, COLUMNS, x_stride, fixed, bound,
    IS_FIXED: tl.constexpr,  # all rows have the scale `fixed`
    CHUNK: tl.constexpr,  # order of the columns: that of a weight's codes
    BLOCK: tl.constexpr,
):  # fmt: skip
    """scales = min(max |x|, bound) / 448 of each row, or `fixed`; rounded = x / scale, limited to ±448, and zeros after
    the inputs."""
    token = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    scale = fixed
    if not IS_FIXED:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, IN, BLOCK):
            k = start + step
            value = tl.load(x + token * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        scale = tl.math.div_rn(tl.minimum(tl.max(largest, 0), bound), LARGEST)
    divisor = tl.where(scale > 0, scale, 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK):
        k = inputs_of(start + step, CHUNK)
        value = tl.load(x + token * x_stride + k, mask=k < IN, other=0.0).to(tl.float32)
        number = _nearest(tl.math.div_rn(value, divisor))
        total += number
        place = rounded + token * COLUMNS + start + step
        tl.store(place, number.to(rounded.dtype.element_ty), mask=start + step < COLUMNS)
    tl.store(scales + token, scale + 0 * tl.sum(total, 0))  # NaN if an input is


def round_inputs(x: Tensor, weight: DeviceWeight, *, as_codes: bool) -> tuple[Tensor, Tensor]:
    """Rounded inputs and their scales [T, 1] float32 of x [T, I], whose rows are contiguous.

    With `as_codes` they are float8 [T, S], in the order of the weight's codes; else [T, I] numbers of x's dtype.
    """
    assert weight.float8_scale is not None
    columns = weight.codes.shape[1] if as_codes else x.shape[1]
    rounded = torch.empty(len(x), columns, dtype=torch.float8_e4m3fn if as_codes else x.dtype, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    float8_kernel[(len(x),)](
        *(x, rounded, scales, x.shape[1], columns, x.stride(0), float(weight.float8_scale), weight.float8_bound),
        IS_FIXED=weight.float8_scale > 0,
        CHUNK=weight.chunk if as_codes else 1,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return rounded, scales


def multiply_scaled(x: Tensor, weight: DeviceWeight, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """y [T, O] = x Wᵀ + b (+ residual) by `torch._scaled_mm`; y is mutated.

    Its second operand has columns one after the other, which are rows of codes. A common scale of all inputs and one of
    all outputs are a number each; else there is one for each row, and one for each output.
    """
    codes, scales = round_inputs(x, weight, as_codes=True)
    factors = weight.factors.unsqueeze(0)
    if weight.float8_scale and weight.has_one_factor:
        scales, factors = scales[:1], factors[:, :1]
    operands = codes, weight.codes.view(torch.float8_e4m3fn).t(), scales, factors
    if y.is_contiguous():
        torch._scaled_mm(*operands, bias=bias, out_dtype=y.dtype, out=y)
    else:  # a weight with other blocks of another form
        y.copy_(torch._scaled_mm(*operands, bias=bias, out_dtype=y.dtype))
    if residual is not None:
        y.add_(residual)


def float8_cases() -> list[CompileCase]:
    """Cases of the kernel: both scales and results. sm_80 cannot convert to float8."""
    cases = []
    for is_fixed, result, chunk in ((False, "fp8e4nv", chunk_of(128)), (True, "bf16", 1), (False, "bf16", 1)):
        constants = {"IS_FIXED": is_fixed, "CHUNK": chunk, "BLOCK": BLOCK}
        types = {"x": "*bf16", "rounded": f"*{result}", "scales": "*fp32", "fixed bound": "fp32"}
        name = f"quantized_linear float8 {result}{' fixed' if is_fixed else ''}"
        archs = (80, 90, 100) if result == "bf16" else (90, 100)
        cases.append(make_case(name, float8_kernel, constants, types, num_warps=NUM_WARPS, archs=archs))
    return cases
