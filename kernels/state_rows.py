"""Functions of Triton kernels over recurrent states: how a program reads and writes those of its row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x)"""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def writes_of(table, num_rows, row):
    """Offsets and slots of all writes of `StatePlan.table`; the first write of a row, and the next row's."""
    firsts = table + 2 * num_rows + 1
    offsets = firsts + num_rows + 1
    return offsets, offsets + tl.load(firsts + num_rows), tl.load(firsts + row), tl.load(firsts + row + 1)


@triton.jit
def store_state(states, state, inside, stride, offsets, slots, write, end, length):
    """Store `state` to the slots of the writes from `write` on that follow `length` tokens of a row; return the write
    after them. `states`: pointers to the elements in slot 0; `stride`: elements from one slot to the next."""
    while (write < end) & (tl.load(offsets + write, mask=write < end, other=-1) == length):
        tl.store(states + tl.load(slots + write) * stride, state, mask=inside)
        write += 1
    return write
