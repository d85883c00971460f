"""Verification in one launch: each program finds the best token of a chunk of a row, and a request's last program
decides.

Programs do not wait for others. The programs of a request count themselves. The one that finds all others finished
reads their results (one number for each chunk), accepts and rejects, and sets the count back to zero for the next
launch. Padding rows return at once, so that a captured graph replays for any mix of rules, requests and drafts.

Rows after the first rejected draft are computed too: no program can know in time that they are not needed, and waiting
would cost more than reading them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..noise.triton import BLOCK, PROGRAMS, better, chunk_size, key_uniform, row_key, tile_argmax, update_noisy
from ..sampling import row_stats
from ..tuning import bucket, tuned
from ..tuning.configs import VerificationConfig
from . import Requests

DEFAULT = VerificationConfig(BLOCK, num_warps=4, programs=PROGRAMS)
_MAX_SPLITS = 32
_ROWS = 32
"""Rows of a request for which the usual kernel has room; more than 31 drafts need a kernel with more."""
_GATHERED = 1024
"""Values of a request's chunks that registers hold at once."""
_INVARIANT, _REJECTION = tl.constexpr(1), tl.constexpr(2)
# Values of `noise.Stream`.
_TARGET, _ACCEPT, _RESIDUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _probability(x, top, total):
    return tl.div_rn(tl.exp(x - top), total)


@triton.jit
def _best_plain(row, start, end, BLOCK: tl.constexpr):
    """Argmax of logits [start, end), as (value, token): each lane its own first."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for first in range(start, end, BLOCK):
        x = tl.load(row + first + lane, mask=first + lane < end, other=float("-inf"))
        wins = better(x, first + lane, best, token)
        best, token = tl.where(wins, x, best), tl.where(wins, first + lane, token)
    return tile_argmax(best, token)


@triton.jit
def _best_noisy(row, top, key, start, end, BLOCK: tl.constexpr):
    """Argmax of logits - top + G over [start, end), as (value, token)."""
    best, best_token = float("-inf"), 0x7FFFFFFF
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = tl.load(row + tokens, mask=tokens < end, other=float("-inf"))
        best, best_token = update_noisy(x - top, tokens, key, best, best_token)
    return best, best_token


@triton.jit
def _best_residual(row, top, total, weight, q, q_end, draft, key, start, end, BLOCK: tl.constexpr):
    """Argmax of log max(w p - q, 0) + G over [start, end), as (value, token), and the sum of max(w p - q, 0).

    q is the row at `q`, with zeros from `q_end` on, or one-hot at `draft` if that is a token.
    """
    best, best_token = float("-inf"), 0x7FFFFFFF
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        inside = tokens < end
        p = weight * _probability(tl.load(row + tokens, mask=inside, other=float("-inf")), top, total)
        q_here = tl.load(q + tokens, mask=inside & (tokens < q_end), other=0.0)
        # A failed drafter (q is NaN) has its draft rejected; the token is then a draw from p.
        rest = tl.maximum(p - tl.where(q_here == q_here, q_here, 0.0), 0.0)
        rest = tl.where(inside & (tokens != draft), rest, 0.0)
        sums += rest
        best, best_token = update_noisy(tl.log(rest), tokens, key, best, best_token)
    return best, best_token, tl.sum(sums, 0)


@triton.jit
def _gather(values, tokens, rows, valid, num_splits, SPLITS: tl.constexpr, PIECE: tl.constexpr):
    """Best (value, token) of rows from those of their chunks, PIECE at a time; [ROWS] each; NaN becomes infinity."""
    best = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    chosen = tl.full([rows.shape[0]], 0x7FFFFFFF, tl.int32)
    for first in tl.static_range(0, SPLITS, PIECE):
        split = first + tl.arange(0, PIECE)
        mask = valid[:, None] & (split < num_splits)[None, :]
        place = rows[:, None] * num_splits + split[None, :]
        value = tl.load(values + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        token = tl.load(tokens + place, mask=mask, other=0x7FFFFFFF, cache_modifier=".cg")
        is_nan = value != value
        top = tl.max(tl.where(is_nan, float("inf"), value), 1)
        broken = tl.max(is_nan.to(tl.int32), 1) > 0
        wanted = tl.where(broken[:, None], is_nan, value == top[:, None])
        top, token = tl.where(broken, float("nan"), top), tl.min(tl.where(wanted, token, _NO_TOKEN), 1)
        wins = better(top, token, best, chosen)
        best, chosen = tl.where(wins, top, best), tl.where(wins, token, chosen)
    return tl.where(best != best, float("inf"), best), chosen


@triton.jit
def _accepts(weights, sums, rows, j, k, seed, positions, num_splits):
    """Bool [ROWS]: u (1 - w + s) < s for j > 0 drafts of one request."""
    valid = (j > 0) & (j <= k)
    weight = tl.load(weights + rows, mask=valid, other=0.0, cache_modifier=".cg")
    rest = tl.zeros([rows.shape[0]], tl.float32)
    for split in range(num_splits):
        rest += tl.load(sums + rows * num_splits + split, mask=valid, other=0.0, cache_modifier=".cg")
    rest = tl.where((j == k) | (rest != rest), weight, rest)
    return valid & (key_uniform(row_key(seed, positions, _ACCEPT)) * (1.0 - weight + rest) < rest)


@triton.jit
def _weight(logits, row_stride, first, count, draft_ids, draft_rows, draft_probs, tops, totals, width):
    """w after the first `count` drafts of one request, a scalar."""
    weight = 1.0
    for row in range(first, first + count):
        draft, q_row = tl.load(draft_ids + row), tl.load(draft_rows + row)
        p = weight * _probability(
            tl.load(logits + row * row_stride + draft), tl.load(tops + row), tl.load(totals + row)
        )
        q = tl.load(draft_probs + q_row * width + draft, mask=q_row >= 0, other=1.0)
        # All are false for NaN.
        weight = tl.where(p > 0.0, tl.where(p >= q, 1.0, tl.where(p < q, tl.div_rn(p, q), 0.0)), 0.0)
    return weight


@triton.jit
def _decide(
    logits,
    weights,
    sums,
    tops,
    totals,
    draft_ids,
    values,
    tokens,
    out_tokens,
    first,
    k,
    rule,
    seed,
    position,
    num_tokens,
    row_stride,
    num_splits,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Write the tokens of one request whose chunks are all done; return the number of accepted drafts."""
    j = tl.arange(0, ROWS)
    rows = first + j
    best, chosen = _gather(values, tokens, rows, j <= k, num_splits, SPLITS, PIECE)
    draft = tl.load(draft_ids + rows, mask=j < k, other=-1)
    if rule == _REJECTION:
        accepts = _accepts(weights, sums, rows, j, k, seed, position + j, num_splits)
        accepted = tl.max(tl.where(accepts, j, 0), 0)
        if tl.max(tl.where(j == accepted, best, float("-inf")), 0) == float("-inf"):
            # p - q has no positive part: the token is a draw from p.
            row = first + accepted
            key = row_key(seed, position + accepted, _RESIDUAL)
            top, total = tl.load(tops + row), tl.load(totals + row)
            source = logits + row * row_stride
            _, token, _ = _best_residual(source, top, total, 1.0, source, 0, -1, key, 0, num_tokens, BLOCK)
            chosen = tl.where(j == accepted, tl.minimum(token, num_tokens - 1), chosen)
    else:
        accepted = tl.min(tl.where((j < k) & (draft == chosen), ROWS, j), 0)
    result = tl.where(j < accepted, draft, tl.where(j == accepted, chosen.to(tl.int64), -1))
    tl.store(out_tokens + rows, result, mask=j <= k)
    return accepted


@triton.jit(do_not_specialize=["num_splits"])
def _verify_kernel(
    logits,
    draft_probs,
    tops,
    totals,
    request_of_row,
    draft_ids,
    draft_rows,
    first_rows,
    num_drafts,
    rules,
    seed_keys,
    first_positions,
    values,
    tokens,
    weights,
    sums,
    finished,
    out_tokens,
    out_accepted,
    num_tokens,
    row_stride,
    chunk,
    num_splits,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(request_of_row + row)
    if request >= 0:
        first, k, rule = tl.load(first_rows + request), tl.load(num_drafts + request), tl.load(rules + request)
        seed, position = tl.load(seed_keys + request), tl.load(first_positions + request)
        start, end = split * chunk, tl.minimum((split + 1) * chunk, num_tokens)
        source = logits + row * row_stride
        if rule == _REJECTION:
            draft, q_row = tl.load(draft_ids + row), tl.load(draft_rows + row)
            q, q_end = draft_probs + tl.maximum(q_row, 0) * num_tokens, tl.where(q_row >= 0, num_tokens, 0)
            tables = (draft_ids, draft_rows, draft_probs, tops, totals)
            weight = _weight(logits, row_stride, first, row - first, *tables, num_tokens)
            tl.store(weights + row, weight)  # every chunk stores the same
            weight = tl.where(draft < 0, 1.0, weight)
            draft = tl.where(q_row >= 0, -1, draft)
            key = row_key(seed, position + row - first, _RESIDUAL)
            top, total = tl.load(tops + row), tl.load(totals + row)
            best, token, rest = _best_residual(source, top, total, weight, q, q_end, draft, key, start, end, BLOCK)
            tl.store(sums + row * num_splits + split, rest)
        elif rule == _INVARIANT:
            key = row_key(seed, position + row - first, _TARGET)
            best, token = _best_noisy(source, tl.load(tops + row), key, start, end, BLOCK)
        else:
            best, token = _best_plain(source, start, end, BLOCK)
        tl.store(values + row * num_splits + split, best)
        tl.store(tokens + row * num_splits + split, token)
        tl.debug_barrier()
        if tl.atomic_add(finished + request, 1, sem="acq_rel") == (k + 1) * num_splits - 1:
            tl.store(finished + request, 0)
            results = (logits, weights, sums, tops, totals, draft_ids, values, tokens, out_tokens)
            of_request = (first, k, rule, seed, position)
            sizes = (num_tokens, row_stride, num_splits)
            accepted = _decide(*results, *of_request, *sizes, BLOCK=BLOCK, ROWS=ROWS, SPLITS=SPLITS, PIECE=PIECE)
            tl.store(out_accepted + request, accepted.to(tl.int64))


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    """Zeros [size], which every launch leaves as zeros. All launches of a device are on one stream."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def verify(
    logits: Tensor, draft_probs: Tensor | None, requests: Requests, stats: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """`verification.verify` on a GPU."""
    num_rows, num_tokens = logits.shape
    num_requests = requests.first_row.shape[0]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if stats is None:
        stats = row_stats(logits) if requests.sampled else (logits, logits)  # greedy requests do not read them
    config = tuned(logits.device, DEFAULT, bucket(num_tokens))
    chunk = chunk_size(num_rows, num_tokens, config.block, config.programs)
    num_splits = triton.cdiv(num_tokens, chunk)
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    out_tokens = torch.full((num_rows,), -1, dtype=torch.int64, device=logits.device)
    accepted = torch.empty(num_requests, dtype=torch.int64, device=logits.device)
    if num_rows:
        _verify_kernel[(num_rows, num_splits)](
            logits,
            logits if draft_probs is None else draft_probs.contiguous(),  # not read when no draft has a row
            *stats,
            *requests[:-2],
            values,
            tokens,
            weights,
            sums,
            _counters(logits.device, max(1024, triton.next_power_of_2(num_requests))),
            out_tokens,
            accepted,
            num_tokens,
            logits.stride(0),
            chunk,
            num_splits,
            BLOCK=config.block,
            **_constants(requests.max_drafts),
            num_warps=config.num_warps,
        )
    return out_tokens, accepted


def _constants(max_drafts: int) -> dict[str, int]:
    """Compile-time sizes for a request's rows."""
    rows = max(_ROWS, triton.next_power_of_2(1 + max_drafts))
    return {"ROWS": rows, "SPLITS": _MAX_SPLITS, "PIECE": max(1, min(_MAX_SPLITS, _GATHERED // rows))}


def compile_cases() -> list[CompileCase]:
    """Cases of the kernel: up to 31 drafts, and more."""
    described = "request_of_row draft_ids draft_rows first_rows num_drafts rules seed_keys first_positions"
    types = {"logits draft_probs tops totals values weights sums": "*fp32", "tokens finished": "*i32"}
    types |= {f"{described} out_tokens out_accepted": "*i64"}
    return [
        make_case(
            f"verification of {drafts} drafts",
            _verify_kernel,
            {"BLOCK": BLOCK, **_constants(drafts)},
            types,
            num_warps=DEFAULT.num_warps,
        )
        for drafts in (31, 63, 255)
    ]
