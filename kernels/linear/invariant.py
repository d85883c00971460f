"""Products in which a row's result does not depend, bit for bit, on other rows: fixed shapes, tested before use.

A library changes the order of a sum over K with the number of rows (oneDNN does from K = 2048 on, for example), but
computes equal shapes in the same way. Rows are therefore computed in pieces of a few sizes, padded. A size is used only
if, on this machine and with this number of threads, it gives the bits of pieces of `BASE` rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .torch import PackedLinear, pack

BASE = 8
"""Rows of the piece whose result is the reference."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Most rows for which a product takes the time of reading the weights, so that padding is nearly free.
_CHEAP = 32
_ALIGNMENT = 64
# Most elements of a result in a trial.
_MAX_TRIAL = 1 << 24
# Distinct rows of a trial's weight, which are repeated: the shape alone matters.
_TRIAL_ROWS = 512


def pieces(num_rows: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pieces (rows, size of the padded piece) that cover `num_rows` rows in order; `sizes` ascend and are not empty.

    Padding is preferred to another piece up to a size of `_CHEAP`, and up to half of the rows.
    """
    result = []
    rest = num_rows
    while rest:
        size = next((size for size in sizes if size >= rest), sizes[-1])
        smaller = [s for s in sizes if s < rest]
        if size > max(_CHEAP, rest * 3 // 2) and smaller:
            size = smaller[-1]
        result.append((min(size, rest), size))
        rest -= min(size, rest)
    return result


class InvariantLinear:
    """Packed weight whose results for a row do not depend on other rows. Made by `pack_invariant`."""

    fuses_adapters = False
    __slots__ = ("_packed", "_sizes", "in_features", "num_bytes", "out_features")

    def __init__(self, packed: PackedLinear, sizes: tuple[int, ...]) -> None:
        self._packed = packed
        self._sizes = sizes
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.num_bytes = packed.num_bytes

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
        """Product x Wᵀ [T, out]; in this product a row may depend on other rows."""
        return self._packed.without_bias(x)


def padded(x: Tensor, size: int) -> Tensor:
    """x [n, ...] padded with zeros to [size, ...]; x itself when nothing is missing.

    The copy starts at a cache line: a library may use a short loop for the first elements at an odd address.
    """
    if x.shape[0] == size and not x.data_ptr() % _ALIGNMENT:
        return x
    result = x.new_zeros(size, *x.shape[1:])
    result[: x.shape[0]] = x
    return result


@torch.inference_mode()
def pack_invariant(weight: Tensor, bias: Tensor | None = None) -> InvariantLinear:
    """Pack a weight and try out its shape. The trial of a new shape needs memory for one more weight of that shape."""
    packed = pack(weight, bias)
    out_features, in_features = weight.shape
    with_bias = bias is not None
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, with_bias, torch.get_num_threads())
    return InvariantLinear(packed, sizes)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Product of x [T, in] and the transpose of weight [out, in], invariant and not packed: for weights used once."""
    out_features, in_features = weight.shape
    threads = torch.get_num_threads()
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, False, threads, prepacked=False)
    plain = PackedLinear(padded(weight, out_features), None, (out_features, in_features), prepacked=False)
    return InvariantLinear(plain, sizes)(x)


def trial_operands(left: tuple[int, ...], right: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random float32 `left` [..., K] and `right` [..., K] whose products over K reveal the order of the summation.

    `right` holds every number twice, at random places; so does half of the rows of `left`, the second time negated.
    Such a product is zero but for rounding, and its bits show the order of the sum in any dtype. Rounding to bfloat16
    mostly hides the order for plain random numbers. For a K of a few numbers the other half of the rows shows more.
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
    """Sizes of pieces that give the bits of pieces of BASE rows, with and without a residual; ascending.

    The result is (1,), each row by itself, when even pieces of BASE rows depend on a row's place or on other rows.
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
    """True when pieces of `size` rows, from the first 32 rows and at the end, give `expected`."""
    starts = [*range(0, max(1, min(32, x.shape[0]) - size + 1), size), x.shape[0] - size]
    return all(
        torch.equal(packed(x[rows]), expected[0][rows]) and torch.equal(packed(x[rows], small[rows]), expected[1][rows])
        for rows in (slice(start, start + size) for start in starts)
    )
