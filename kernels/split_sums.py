"""Sums of products [outputs, tokens]: those split among programs, of which the last to end adds the parts, in order;
and their end, the addition of bias and residual."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(arrival, num_programs):
    """True in the last of the programs that arrive, which sees what the others stored and sets the count to zero."""
    tl.debug_barrier()  # every thread has stored before one of them counts this program
    last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_programs - 1
    if last:
        tl.store(arrival, 0)
    return last


@triton.jit
def sum_of_parts(first, each, inside, PARTS: tl.constexpr):
    """Sum of PARTS arrays at `first` and `each` elements after the one before, in order."""
    total = tl.zeros(inside.shape, tl.float32)
    # As many loads at a time as leave the product its registers.
    for part in tl.range(PARTS, loop_unroll_factor=max(1, 128 // inside.shape[1])):
        # Other multiprocessors wrote them: this one's cache is bypassed.
        total += tl.load(first + part * each, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def store_sums(
    total, y, bias, residual, rows, wanted, tokens, known, y_stride, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[tokens, rows] = total [rows, tokens] with bias and residual, of the rows that are `wanted` and the tokens that
    are `known`; y is mutated."""
    inside = wanted[:, None] & known[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=wanted, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        added = tl.load(residual + tokens[None, :] * residual_stride + rows[:, None], mask=inside, other=0.0)
        total += added.to(tl.float32)
    tl.store(y + tokens[None, :] * y_stride + rows[:, None], total.to(y.dtype.element_ty), mask=inside)
