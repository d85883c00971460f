"""Statistics of rows of logits in Triton: maximum and sum of exponentials, log-probabilities and ranks.

Sums are taken in an order that depends on the vocabulary alone, never on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..tuning import bucket, tuned
from ..tuning.configs import LogprobsConfig, StatsConfig
from .triton import lane_bound, order, row_counts

DEFAULT_STATS = StatsConfig(block=1024, num_warps=4, splits=16)
"""Launch config of the statistics for every vocabulary and batch: the order of a sum must not depend on the batch."""
DEFAULT_LOGPROBS = LogprobsConfig(block=4096, num_warps=16, depth=8)
MAX_LOGPROBS = 128
"""Largest k: each of the k most likely tokens is a pass over the candidates."""
_LOWEST = tl.constexpr(-0x80000000)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _accumulate(x, top, total):
    """Running maximum and sum of exp(x - maximum) of each lane with one more tile; the sum stays 0 while all values are
    -inf."""
    new = tl.maximum(top, x)
    shift = tl.where(new == -_INFINITY, 0.0, new)
    return new, total * tl.exp(top - shift) + tl.exp(x - shift)


@triton.jit
def _combine(top, total):
    """Maximum and sum of exp(x - maximum) over all lanes; both NaN when any value is."""
    broken = tl.max((total != total).to(tl.int32), 0) > 0
    largest = tl.max(top, 0)
    shift = tl.where(largest == -_INFINITY, 0.0, largest)
    combined = tl.sum(total * tl.exp(top - shift), 0)
    return tl.where(broken, float("nan"), largest), tl.where(broken, float("nan"), combined)


@triton.jit
def _stats_kernel(logits, tops, totals, num_tokens, row_stride, chunk, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    end = tl.minimum((split + 1) * chunk, num_tokens)
    for start in range(split * chunk, end, BLOCK):
        x = tl.load(logits + row * row_stride + start + lane, mask=start + lane < end, other=float("-inf"))
        top, total = _accumulate(x, top, total)
    top, total = _combine(top, total)
    place = row * tl.num_programs(1) + split
    tl.store(tops + place, top)
    tl.store(totals + place, total)


@triton.jit(do_not_specialize=["num_splits"])
def _stats_reduce_kernel(tops, totals, out_tops, out_totals, num_splits, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    inside = split < num_splits
    top = tl.load(tops + row * num_splits + split, mask=inside, other=float("-inf"))
    total = tl.load(totals + row * num_splits + split, mask=inside, other=0.0)
    top, total = _combine(top, total)
    tl.store(out_tops + row, top)
    tl.store(out_totals + row, total)


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`sampling.row_stats` in two launches; the second one reduces a pair of numbers for each chunk."""
    num_rows, num_tokens = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    config = tuned(logits.device, DEFAULT_STATS, bucket(num_tokens))
    chunk = triton.cdiv(triton.cdiv(num_tokens, config.block), config.splits) * config.block
    num_splits = triton.cdiv(num_tokens, chunk)
    # Separate tensors: a part of a larger one would not begin at a multiple of 16 bytes in every batch.
    tops, totals = (torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device) for _ in range(2))
    out_tops, out_totals = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if num_rows:
        sizes = (num_tokens, logits.stride(0), chunk)
        _stats_kernel[(num_rows, num_splits)](
            logits, tops, totals, *sizes, BLOCK=config.block, num_warps=config.num_warps
        )
        _stats_reduce_kernel[(num_rows,)](
            tops, totals, out_tops, out_totals, num_splits, SPLITS=config.splits, num_warps=1
        )
    return out_tops, out_totals


@triton.jit
def _collect_ids(row, num_tokens, bound, ids, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Put the ids of logits that reach `bound` (a key) aside, lane by lane; return how many each lane found."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        inside = start + lane < num_tokens
        found = inside & (order(tl.load(row + start + lane, mask=inside, other=0.0)) >= bound)
        tl.store(ids + counts * BLOCK + lane, start + lane, mask=found & (counts < DEPTH))
        counts += found.to(tl.int32)
    return counts


@triton.jit
def _next_best(row, ids, fits, counts, before, BLOCK: tl.constexpr):
    """Largest (key, lowest id) below `before`, as one integer: key · 2^32 + (2^31 - 1 - id)."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for j in range(tl.max(counts, 0)):
        mask = j < counts
        token = j * BLOCK + lane
        if fits:
            token = tl.load(ids + token, mask=mask, other=0)
        key = order(tl.load(row + token, mask=mask, other=0.0))
        rated = (key.to(tl.int64) << 32) + (0x7FFFFFFF - token)
        best = tl.where(mask & (rated < before), tl.maximum(best, rated), best)
    return tl.max(best, 0)


@triton.jit(do_not_specialize=["k"])
def _logprobs_kernel(
    logits,
    chosen,
    scratch,
    ids,
    logprobs,
    own,
    rank,
    num_tokens,
    row_stride,
    k,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row, aside = logits + index * row_stride, scratch + index * BLOCK * DEPTH
    mine = tl.load(row + tl.load(chosen + index))
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    lanes = tl.full([BLOCK], _LOWEST, tl.int32)
    for start in range(0, num_tokens, BLOCK):
        inside = start + lane < num_tokens
        x = tl.load(row + start + lane, mask=inside, other=float("-inf"))
        top, total = _accumulate(x, top, total)
        above += (x > mine).to(tl.int32)
        lanes = tl.where(inside, tl.maximum(lanes, order(x)), lanes)
    largest, total_of_row = _combine(top, total)
    # A row without mass has no probabilities either.
    log_total = tl.where(total_of_row > 0.0, tl.log(total_of_row), float("nan"))
    tl.store(own + index, mine - largest - log_total)
    tl.store(rank + index, (tl.sum(above, 0) + 1).to(tl.int64))
    if k > 0:
        counts = _collect_ids(row, num_tokens, lane_bound(lanes, k), aside, BLOCK, DEPTH)
        tl.debug_barrier()
        fits = tl.max(counts, 0) <= DEPTH
        if not fits:
            counts = row_counts(num_tokens, BLOCK)
        rated = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for place in range(k):
            rated = _next_best(row, aside, fits, counts, rated, BLOCK)
            token = 0x7FFFFFFF - (rated & 0x7FFFFFFF)
            tl.store(ids + index * k + place, token)
            tl.store(logprobs + index * k + place, tl.load(row + token) - largest - log_total)


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sampling.top_logprobs` in one launch; k is at most MAX_LOGPROBS."""
    num_rows, num_tokens = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    own = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    config = tuned(logits.device, DEFAULT_LOGPROBS, bucket(num_tokens))
    block = min(config.block, bucket(num_tokens))
    scratch = torch.empty(num_rows * block * config.depth, dtype=torch.int32, device=logits.device)
    if num_rows:
        _logprobs_kernel[(num_rows,)](
            logits,
            chosen,
            scratch,
            ids,
            logprobs,
            own,
            rank,
            num_tokens,
            logits.stride(0),
            k,
            BLOCK=block,
            DEPTH=config.depth,
            num_warps=config.num_warps if block == config.block else 4,
        )
    return ids, logprobs, own, rank


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels."""
    stats, wide = DEFAULT_STATS, DEFAULT_LOGPROBS
    sums, reduced = {"logits tops totals": "*fp32"}, {"tops totals out_tops out_totals": "*fp32"}
    types = {"logits logprobs own": "*fp32", "chosen ids rank": "*i64", "scratch": "*i32"}
    constants = {"BLOCK": wide.block, "DEPTH": wide.depth}
    return [
        make_case("sampling stats", _stats_kernel, {"BLOCK": stats.block}, sums, num_warps=stats.num_warps),
        make_case("sampling stats reduce", _stats_reduce_kernel, {"SPLITS": stats.splits}, reduced, num_warps=1),
        make_case("sampling logprobs", _logprobs_kernel, constants, types, num_warps=wide.num_warps),
    ]
