"""Counter-based noise: every random number is a hash of (seed key, position, stream, token id).

    key(row)   = splitmix64 of (seed key, stream, position)               64 bits
    h(row, t)  = lowbias32 of (t, low half of key, high half of key)      32 bits
    v(row, t)  = (h + 0.5) * 2^-32, below one                             float32
    E(row, t)  = -log1p(-v) * NUDGE                                       in float64, rounded to float32 once
    G(row, t)  = -log(E) * NUDGE                                          the same; standard Gumbel
    NUDGE      = 1 - 6 * 2^-52

No state and no order: a row's noise does not depend on the batch around it, on the step or on the device, which is what
makes speculation drafter-invariant (Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding"). Large G, which decide an argmax, come from small v, where float32 is densest.

G is the same everywhere, bit for bit, though libraries' float64 logarithms differ in their last bit. Of the 79,691,776
different v, three have an E or a G so close to the middle of two float32 that this bit decides where it is rounded to.
NUDGE moves all of them: then none is nearer to a middle than 6.4 units in the last place of a float64, and a logarithm
may be wrong by five (those of C libraries, CUDA and torch are by one). `tools/noise_rounding.py` goes through all v.

Hashes: splitmix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators"); lowbias32 (Wellons,
"Hash Prospector").
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from torch import Tensor, int64

from ..dispatch import use_triton

# In this package the name `torch` is the module next to this file: `import torch` here would hide it.
from . import torch as _reference
from .native import gumbel_argmax as _native_argmax


class Stream(enum.IntEnum):
    """Purpose of a random number; the streams of one position are independent of each other."""

    TARGET = 0
    """Choice of the token. The drafter of a deterministic request uses it too, which couples it to the target."""
    ACCEPT = 1
    """Accept tests of rejection sampling. See `ROUND` for the positions of this stream and of the next two."""
    RESIDUAL = 2
    """Choice from the residual, and of the bonus token, in rejection sampling."""
    DRAFT = 3
    """Drafts that rejection sampling verifies: they must not depend on the noise of the verification."""


ROUND = 1 << 10
"""Factor of a round's first position in the keys of rejection sampling; the index in the round, below this, is added.
Whether a draft is accepted depends on the drafts after it, so their noise must not serve the next round."""


def row_keys(seed_keys: Sequence[int], positions: Sequence[int], stream: Stream) -> Tensor:
    """Keys of R rows, on the host.

    Args:
        seed_keys: [R] the requests' 64-bit keys; only the low 64 bits of each count, negative ones are fine.
        positions: [R] absolute index of the token in the sequence; for rejection sampling see `ROUND`.
        stream: what the noise is for.

    Returns:
        [R] int64 on the CPU.

    Raises:
        ValueError: the lengths differ.
    """
    if len(seed_keys) != len(positions):
        raise ValueError(f"{len(seed_keys)} seed keys for {len(positions)} positions")
    return _reference.row_keys(_seeds(seed_keys), np.asarray(positions, dtype=np.uint64), int(stream))


def device_row_keys(seed_keys: Sequence[int], positions: Tensor, stream: Stream) -> Tensor:
    """Keys of R rows whose positions ([R] int64) are on the device: [R] int64 there, with the bits of `row_keys`."""
    return _reference.device_row_keys(_seeds(seed_keys), positions, int(stream))


def row_salts(seed_keys: Sequence[int], streams: Sequence[int]) -> np.ndarray:
    """The part of R rows' keys that does not depend on positions: [R] int64 on the host, for `salted_row_keys`."""
    return _reference.row_salts(_seeds(seed_keys), np.asarray(streams))


def salted_row_keys(salts: Tensor, positions: Tensor) -> Tensor:
    """Keys of R rows from `row_salts` and positions ([R] int64 each, on one device), with the bits of `row_keys`."""
    return _reference.salted_row_keys(salts, positions)


def _seeds(seed_keys: Sequence[int]) -> np.ndarray:
    """Low 64 bits of each key."""
    return np.fromiter((seed & 0xFFFFFFFFFFFFFFFF for seed in seed_keys), np.uint64, len(seed_keys))


def _check(row_keys: Tensor, num_tokens: int) -> None:
    if row_keys.ndim != 1 or row_keys.dtype != int64:
        raise ValueError(f"row_keys must be int64 [R], got {row_keys.dtype} {list(row_keys.shape)}")
    if not 0 < num_tokens < 2**31:
        raise ValueError(f"the number of tokens must be positive and fit 31 bits, got {num_tokens}")


def gumbel_argmax(scores: Tensor, row_keys: Tensor) -> Tensor:
    """Argmax over t of scores[row, t] + G(row, t): a draw from softmax(scores). The noise is never stored in memory.

    Args:
        scores: [R, V] float32 logits or unnormalised log-probabilities, -inf for zero mass. Not changed.
        row_keys: [R] int64 on the same device.

    Returns:
        [R] int64; the lowest id among equal sums. A row of nothing but -inf gives 0.
    """
    _check(row_keys, scores.shape[-1])
    if scores.shape[0] != row_keys.shape[0]:
        raise ValueError(f"{row_keys.shape[0]} keys for {scores.shape[0]} rows")
    if use_triton(row_keys):
        from . import triton as _triton

        return _triton.gumbel_argmax(scores, row_keys)
    tokens = _native_argmax(scores, row_keys)
    return _reference.gumbel_argmax(scores, row_keys) if tokens is None else tokens


def uniform(row_keys: Tensor) -> Tensor:
    """Uniform numbers [R] float32 in (0, 1), one for each row key ([R] int64): odd multiples of 2^-24, never 0 or 1."""
    _check(row_keys, 1)
    return _reference.uniform(row_keys)


__all__ = ["ROUND", "Stream", "device_row_keys", "gumbel_argmax", "row_keys", "row_salts", "salted_row_keys", "uniform"]
