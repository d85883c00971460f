"""Short convolution for GPUs: a program computes a block of channels of some tokens of a row.

A second launch writes the states. Both read copies of the states that rows start with, whose slots may be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..state_plan import StatePlan

if TYPE_CHECKING:
    from . import Filters

_BLOCK = 256
"""Channels of a program."""
_TOKENS = 16
"""Tokens of a program."""


@triton.jit
def _input(x, history, offset, first, columns, inside, x_stride, channels, K: tl.constexpr):
    """Input at `offset` from a row's first token; before it, that of the state."""
    in_state = columns * 0 + offset < 0  # a block: the interpreter has no scalar masks
    old = tl.load(history + (offset + K - 1) * channels + columns, mask=inside & in_state, other=0.0)
    new = tl.load(x + (first + offset) * x_stride + columns, mask=inside & ~in_state, other=0.0)
    return tl.where(in_state, old, new)


@triton.jit(do_not_specialize=["num_rows"])
def _convolve_kernel(
    x,  # [T, C]
    taps,  # [K, C] float32
    bias,  # [C] float32
    histories,  # [B, K - 1, C], contiguous: states that the rows start with
    table,  # StatePlan.table
    y,  # [T, C]
    num_rows,
    x_stride,
    channels,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    row = tl.program_id(0)
    first, end = tl.load(table + row), tl.load(table + row + 1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    history = histories + row.to(tl.int64) * (K - 1) * channels
    begin = tl.program_id(1) * TOKENS
    for t in range(begin, tl.minimum(begin + TOKENS, end - first)):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=inside, other=0.0)
        for j in tl.static_range(K):
            value = _input(x, history, t - (K - 1) + j, first, columns, inside, x_stride, channels, K)
            total += value.to(tl.float32) * tl.load(taps + j * channels + columns, mask=inside, other=0.0)
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(y + (first + t) * channels + columns, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _write_kernel(
    x,  # [T, C]
    histories,  # [B, K - 1, C], contiguous
    table,  # StatePlan.table
    states,  # [S, K - 1, C]
    num_rows,
    x_stride,
    channels,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(table + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    history = histories + row.to(tl.int64) * (K - 1) * channels
    write_firsts = table + 2 * num_rows + 1
    offsets = write_firsts + num_rows + 1
    slots = offsets + tl.load(write_firsts + num_rows)
    for write in range(tl.load(write_firsts + row), tl.load(write_firsts + row + 1)):
        offset = tl.load(offsets + write)
        target = states + tl.load(slots + write) * (K - 1) * channels
        for i in tl.static_range(K - 1):
            value = _input(x, history, offset - (K - 1) + i, first, columns, inside, x_stride, channels, K)
            tl.store(target + i * channels + columns, value, mask=inside)


def short_convolution(x: Tensor, filters: Filters, plan: StatePlan, states: Tensor, *, silu: bool) -> Tensor:
    """See `kernels.short_convolution.short_convolution`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel, channels = filters.taps.shape
    histories = states.index_select(0, plan.sources)
    blocks = triton.cdiv(channels, _BLOCK)
    _convolve_kernel[(plan.num_rows, triton.cdiv(plan.longest, _TOKENS), blocks)](
        *(x, filters.taps, filters.taps if filters.bias is None else filters.bias, histories, plan.table, y),
        *(plan.num_rows, x.stride(0), channels),
        K=kernel,
        TOKENS=_TOKENS,
        BLOCK=_BLOCK,
        HAS_BIAS=filters.bias is not None,
        SILU=silu,
    )
    _write_kernel[(plan.num_rows, blocks)](
        *(x, histories, plan.table, states, plan.num_rows, x.stride(0), channels), K=kernel, BLOCK=_BLOCK
    )
    return y


def compile_cases() -> list[CompileCase]:
    """Cases of both kernels: LFM2's filters and Qwen3.5's, each dtype."""
    cases = []
    for dtype, kernel, has_bias, silu in (("bf16", 4, False, True), ("fp16", 3, True, False), ("fp32", 3, False, True)):
        types = {"x histories y": f"*{dtype}", "taps bias": "*fp32", "table": "*i64"}
        constants = {"K": kernel, "BLOCK": _BLOCK}
        flags = {"TOKENS": _TOKENS, "HAS_BIAS": has_bias, "SILU": silu}
        cases.append(make_case(f"short_convolution {dtype} k{kernel}", _convolve_kernel, constants | flags, types))
        types = {"x histories states": f"*{dtype}", "table": "*i64"}
        cases.append(make_case(f"short_convolution write {dtype} k{kernel}", _write_kernel, constants, types))
    return cases
