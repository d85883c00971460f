"""Counter-based noise in PyTorch: 32-bit wrapping arithmetic, the same bits on every device.

Work goes tile by tile with in-place operations, so that temporaries stay in a core's cache. An argmax computes the two
float64 logarithms only for the few tokens of a row that float32 logarithms leave in question.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..staging import upload

# Elements of a tile: three float32 buffers of this size fit the L2 caches of two cores.
_TILE_CPU = 1 << 17
_TILE_GPU = 1 << 24

NUDGE = 1.0 - 6 * 2.0**-52
"""Factor of the noise, explained in the package. The same number is in `native.cpp`."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below one
_FAST_ERROR = 1e-5  # of G by torch's float32 logarithms, with a margin of five


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 from state `x`, uint64, wrapping."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_keys(seeds: np.ndarray, positions: np.ndarray, stream: int) -> Tensor:
    """splitmix64(splitmix64(seed ^ splitmix64(stream)) ^ position) of uint64 [R] each: int64 [R]."""
    stream_key = _splitmix64(np.full(1, stream, dtype=np.uint64))
    keys = _splitmix64(_splitmix64(seeds ^ stream_key) ^ positions)
    return torch.from_numpy(keys.view(np.int64))


def device_row_keys(seeds: np.ndarray, positions: Tensor, stream: int) -> Tensor:
    """`row_keys` with positions [R] int64 on a device. The first round is the host's; the second one wraps there."""
    salts = row_salts(seeds, np.full(1, stream))
    return salted_row_keys(upload(positions.device, salts)[0], positions)


def row_salts(seeds: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """First round of `row_keys`, with a stream for each row: int64 [R]."""
    return _splitmix64(seeds ^ _splitmix64(streams.astype(np.uint64))).view(np.int64)


def salted_row_keys(salts: Tensor, positions: Tensor) -> Tensor:
    """Second round of `row_keys`: keys [R] int64 of salts and positions on one device."""
    x = (salts ^ positions) + int(_GOLDEN.view(np.int64))
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * (multiplier - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """x >>> shift of int64."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


_M1 = _signed(0x7FEB352D)
_M2 = _signed(0x846CA68B)


def _xor_shift(x: Tensor, shift: int, scratch: Tensor) -> None:
    """x ^= x >>> shift; x is mutated. torch shifts int32 arithmetically, so a mask makes the shift logical."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


@functools.lru_cache(maxsize=8)
def _token_hashes(num_tokens: int, device: torch.device) -> Tensor:
    """lowbias32(t) of all token ids: [V] int32. The hash separates neighbouring ids."""
    x = torch.arange(num_tokens, dtype=torch.int32, device=device)
    scratch = torch.empty_like(x)
    for shift, multiplier in ((16, _M1), (15, _M2)):
        _xor_shift(x, shift, scratch)
        x.mul_(multiplier)
    _xor_shift(x, 16, scratch)
    return x


def _hash_tile(low: Tensor, high: Tensor, tokens: Tensor, out: Tensor, scratch: Tensor) -> None:
    """out[r, t] = lowbias32(tokens[t] ^ low[r]) with high[r] mixed in between its two rounds; int32 [r, t]."""
    torch.bitwise_xor(tokens, low, out=out)
    _xor_shift(out, 16, scratch)
    out.mul_(_M1)
    _xor_shift(out, 15, scratch)
    out.bitwise_xor_(high).mul_(_M2)
    _xor_shift(out, 16, scratch)


def _hash_tiles(keys: Tensor, num_tokens: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Hashes tile by tile: (rows, tokens, h), where a tile is some whole rows or a part of one. The next tile
    overwrites h."""
    size = _TILE_CPU if keys.device.type == "cpu" else _TILE_GPU
    width = min(num_tokens, size)
    height = max(1, min(size // num_tokens, keys.shape[0]))
    halves = torch.stack((keys, keys >> 32), dim=1).to(torch.int32)  # wraps: low and high bits
    tokens = _token_hashes(num_tokens, keys.device)
    buffers = torch.empty((2, height, width), dtype=torch.int32, device=keys.device)
    for top in range(0, keys.shape[0], height):
        rows = slice(top, min(top + height, keys.shape[0]))
        low, high = halves[rows, :1], halves[rows, 1:]
        for left in range(0, num_tokens, width):
            columns = slice(left, min(left + width, num_tokens))
            shape = (slice(rows.stop - rows.start), slice(columns.stop - columns.start))
            bits, scratch = buffers[0][shape], buffers[1][shape]
            _hash_tile(low, high, tokens[columns], bits, scratch)
            yield rows, columns, bits


def _fraction(bits: Tensor) -> Tensor:
    """v = (h + 0.5) · 2^-32 of hashes, at most the largest float32 below one; float32."""
    return bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def log_exponential(bits: Tensor) -> Tensor:
    """-G of hashes (int32), as the package defines it: float32 of the same shape."""
    exponential = _fraction(bits).double().neg_().log1p_().mul_(-NUDGE).float()
    return exponential.double().log_().mul_(NUDGE).float()


def _fast_log_exponential(bits: Tensor) -> Tensor:
    """-G of hashes with an error below `_FAST_ERROR`."""
    return _fraction(bits).neg_().log1p_().neg_().log_()


def hash_bits(keys: Tensor, num_tokens: int) -> Tensor:
    """Hashes h [R, num_tokens] int32 (the 32 bits unchanged) of row keys [R]; for tests."""
    out = torch.empty((keys.shape[0], num_tokens), dtype=torch.int32, device=keys.device)
    for rows, columns, bits in _hash_tiles(keys, num_tokens):
        out[rows, columns] = bits
    return out


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """Noise G [R, num_tokens] float32, finite (-2.9 to 22.9), of row keys [R]; for tests."""
    out = torch.empty((keys.shape[0], num_tokens), dtype=torch.float32, device=keys.device)
    for rows, columns, bits in _hash_tiles(keys, num_tokens):
        torch.neg(log_exponential(bits), out=out[rows, columns])
    return out


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """`noise.gumbel_argmax` on any device. A row wider than a tile takes the best of its tiles' results."""
    num_rows, num_tokens = scores.shape
    result = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    best: list[Tensor] = []
    ids: list[Tensor] = []
    for rows, columns, bits in _hash_tiles(keys, num_tokens):
        total = _sums(scores[rows, columns], bits)
        if columns.stop - columns.start == num_tokens:
            torch.argmax(total, dim=-1, out=result[rows])
            continue
        index = total.argmax(dim=-1, keepdim=True)
        best.append(total.gather(1, index))
        ids.append(index + columns.start)
        if columns.stop == num_tokens:
            winner = torch.cat(best, dim=1).argmax(dim=-1, keepdim=True)
            result[rows] = torch.cat(ids, dim=1).gather(1, winner).squeeze(1)
            best, ids = [], []
    return result


def _sums(scores: Tensor, bits: Tensor) -> Tensor:
    """scores + G of a tile: exact wherever it may be a row's largest sum, approximate elsewhere."""
    total = scores - _fast_log_exponential(bits)
    best = total.amax(dim=-1, keepdim=True)
    # If sums are large, their rounding is larger than the error of fast noise. NaN and infinity stay as they are:
    # no noise changes them.
    needed = best - best.abs().mul_(2.0**-21).add_(_FAST_ERROR)
    row, column = torch.nonzero((total >= needed) & best.isfinite(), as_tuple=True)
    total[row, column] = scores[row, column] - log_exponential(bits[row, column])
    return total


def uniform(keys: Tensor) -> Tensor:
    """`noise.uniform`: (2 m + 1) · 2^-24, where m is the key's top 23 bits."""
    top = (keys >> 41) & ((1 << 23) - 1)
    return top.to(torch.float32).mul_(2.0).add_(1.0).mul_(2.0**-24)
