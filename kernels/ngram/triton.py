"""Prompt lookup on a GPU: a program appends a row's tokens and reads its text once, in blocks, from the cache's
nearest level; 2,048 tokens are one block. Needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case

if TYPE_CHECKING:
    from . import Rows, TokenBuffers

BLOCK = 2048
"""Positions that are compared at a time: with 8 warps 8 a thread, whose matches stay in registers."""
_NUM_WARPS = 8
_PLACES = tl.constexpr(3)


@triton.jit
def _append(text, length, generated, count, width, BLOCK_K: tl.constexpr):
    """Write `count` tokens to the text from `length` on; return its new length."""
    for begin in tl.range(0, count, BLOCK_K):
        index = begin + tl.arange(0, BLOCK_K)
        here = (index < count) & (length + index < width)
        tl.store(text + length + index, tl.load(generated + index, mask=here, other=0).to(tl.int32), mask=here)
    return tl.minimum(length + count, width)


@triton.jit
def _best_match(text, last, min_n, max_n, BLOCK: tl.constexpr):
    """Length of the longest match << 32 | the position of its last token; -1: there is none. Of equal lengths the last
    position is the largest number."""
    best = tl.full((), -1, tl.int64)
    for begin in tl.range(0, last, BLOCK):
        end = begin + tl.arange(0, BLOCK)
        alive = end < last
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.range(0, max_n):
            alive = alive & (end >= back)
            token = tl.load(text + tl.maximum(last - back, 0))
            alive = alive & (tl.load(text + end - back, mask=alive, other=-1) == token)
            matched += alive.to(tl.int64)
        found = tl.where(matched >= min_n, (matched << 32) | end, -1)
        best = tl.maximum(best, tl.max(found, 0))
    return best


@triton.jit(do_not_specialize=["width", "min_n", "max_n", "num_drafts"])
def lookup_kernel(
    places, generated, accepted, tokens, lengths, drafts, width, min_n, max_n, num_drafts,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Append a row's tokens to its text in tokens [slots, width], and write drafts [R, num_drafts]; see `ngram`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(places + row * _PLACES)
    base = tl.load(places + row * _PLACES + 1)
    first = tl.load(places + row * _PLACES + 2)
    text = tokens + slot * width
    length = tl.where(base < 0, tl.load(lengths + slot), base)
    length = _append(text, length, generated + first, 1 + tl.load(accepted + row), width, BLOCK_K)
    tl.debug_barrier()  # other threads of the program read these tokens, and have read the length
    tl.store(lengths + slot, length)
    if num_drafts > 0:
        last = length - 1
        best = _best_match(text, last, min_n, max_n, BLOCK)
        start = tl.where(best < 0, last, (best & 0xFFFFFFFF) + 1)
        for begin in tl.range(0, num_drafts, BLOCK_K):
            index = begin + tl.arange(0, BLOCK_K)
            here = index < num_drafts
            draft = tl.load(text + start + index % (length - start), mask=here, other=0)
            tl.store(drafts + row * num_drafts + index, draft.to(tl.int64), mask=here)


def extend_and_match(buffers: TokenBuffers, rows: Rows, min_n: int, max_n: int, num_drafts: int) -> Tensor:
    """`ngram.extend_and_match` in one launch."""
    tokens, lengths = buffers
    drafts = torch.empty(len(rows.places), num_drafts, dtype=torch.int64, device=tokens.device)
    lookup_kernel[(len(rows.places),)](
        *(rows.places, rows.generated, rows.accepted, tokens, lengths, drafts),
        *(tokens.shape[1], min_n, max_n, num_drafts),
        BLOCK=BLOCK,
        BLOCK_K=16,
        num_warps=_NUM_WARPS,
    )
    return drafts


def compile_cases() -> list[CompileCase]:
    """Case of the kernel."""
    types = {"places generated accepted lengths drafts": "*i64", "tokens": "*i32"}
    constants = {"BLOCK": BLOCK, "BLOCK_K": 16}
    return [make_case("ngram lookup", lookup_kernel, constants, types, num_warps=_NUM_WARPS)]
