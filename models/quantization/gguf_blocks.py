"""Blocks of GGUF files (ggml's quantised types) as codes, scales and offsets.

A block is some bytes that hold 32 or 256 neighbouring inputs of an output. d and m are float16 numbers of the block;
types of 256 inputs also have a small integer for each sub-block. N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.quantized_linear import QuantizedWeight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of the codes of IQ4_NL and IQ4_XS."""


class _Blocks(NamedTuple):
    codes: NDArray[np.uint8] | NDArray[np.int8]
    """[N, inputs of a block]."""
    scales: Floats
    """[N, groups of a block]."""
    offsets: Floats | None = None


def _half(data: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block: [N, 1]."""
    return np.ascontiguousarray(data[:, start : start + 2]).view(np.float16).astype(np.float32)


def _halves(data: Bytes) -> Bytes:
    """Lower halves of all bytes, then the upper ones."""
    return np.concatenate((data & 15, data >> 4), 1)


def _planes(data: Bytes, bits: int, run: int) -> Bytes:
    """Codes of `bits` in runs of `run` bytes: the lowest bits of a run, then the next ones, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(data), -1)


def _q4_0(data: Bytes) -> _Blocks:
    scales = _half(data, 0)
    return _Blocks(_halves(data[:, 2:]), scales, -8 * scales)


def _q4_1(data: Bytes) -> _Blocks:
    return _Blocks(_halves(data[:, 4:]), _half(data, 0), _half(data, 2))


def _fifth_bits(data: Bytes) -> Bytes:
    """One bit for each of 32 inputs, as 0 or 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(data: Bytes) -> _Blocks:
    codes = _halves(data[:, 6:]) | _fifth_bits(data[:, 2:6])
    return _Blocks(codes.astype(np.int8) - np.int8(16), _half(data, 0))


def _q5_1(data: Bytes) -> _Blocks:
    return _Blocks(_halves(data[:, 8:]) | _fifth_bits(data[:, 4:8]), _half(data, 0), _half(data, 2))


def _q8_0(data: Bytes) -> _Blocks:
    return _Blocks(data[:, 2:].view(np.int8), _half(data, 0))


def _q2_k(data: Bytes) -> _Blocks:
    small = data[:, :16]
    scales, offsets = _half(data, 80) * (small & 15), -_half(data, 82) * (small >> 4)
    return _Blocks(_planes(data[:, 16:80], 2, 32), scales, offsets)


def _q3_k(data: Bytes) -> _Blocks:
    high = _planes(data[:, :32], 1, 32) << np.uint8(2)
    packed = data[:, 96:108]
    low = _halves(packed[:, :8])
    small = low | (_planes(packed[:, 8:], 2, 4) << np.uint8(4))
    scales = _half(data, 108) * (small.astype(np.float32) - 32)
    return _Blocks(_planes(data[:, 32:96], 2, 32) | high, scales, -4 * scales)


def _six_bits(data: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits in twelve bytes: [N, 8] each."""
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), 1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), 1)
    return scales, minima


def _q4_k(data: Bytes) -> _Blocks:
    scales, minima = _six_bits(data[:, 4:16])
    return _Blocks(_planes(data[:, 16:], 4, 32), _half(data, 0) * scales, -_half(data, 2) * minima)


def _q5_k(data: Bytes) -> _Blocks:
    scales, minima = _six_bits(data[:, 4:16])
    codes = _planes(data[:, 48:], 4, 32) | (_planes(data[:, 16:48], 1, 32) << np.uint8(4))
    return _Blocks(codes, _half(data, 0) * scales, -_half(data, 2) * minima)


def _q6_k(data: Bytes) -> _Blocks:
    codes = _planes(data[:, :128], 4, 64) | (_planes(data[:, 128:192], 2, 32) << np.uint8(4))
    return _Blocks(codes.astype(np.int8) - np.int8(32), _half(data, 208) * data[:, 192:208].view(np.int8))


def _iq4_nl(data: Bytes) -> _Blocks:
    return _Blocks(_halves(data[:, 2:]), _half(data, 0))


class _Type(NamedTuple):
    num_bytes: int
    inputs: int
    bits: int
    """Bits of a code as a kernel stores it."""
    read: Callable[[Bytes], _Blocks]


_TYPES = {
    "Q4_0": _Type(18, 32, 4, _q4_0),
    "Q4_1": _Type(20, 32, 4, _q4_1),
    "Q5_0": _Type(22, 32, 8, _q5_0),
    "Q5_1": _Type(24, 32, 8, _q5_1),
    "Q8_0": _Type(34, 32, 8, _q8_0),
    "Q2_K": _Type(84, 256, 4, _q2_k),
    "Q3_K": _Type(110, 256, 4, _q3_k),
    "Q4_K": _Type(144, 256, 4, _q4_k),
    "Q5_K": _Type(176, 256, 8, _q5_k),
    "Q6_K": _Type(210, 256, 8, _q6_k),
    "IQ4_NL": _Type(18, 32, 4, _iq4_nl),
}


def read_blocks(kind: str, data: Bytes, shape: tuple[int, int]) -> QuantizedWeight | None:
    """Weight [O, I] in blocks of a type such as "Q4_K"; None: a type that stays packed nowhere.

    Args:
        data: The tensor's bytes, row by row.

    Raises:
        ValueError: bytes are missing, or scales are not finite.
    """
    found = _TYPES.get(kind)
    if found is None:
        return None
    codes, scales, offsets = found.read(np.ascontiguousarray(data).reshape(-1, found.num_bytes))

    def rows(values: Floats) -> Tensor:
        if not np.isfinite(values).all():
            raise ValueError("its scales are not finite")
        return torch.from_numpy(np.ascontiguousarray(values)).view(shape[0], -1)

    return QuantizedWeight(
        bits=found.bits,
        codes=torch.from_numpy(np.require(codes, requirements=["C", "W"])).view(shape),
        scales=rows(scales),
        group=found.inputs // scales.shape[1],
        offsets=None if offsets is None else rows(offsets),
        levels=torch.tensor(_IQ4, dtype=torch.float32) if found.read is _iq4_nl else None,
    )
