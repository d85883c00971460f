"""Sampling filters in Triton: thresholds by bisection over the bits of floats, without a sort, in one launch.

One program a row. It scales the row, remembering the largest logit of each of its BLOCK lanes (a lane: every BLOCK-th
token). For top-k the k-th largest of those is a bound that at least k logits reach, so all that top-k can need reach
it. For top-p a few passes over the row, each with several bounds at once, narrow the range in which the nucleus ends.
The logits that reach the bound, or are in the range, are put aside, each lane its own, without any exchange between
threads, and the bisections run over them, a few tiles instead of the vocabulary. If they do not fit or do not
suffice, the same bisections run over the row itself: slower, and as exact.

A row or its candidates: logit (lane, j) is at lane + j * BLOCK for j below the lane's count. Everything about a row
is computed in an order that depends on the vocabulary alone, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..staging import upload
from ..tuning import bucket, tuned
from ..tuning.configs import FilterConfig
from .torch import Limits

DEFAULT = FilterConfig(block=2048, num_warps=16, depth=16)
"""Launch config for every vocabulary."""
_EDGES = tl.constexpr(8)
"""Parts into which a pass over a row divides the range in which its nucleus ends."""
_RANGE = tl.constexpr(24.0)
"""Range below the largest logit in which nuclei are looked for first."""
_MOST_PASSES = tl.constexpr(6)
_LOWEST = tl.constexpr(-0x80000000)
_INFINITY = tl.constexpr(float("inf"))
_KEY_OF_NO_MASS = tl.constexpr(-0x7F800001)  # of -inf


# --- floats as integers --------------------------------------------------------------------------------------


@triton.jit
def order(x):
    """Keys (int32) in the order of float32 `x`; the zeros are equal, NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# --- lanes ---------------------------------------------------------------------------------------------------


@triton.jit
def lane_bound(lanes, wanted):
    """`wanted`-th largest of the lanes' keys; the lowest key when there are fewer lanes."""
    low, high = tl.min(lanes, 0).to(tl.int64), tl.max(lanes, 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return tl.where(wanted <= lanes.shape[0], low, _LOWEST).to(tl.int32)


@triton.jit
def row_counts(num_tokens, BLOCK: tl.constexpr):
    """Number of the row's tokens in each lane."""
    return (num_tokens - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK


@triton.jit
def _count(source, counts, key, BLOCK: tl.constexpr):
    """Number of logits that reach `key`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for j in range(tl.max(counts, 0)):
        x = tl.load(source + j * BLOCK + lane, mask=j < counts, other=0.0)
        total += ((j < counts) & (order(x) >= key)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _total(source, counts, least, top, BLOCK: tl.constexpr):
    """Sum of exp(x - top) over all x not below `least`: float32; NaN when there is a NaN or no finite maximum."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for j in range(tl.max(counts, 0)):
        x = tl.load(source + j * BLOCK + lane, mask=j < counts, other=0.0)
        kept = (j < counts) & ~(x < least)
        total += tl.where(kept, tl.exp(x - top), 0.0).to(tl.float64)
    return tl.sum(total, 0).to(tl.float32)


@triton.jit
def _probability(x, top, total):
    """Probability of x, float32, rounded as in the reference: a nucleus of equal logits may end exactly at its mass."""
    return tl.div_rn(tl.exp(x - top), total)


@triton.jit
def _collect(
    row, num_tokens, low, high, candidates, least, top, total,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, HAS_MASS: tl.constexpr,
):  # fmt: skip
    """Put the logits of `row` with keys from `low` to `high` aside. Returns each lane's number of them, maybe too many,
    and with HAS_MASS the sum of the probabilities of logits above `high` that are not below `least`."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_tokens, BLOCK):
        inside = start + lane < num_tokens
        x = tl.load(row + start + lane, mask=inside, other=0.0)
        key = order(x)
        found = inside & (key >= low) & (key <= high)
        tl.store(candidates + counts * BLOCK + lane, x, mask=found & (counts < DEPTH))
        counts += found.to(tl.int32)
        if HAS_MASS:
            above = inside & (key > high) & ~(x < least)
            mass += tl.where(above, _probability(x, top, total), 0.0).to(tl.float64)
    return counts, tl.sum(mass, 0)


@triton.jit
def _mass_above(source, counts, least, key, limit, top, total, BLOCK: tl.constexpr):
    """Sum of the probabilities of logits above `key`, up to `limit`, that are not below `least`, in float64."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for j in range(tl.max(counts, 0)):
        x = tl.load(source + j * BLOCK + lane, mask=j < counts, other=0.0)
        above = (j < counts) & (order(x) > key) & (order(x) <= limit) & ~(x < least)
        mass += tl.where(above, _probability(x, top, total), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


# --- thresholds ----------------------------------------------------------------------------------------------


@triton.jit
def _kth_largest(source, counts, low, high, k, BLOCK: tl.constexpr):
    """Key of the k-th largest logit; at least k logits reach `low`, and none is above `high`."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = _count(source, counts, middle, BLOCK) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _bracket(row, num_tokens, least, top, wanted, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """Keys of the smallest and of the largest logit at which a nucleus may end that has `wanted` of the sum of
    exp(x - top). Sums are in float32 and have a margin. Few logits are between both, unless many are equal."""
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, _EDGES)
    low, high = tl.maximum(least, top - _RANGE), top + 1.0
    above, crowd = tl.full((), 0.0, tl.float32), tl.full((), ROOM + 1.0, tl.float32)
    passes = tl.full((), 0, tl.int32)
    while (crowd > ROOM) & (passes < _MOST_PASSES):
        edges = low + (high - low) * (part / _EDGES)
        masses = tl.zeros([_EDGES, BLOCK], tl.float32)
        for start in range(0, num_tokens, BLOCK):
            x = tl.load(row + start + lane, mask=start + lane < num_tokens, other=float("-inf"))
            masses += tl.where(x[None, :] >= edges[:, None], tl.exp(x - top)[None, :], 0.0)
        mass = tl.sum(masses, 1)
        holds, lacks = mass >= wanted * 1.00001, mass <= wanted * 0.99999
        has_low = tl.max(holds.to(tl.int32), 0) > 0
        most = tl.min(tl.where(holds, mass, _INFINITY), 0)
        above = tl.maximum(above, tl.max(tl.where(lacks, mass, 0.0), 0))
        high = tl.min(tl.where(lacks, edges, high), 0)
        low = tl.where(has_low, tl.max(tl.where(holds, edges, -_INFINITY), 0), -_INFINITY)
        crowd = tl.where(has_low, (most - above) / tl.exp(low - top), 0.0)
        passes += 1
    return order(low), order(high) - 1


@triton.jit
def _nucleus(source, counts, least, low, high, before, top, total, top_p, BLOCK: tl.constexpr):
    """End of the nucleus, whose key is from `low` to `high`; logits above have the mass `before`, and the source need
    not have them. Returns the key of its smallest logit, how many equal to it are in it, and 1 if more are equal."""
    limit = high
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        inside = before + _mass_above(source, counts, least, middle, limit, top, total, BLOCK) < top_p
        high = tl.where(inside, middle, high)
        low = tl.where(inside, low, middle + 1)
    key = low.to(tl.int32)
    num_equal = _count(source, counts, low, BLOCK) - _count(source, counts, low + 1, BLOCK)
    before += _mass_above(source, counts, least, low, limit, top, total, BLOCK)
    each = _probability(value_of(key), top, total).to(tl.float64)
    # Token i of the equal ones is in the nucleus when before + i · each < top_p; the division may be off by one at an
    # exact end.
    size = tl.where(each > 0.0, tl.minimum((top_p - before) / each, 1.0 * num_equal), 1.0 * num_equal).to(tl.int32)
    size += (before + size * each < top_p).to(tl.int32)
    size -= (before + (size - 1) * each >= top_p).to(tl.int32)
    size = tl.maximum(size, 1)
    return key, size, size < num_equal


@triton.jit
def _mask_row(row, num_tokens, least, threshold, size, tied, BLOCK: tl.constexpr):
    """Mask the row (mutated): -inf where a logit is below `least` or `threshold`, and for all but the first `size`
    equal to it if `tied`."""
    lane = tl.arange(0, BLOCK)
    seen = 0
    for start in range(0, num_tokens, BLOCK):
        inside = start + lane < num_tokens
        x = tl.load(row + start + lane, mask=inside, other=0.0)
        outside = (x < least) | (x < threshold)
        if tied:
            equal = (inside & (x == threshold)).to(tl.int32)
            outside = outside | ((equal > 0) & (seen + tl.cumsum(equal, 0) > size))
            seen += tl.sum(equal, 0)
        tl.store(row + start + lane, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & outside)


@triton.jit
def _limit_row(
    row,
    candidates,
    lanes,
    num_tokens,
    k,
    top_p,
    log_min_p,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Apply min-p, top-k and top-p to a scaled row, which is mutated and which all threads have written."""
    top_key = tl.max(lanes, 0)
    top = value_of(top_key)
    whole = row_counts(num_tokens, BLOCK)
    source, counts, bound = row, whole, tl.full((), _LOWEST, tl.int32)
    if k > 0:
        bound = lane_bound(lanes, k)
        found, _ = _collect(row, num_tokens, bound, 0x7FFFFFFF, candidates, 0.0, 0.0, 1.0, BLOCK, DEPTH, False)
        tl.debug_barrier()
        if tl.max(found, 0) <= DEPTH:
            source, counts = candidates, found
        else:
            bound = tl.full((), _LOWEST, tl.int32)
    least = tl.where(log_min_p > -_INFINITY, top + log_min_p, -_INFINITY)
    if k > 0:
        kth = value_of(_kth_largest(source, counts, tl.maximum(bound, _KEY_OF_NO_MASS), top_key, k, BLOCK))
        least = tl.where((kth > least) | (kth != kth), kth, least)
    threshold, size, tied = -_INFINITY, 0, False
    if top_p < 1.0:
        low, high = tl.where(least == least, order(least), _LOWEST), top_key
        before = tl.full((), 0.0, tl.float64)
        total = _total(source, counts, least, top, BLOCK)
        if (k == 0) & (total == total):
            first, last = _bracket(row, num_tokens, least, top, (top_p * total).to(tl.float32), BLOCK // 2, 2 * BLOCK)
            found, rest = _collect(row, num_tokens, first, last, candidates, least, top, total, BLOCK, DEPTH, True)
            tl.debug_barrier()
            if (tl.max(found, 0) <= DEPTH) & (rest < top_p):
                inside = _mass_above(candidates, found, least, first.to(tl.int64) - 1, last, top, total, BLOCK)
                if rest + inside >= top_p:
                    source, counts, low, high, before = candidates, found, first, tl.minimum(last, top_key), rest
        if total == total:
            key, size, tied = _nucleus(source, counts, least, low, high, before, top, total, top_p, BLOCK)
            threshold = value_of(key)
        else:  # nothing has a probability: the first of the largest stays
            threshold, size, tied = top, 1, top == _INFINITY
    _mask_row(row, num_tokens, least, threshold, size, tied, BLOCK)


@triton.jit
def _filter_kernel(
    logits,
    out,
    candidates,
    temperature,
    top_k,
    top_p,
    log_min_p,
    num_tokens,
    row_stride,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    source, row = logits + index * row_stride, out + index * num_tokens
    heat = tl.load(temperature + index).to(tl.float32)
    k, p = tl.load(top_k + index).to(tl.int32), tl.load(top_p + index)
    m = tl.load(log_min_p + index).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    lanes = tl.full([BLOCK], _LOWEST, tl.int32)
    for start in range(0, num_tokens, BLOCK):
        inside = start + lane < num_tokens
        x = tl.div_rn(tl.load(source + start + lane, mask=inside, other=0.0), heat)
        tl.store(row + start + lane, x, mask=inside)
        lanes = tl.where(inside, tl.maximum(lanes, order(x)), lanes)
    if (k > 0) | (p < 1.0) | (m > -_INFINITY):
        tl.debug_barrier()  # other threads have written what this one reads
        _limit_row(row, candidates + index * BLOCK * DEPTH, lanes, num_tokens, k, p, m, BLOCK, DEPTH)


def filter_logits(logits: Tensor, heat: np.ndarray, limits: Limits) -> Tensor:
    """Quotient logits / heat with the limits of each row: a new tensor [R, V] float32.

    Args:
        logits: not changed. heat: [R] on the host, 1 for rows that stay as they are.
    """
    num_rows, num_tokens = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty((num_rows, num_tokens), dtype=torch.float32, device=logits.device)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(limits.min_p)
    parameters = upload(logits.device, heat, limits.top_k, limits.top_p, log_min_p)
    launch_filter(logits, out, parameters)
    return out


def launch_filter(logits: Tensor, out: Tensor, parameters: Sequence[Tensor]) -> None:
    """Fill out [R, V] from rows of contiguous logits, with the rows' heat, top-k, top-p and log of min-p, each [R]."""
    num_rows, num_tokens = logits.shape
    config = tuned(logits.device, DEFAULT, bucket(num_tokens))
    block = min(config.block, max(2, bucket(num_tokens)))
    candidates = torch.empty(num_rows * block * config.depth, dtype=torch.float32, device=logits.device)
    _filter_kernel[(num_rows,)](
        logits,
        out,
        candidates,
        *parameters,
        num_tokens,
        logits.stride(0),
        BLOCK=block,
        DEPTH=config.depth,
        num_warps=config.num_warps if block == config.block else 4,
    )


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels of the package."""
    from .triton_logprobs import compile_cases as of_logprobs

    types = {"logits out candidates": "*fp32", "temperature top_p log_min_p": "*fp64", "top_k": "*i64"}
    constants = {"BLOCK": DEFAULT.block, "DEPTH": DEFAULT.depth}
    return [make_case("sampling filter", _filter_kernel, constants, types, num_warps=DEFAULT.num_warps), *of_logprobs()]
