"""Sums that are split among programs: the last program to end adds the parts, in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(arrival, num_programs):
    """True in the last of the programs that arrive, which sees what the others stored and sets the count to zero."""
    tl.debug_barrier()  # every thread has stored when one of them says that this program has
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
        # Other multiprocessors wrote them: the own cache is passed over.
        total += tl.load(first + part * each, mask=inside, other=0.0, cache_modifier=".cg")
    return total
