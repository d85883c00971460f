"""Rows of a quantised weight in the dtype of products. For many tokens a library's product reads them: writing them
once costs less than dequantising them for each tile of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from .device_weight import WHOLE, DeviceWeight, chunk_of
from .triton_codes import in_order, numbers_of

BLOCK_O, BLOCK_K, NUM_WARPS = 16, 128, 4


@triton.jit(do_not_specialize=["first", "IN", "OUT", "stop"])
def dense_kernel(
    codes,  # [OUT, codes_stride]
    scales,  # [G, OUT]
    offsets,  # [G, OUT]
    levels,
    factors,  # [OUT]
    dense,  # [stop - first, IN]
    first, stop, IN, OUT, codes_stride,
    FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dense[o - first] = W[o] for the outputs [first, stop); of permuted inputs in the order of the codes."""
    dtype: tl.constexpr = dense.dtype.element_ty
    blocks = tl.cdiv(codes_stride, BLOCK_K)
    rows = first + tl.program_id(0) // blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    wanted = rows < stop
    step = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    packed = tl.load(codes + rows.to(tl.int64)[:, None] * codes_stride + step[None, :], mask=wanted[:, None], other=0)
    packed = in_order(packed, CHUNK)
    factor = tl.load(factors + rows, mask=wanted, other=0.0)[:, None]
    for half in tl.static_range(2 if FORM == "int4" or FORM == "levels4" else 1):
        k = step + half * codes_stride
        inside = wanted[:, None] & (k < IN)[None, :]
        numbers = numbers_of(packed, levels, dtype, half, FORM, ZERO).to(tl.float32)
        place = (k // GROUP).to(tl.int64)[None, :] * OUT + rows[:, None]
        if HAS_SCALES:
            numbers *= tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_OFFSETS:
            numbers += tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)
        target = dense + (rows - first).to(tl.int64)[:, None] * IN + k[None, :]
        tl.store(target, (numbers * factor).to(dtype), mask=inside)


def dense_rows(weight: DeviceWeight, first: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows [first, stop) of a weight whose inputs are not rounded: [stop - first, I] of `dtype`, the inputs in the
    order of the codes."""
    dense = torch.empty(stop - first, weight.inputs, dtype=dtype, device=weight.codes.device)
    programs = triton.cdiv(stop - first, BLOCK_O) * triton.cdiv(weight.codes.shape[1], BLOCK_K)
    dense_kernel[(programs,)](
        *(weight.codes, *weight.tables, weight.factors, dense),
        *(first, stop, weight.inputs, weight.outputs, weight.codes.stride(0)),
        **weight.constants,
        BLOCK_O=BLOCK_O,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
    )
    return dense


def dense_cases() -> list[CompileCase]:
    """Cases of the forms that differ most."""
    cases = []
    for form, group, offsets, dtype in (
        ("int4", 128, True, "bf16"),
        ("levels4", 64, False, "bf16"),
        ("int8", WHOLE, False, "fp16"),
        ("fp8", 128, False, "bf16"),
        ("int4", 32, True, "fp32"),
    ):
        constants = {"FORM": form, "GROUP": group, "ZERO": 0, "HAS_SCALES": group < WHOLE, "HAS_OFFSETS": offsets}
        table = "*fp32" if dtype == "fp32" or group == WHOLE else "*fp16"
        types = {"codes": "*i8" if form == "int8" else "*u8", "scales offsets": table, "factors": "*fp32"}
        types |= {"levels dense": f"*{dtype}"}
        constants |= {"CHUNK": 1 if dtype == "fp32" else chunk_of(group), "BLOCK_O": BLOCK_O, "BLOCK_K": BLOCK_K}
        name = f"quantized_linear dense {form} g{group % WHOLE} {dtype}"
        cases.append(make_case(name, dense_kernel, constants, types, num_warps=NUM_WARPS))
    return cases
