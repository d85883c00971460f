"""Products whose result for a row does not depend, bit for bit, on the other rows: fixed shapes, tested before use.

A library sums K in another order when the number of rows changes (oneDNN does from K = 2048 on, for example), but the
same shape is always computed in the same way. So rows go through in pieces of a few sizes, padded, and a size is used
only if, on this machine and with this number of threads, it gives the bits that pieces of `BASE` rows give.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .torch import PackedLinear, pack

BASE = 8
"""Rows of the piece that defines the result."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Up to so many rows a product takes the time of reading the weights: padding costs next to nothing.
_CHEAP = 32
_ALIGNMENT = 64
# Elements of the largest result that is tried out.
_MAX_TRIAL = 1 << 24
# Distinct rows of a trial's weight, repeated: what matters is its shape.
_TRIAL_ROWS = 512


def pieces(num_rows: int, sizes: tuple[int, ...], cheap: int = _CHEAP) -> list[tuple[int, int]]:
    """(rows, size of the piece that holds them) for `num_rows` rows in order; `sizes` ascending, not empty.

    Padding is preferred to another piece up to a size of `cheap`, and up to half of the rows.
    """
    result = []
    rest = num_rows
    while rest:
        size = next((size for size in sizes if size >= rest), sizes[-1])
        smaller = [s for s in sizes if s < rest]
        if size > max(cheap, rest * 3 // 2) and smaller:
            size = smaller[-1]
        result.append((min(size, rest), size))
        rest -= min(size, rest)
    return result


class InvariantLinear:
    """A PackedLinear whose results for a row do not depend on the other rows. Made by `pack_invariant`."""

    __slots__ = ("_packed", "_sizes", "in_features", "out_features")

    def __init__(self, packed: PackedLinear, sizes: tuple[int, ...]) -> None:
        self._packed = packed
        self._sizes = sizes
        self.in_features, self.out_features = packed.in_features, packed.out_features

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual) as a new tensor; see `PackedLinear`."""
        if x.shape[0] in self._sizes or not x.shape[0]:
            return self._packed(padded(x, x.shape[0]), residual)
        parts, start = [], 0
        for count, size in pieces(x.shape[0], self._sizes):
            stop = start + count
            added = None if residual is None else padded(residual[start:stop], size)
            parts.append(self._packed(padded(x[start:stop], size), added)[:count])
            start = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def without_bias(self, x: Tensor) -> Tensor:
        """x Wᵀ [T, out]; here a row may depend on the others."""
        return self._packed.without_bias(x)


def padded(x: Tensor, size: int) -> Tensor:
    """x [n, ...] with zeros to [size, ...]; x itself when there is nothing to add.

    On a cache line, as a new tensor: a library may begin at an odd address with a short loop.
    """
    if x.shape[0] == size and not x.data_ptr() % _ALIGNMENT:
        return x
    result = x.new_zeros(size, *x.shape[1:])
    result[: x.shape[0]] = x
    return result


@torch.inference_mode()
def pack_invariant(weight: Tensor, bias: Tensor | None = None) -> InvariantLinear:
    """`pack`, and for the first weight of each shape a trial that takes the memory of one more such weight."""
    packed = pack(weight, bias)
    out_features, in_features = weight.shape
    with_bias = bias is not None
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, with_bias, torch.get_num_threads())
    return InvariantLinear(packed, sizes)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed, for weights that are used once: invariant, and not packed."""
    out_features, in_features = weight.shape
    threads = torch.get_num_threads()
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, False, threads, prepacked=False)
    plain = PackedLinear(padded(weight, out_features), None, (out_features, in_features), prepacked=False)
    return InvariantLinear(plain, sizes)(x)


def trial_operands(left: tuple[int, ...], right: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random float32 `left` [..., K] and `right` [..., K] whose products over K tell the order of the summation.

    `right` holds every number twice, at random places, and half of the rows of `left` too, the second time with the
    other sign. Such a product is zero but for rounding, so its bits tell how it was summed in any dtype; rounding to
    bfloat16 mostly hides that of a product of plain numbers. With a K of a few numbers it is the other way round.
    """
    inner = left[-1]
    order = torch.randperm(inner, generator=generator)
    first, second = order[: inner // 2], order[inner // 2 : inner // 2 * 2]
    x = torch.randn(left, generator=generator)
    plain = torch.rand(left[:-1], generator=generator) < 0.5
    x[..., second] = torch.where(plain.unsqueeze(-1), x[..., second], -x[..., first])
    w = torch.randn(right, generator=generator)
    w[..., second] = w[..., first]
    return x, w


@functools.cache
@torch.inference_mode()
def trusted_sizes(
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    device: torch.device,
    with_bias: bool,
    num_threads: int,
    *,
    prepacked: bool = True,
) -> tuple[int, ...]:
    """The piece sizes that give the bits of pieces of BASE rows, with and without a residual; ascending.

    Where even those depend on a row's place or company, (1,): each row by itself.
    """
    generator = torch.Generator().manual_seed(in_features * 1_000_003 + out_features)
    most = max((size for size in _SIZES if size * out_features <= _MAX_TRIAL), default=BASE)
    num_rows = -(-max(most, BASE) // BASE) * BASE
    shapes = (num_rows, in_features), (min(out_features, _TRIAL_ROWS), in_features)
    x, weight = (operand.to(device, dtype) for operand in trial_operands(*shapes, generator))
    weight = weight.repeat(-(-out_features // len(weight)), 1)[:out_features]
    if prepacked:
        packed = pack(weight, weight.new_zeros(out_features) if with_bias else None)
    else:
        packed = PackedLinear(weight, None, (out_features, in_features), prepacked=False)
    del weight
    small = (torch.randn(num_rows, out_features, generator=generator) * 1e-6).to(device, dtype)
    expected = _by_base(packed, x, None), _by_base(packed, x, small)
    for _ in range(2):
        moved = torch.randperm(num_rows, generator=generator).to(device)
        again = _by_base(packed, x[moved], None), _by_base(packed, x[moved], small[moved])
        if not all(torch.equal(a, e[moved]) for a, e in zip(again, expected, strict=True)):
            return (1,)
    sizes = [size for size in _SIZES if size <= num_rows and _agrees(packed, x, small, expected, size)]
    return tuple(sorted({*sizes, BASE}))


def _by_base(packed: PackedLinear, x: Tensor, residual: Tensor | None) -> Tensor:
    rows = range(0, x.shape[0], BASE)
    return torch.cat([packed(x[i : i + BASE], None if residual is None else residual[i : i + BASE]) for i in rows])


def _agrees(packed: PackedLinear, x: Tensor, small: Tensor, expected: tuple[Tensor, Tensor], size: int) -> bool:
    """Whether pieces of `size` rows, of the first 32 and at the end, give what is expected."""
    starts = [*range(0, max(1, min(32, x.shape[0]) - size + 1), size), x.shape[0] - size]
    return all(
        torch.equal(packed(x[rows]), expected[0][rows]) and torch.equal(packed(x[rows], small[rows]), expected[1][rows])
        for rows in (slice(start, start + size) for start in starts)
    )
