"""Counter-based noise in Triton: hashes, keys and Gumbel noise in registers, and an argmax that never stores the noise.

Hashes and noise have the CPU's bits, in the interpreter too; the package explains why.

The two float64 logarithms are computed for few tokens. A tile is skipped when its largest score, with the largest
noise, cannot reach the best sum so far, or when its sums with fast float32 noise stay below that sum by more than the
error of fast noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_case import CompileCase, make_case
from ..tuning import bucket, tuned
from ..tuning.configs import NoiseArgmaxConfig
from .torch import NUDGE

BLOCK = 1024
"""Tokens in a tile."""
_MAX_SPLITS = 32
PROGRAMS = 512
"""Programs that keep all multiprocessors busy, a few each."""
DEFAULT = NoiseArgmaxConfig(BLOCK, num_warps=4, programs=PROGRAMS)
_NUDGE = tl.constexpr(NUDGE)
_LARGEST_NOISE = tl.constexpr(22.9)
"""Upper bound of G: v is at least 2^-33, and 33 ln 2 = 22.874."""
_FAST_ERROR = tl.constexpr(1e-3)
"""Upper bound of the error of `fast_gumbel`, with a margin of ten."""
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


# --- bits ----------------------------------------------------------------------------------------------------


@triton.jit
def _splitmix64(x):
    """One step of splitmix64 from state `x`, uint64."""
    x = x + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position, STREAM: tl.constexpr):
    """Key of (seed, position) in a stream; int64 in, uint64 out."""
    stream_key = _splitmix64(tl.full((), STREAM, tl.uint64))
    return _splitmix64(_splitmix64(seed.to(tl.uint64) ^ stream_key) ^ position.to(tl.uint64))


@triton.jit
def _first_round(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def _second_round(x):
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def token_bits(key, tokens):
    """Hashes h of these tokens (int32) under a key (uint64): uint32."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    hashed = _second_round(_first_round(tokens.to(tl.uint32)))
    return _second_round(_first_round(hashed ^ low) ^ high)


@triton.jit
def key_uniform(key):
    """(2 m + 1) * 2^-24 with m the key's top 23 bits: float32 in (0, 1)."""
    return ((key >> 41).to(tl.int32).to(tl.float32) * 2.0 + 1.0) * (1.0 / (1 << 24))


# --- noise ---------------------------------------------------------------------------------------------------


@triton.jit
def _fraction(bits):
    """v = (h + 0.5) * 2^-32, at most the largest float32 below one."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / (1 << 32)), 1.0 - 1.0 / (1 << 24))


@triton.jit
def log_exponential(bits):
    """-G, as the package defines it."""
    v = _fraction(bits).to(tl.float64)
    # 1 - v is exact from 2^-28 on; below, the series' next term is less than 2^-57 of the value.
    exponential = tl.where(v < 1.0 / (1 << 28), v + v * v * 0.5, -tl.log(1.0 - v))
    rounded = (exponential * _NUDGE).to(tl.float32)
    return (tl.log(rounded.to(tl.float64)) * _NUDGE).to(tl.float32)


@triton.jit
def fast_log_exponential(bits):
    """-G with an error below `_FAST_ERROR`."""
    v = _fraction(bits)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return tl.log(tl.where(v < 1.0 / 64.0, series, -tl.log(1.0 - v)))


# --- the argmax ----------------------------------------------------------------------------------------------


@triton.jit
def tile_argmax(values, tokens):
    """Largest value and its lowest token, both scalars; NaN is larger than any number, as in torch."""
    is_nan = values != values
    top = tl.max(tl.where(is_nan, float("inf"), values), 0)
    broken = tl.max(is_nan.to(tl.int32), 0) > 0
    wanted = tl.where(broken, is_nan, values == top)
    return tl.where(broken, float("nan"), top), tl.min(tl.where(wanted, tokens, _NO_TOKEN), 0)


@triton.jit
def better(value, token, best, best_token):
    """True when (value, token) beats (best, best_token): the larger value, NaN above all, then the lower token."""
    value_nan, best_nan = value != value, best != best
    tie = (value == best) | (value_nan & best_nan)
    return (tie & (token < best_token)) | (~best_nan & (value_nan | (value > best)))


@triton.jit
def update_noisy(scores, tokens, key, best, best_token):
    """Better of (best, best_token) and the argmax of scores + G over one tile of tokens.

    Padding must have the score -inf and come after all tokens.
    """
    value, token = tile_argmax(scores, tokens)
    if tl.abs(value) < float("inf"):
        # If sums are large, their rounding is larger than the error of fast noise.
        margin = _FAST_ERROR + tl.abs(best) * (1.0 / (1 << 21))
        if value + _LARGEST_NOISE + margin >= best:
            bits = token_bits(key, tokens)
            if tl.max(scores - fast_log_exponential(bits), 0) + margin >= best:
                value, token = tile_argmax(scores - log_exponential(bits), tokens)
                if better(value, token, best, best_token):
                    best, best_token = value, token
    elif better(value, token, best, best_token):  # no noise changes an infinity, or NaN
        best, best_token = value, token
    return best, best_token


# --- kernels -------------------------------------------------------------------------------------------------


@triton.jit
def _argmax_kernel(scores, keys, values, tokens_out, num_tokens, row_stride, chunk, BLOCK: tl.constexpr):
    """values, tokens_out [rows, chunks]: best noisy score of one chunk of one row and its token; a `chunk` is a
    multiple of BLOCK."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row).to(tl.uint64)
    best, best_token = float("-inf"), 0x7FFFFFFF
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, num_tokens), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        tile = tl.load(scores + row * row_stride + tokens, mask=tokens < num_tokens, other=float("-inf"))
        best, best_token = update_noisy(tile, tokens, key, best, best_token)
    place = row * tl.num_programs(1) + split
    tl.store(values + place, best)
    tl.store(tokens_out + place, best_token)


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_kernel(values, tokens, out, num_splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    inside = split < num_splits
    value = tl.load(values + row * num_splits + split, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * num_splits + split, mask=inside, other=0x7FFFFFFF)
    tl.store(out + row, tile_argmax(value, token)[1].to(tl.int64))


# --- operations ----------------------------------------------------------------------------------------------


def chunk_size(num_rows: int, num_tokens: int, block: int, programs: int) -> int:
    """Tokens for each program, a multiple of the tile `block`: few rows use the whole device, and many rows skip most
    tiles.

    An argmax is the same however it is split, so this may depend on the batch.
    """
    num_splits = min(_MAX_SPLITS, max(1, programs // max(1, num_rows)))
    return triton.cdiv(triton.cdiv(num_tokens, block), num_splits) * block


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """`noise.gumbel_argmax` in two launches; the second one reduces one number for each chunk."""
    num_rows, num_tokens = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    config = tuned(scores.device, DEFAULT, bucket(num_tokens))
    chunk = chunk_size(num_rows, num_tokens, config.block, config.programs)
    num_splits = triton.cdiv(num_tokens, chunk)
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(num_rows, num_splits, dtype=torch.int32, device=scores.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        _argmax_kernel[(num_rows, num_splits)](
            scores,
            keys.contiguous(),
            values,
            tokens,
            num_tokens,
            scores.stride(0),
            chunk,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
        # One compiled kernel serves any number of rows: a new one would be compiled while a request waits.
        _reduce_kernel[(num_rows,)](values, tokens, out, num_splits, SPLITS=_MAX_SPLITS, num_warps=1)
    return out


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels."""
    argmax = {"scores values": "*fp32", "keys": "*i64", "tokens_out": "*i32"}
    reduce = {"values": "*fp32", "tokens": "*i32", "out": "*i64"}
    return [
        make_case("noise argmax", _argmax_kernel, {"BLOCK": BLOCK}, argmax, num_warps=DEFAULT.num_warps),
        make_case("noise reduce", _reduce_kernel, {"SPLITS": _MAX_SPLITS}, reduce, num_warps=1),
    ]
