"""Products in which a row's result does not depend, bit for bit, on other rows: fixed shapes, tested before use.

A library changes the order of a sum over K with the number of rows (oneDNN does from K = 2048 on, for example), but
computes equal shapes in the same way. Rows are therefore computed in pieces of a few sizes, padded. A size is used only
if, on this machine and with this number of threads, it gives the bits of pieces of `BASE` rows.

A trial sees a difference only if one of its numbers shows it, and sums of a few products of 16-bit numbers hardly do.
On a processor with AMX tiles oneDNN has other kernels of 16-bit numbers for other numbers of rows; there all pieces
have one size, and a trial only checks that a row does not depend on its index in the piece.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..dispatch import use_triton
from .pieces import multiply_pieces, padded
from .torch import PackedLinear, pack

if TYPE_CHECKING:
    from .device_invariant import TritonInvariantLinear

BASE = 8
"""Rows of the piece whose result is the reference."""
TILED_BASE = 32
"""Rows of every piece of 16-bit numbers on a processor with AMX tiles: two tiles, for which a product still takes about
the time of reading the weights."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Most elements of a result in a trial.
_MAX_TRIAL = 1 << 24
# Distinct rows of a trial's weight, which are repeated: only the shape matters.
_TRIAL_ROWS = 512
# Multiply-adds up to which a trial of one size computes all rows: about a millisecond. Larger ones compute fewer.
_TRIAL_WORK = 1 << 26


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
        return multiply_pieces(self._packed, x, residual, self._sizes)

    def without_bias(self, x: Tensor) -> Tensor:
        """Product x Wᵀ [T, out]; in this product a row may depend on other rows."""
        return self._packed.without_bias(x)


@torch.inference_mode()
def pack_invariant(weight: Tensor, bias: Tensor | None = None) -> InvariantLinear | TritonInvariantLinear:
    """Pack a weight and run a trial of its shape. The trial of a new shape needs memory for one more weight of that
    shape. On a GPU nothing is tried: our kernel has one order of sums."""
    if use_triton(weight):
        from .device_invariant import TritonInvariantLinear

        return TritonInvariantLinear(weight, bias)
    packed = pack(weight, bias)
    out_features, in_features = weight.shape
    with_bias = bias is not None
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, with_bias, torch.get_num_threads())
    return InvariantLinear(packed, sizes)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Product of x [T, in] and the transpose of weight [out, in], invariant and not packed: for weights used once."""
    if use_triton(x):
        from .device_invariant import TritonInvariantLinear

        return TritonInvariantLinear(weight, None)(x)
    out_features, in_features = weight.shape
    threads = torch.get_num_threads()
    sizes = trusted_sizes(in_features, out_features, weight.dtype, weight.device, False, threads, prepacked=False)
    plain = PackedLinear(padded(weight, out_features), None, (out_features, in_features), prepacked=False)
    return InvariantLinear(plain, sizes)(x)


def has_tiles() -> bool:
    """True when the processor has AMX tiles, which oneDNN uses for 16-bit numbers whether or not our kernels do."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(errors="replace").split()
    except OSError:
        return False  # not Linux: tiles cannot be used


def trial_operands(left: tuple[int, ...], right: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random float32 `left` [..., K] and `right` [..., K] whose products over K reveal the order of the summation.

    `right` holds every number twice, at random indices; so does half of the rows of `left`, the second time negated.
    Such a product is zero except for rounding, and its bits show the order of the sum in any dtype. Rounding to
    bfloat16 mostly hides the order for plain random numbers. The pairs have scales from 1 down to 2^-12, since products
    of 16-bit numbers of one scale are so short that a few of them have an exact sum. For a K of a few numbers the other
    half of the rows shows more.
    """
    inner = left[-1]
    order = torch.randperm(inner, generator=generator)
    first, second = order[: inner // 2], order[inner // 2 : inner // 2 * 2]
    x = torch.randn(left, generator=generator)
    x[..., first] *= torch.exp2(-torch.randint(0, 13, (len(first),), generator=generator).float())
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

    On a processor with tiles, 16-bit numbers have the one size TILED_BASE. The result is (1,), each row by itself, when
    even pieces of the reference's size depend on a row's index or on other rows.
    """
    is_tiled = device.type == "cpu" and dtype.itemsize == 2 and has_tiles()
    base = TILED_BASE if is_tiled else BASE
    generator = torch.Generator().manual_seed(in_features * 1_000_003 + out_features)
    most = max((size for size in _SIZES if size * out_features <= _MAX_TRIAL), default=base)
    num_rows = -(-max(most, base) // base) * base
    shapes = (num_rows, in_features), (min(out_features, _TRIAL_ROWS), in_features)
    x, weight = (operand.to(device, dtype) for operand in trial_operands(*shapes, generator))
    weight = weight.repeat(-(-out_features // len(weight)), 1)[:out_features]
    bias = torch.randn(out_features, generator=generator).to(device, dtype) if with_bias else None
    if prepacked:
        packed = pack(weight, bias)
    else:
        packed = PackedLinear(weight, None, (out_features, in_features), prepacked=False)
    del weight
    residual = _trial_residual(num_rows, out_features, bias, generator).to(device, dtype)
    expected = _by_base(packed, x, None, base), _by_base(packed, x, residual, base)
    for _ in range(2):
        moved = torch.randperm(num_rows, generator=generator).to(device)
        again = _by_base(packed, x[moved], None, base), _by_base(packed, x[moved], residual[moved], base)
        if not all(torch.equal(a, e[moved]) for a, e in zip(again, expected, strict=True)):
            return (1,)
    if is_tiled:
        return (base,)
    tried = max(32, _TRIAL_WORK // (in_features * out_features))
    sizes = [size for size in _SIZES if size <= num_rows and _agrees(packed, x, residual, expected, size, tried)]
    return tuple(sorted({*sizes, BASE}))


def _trial_residual(num_rows: int, out_features: int, bias: Tensor | None, generator: torch.Generator) -> Tensor:
    """Residual [num_rows, out_features] float32: small, and in half of the rows the bias negated, so that a product
    near zero shows in which order the three are added, and what is rounded before."""
    residual = torch.randn(num_rows, out_features, generator=generator) * 1e-6
    if bias is not None:
        residual[torch.rand(num_rows, generator=generator) < 0.5] = -bias.float().cpu()
    return residual


def _by_base(packed: PackedLinear, x: Tensor, residual: Tensor | None, base: int) -> Tensor:
    rows = range(0, x.shape[0], base)
    return torch.cat([packed(x[i : i + base], None if residual is None else residual[i : i + base]) for i in rows])


def _agrees(
    packed: PackedLinear, x: Tensor, residual: Tensor, expected: tuple[Tensor, Tensor], size: int, tried: int
) -> bool:
    """True when pieces of `size` rows, from the first `tried` rows and at the end, give `expected`."""
    starts = [*range(0, max(1, min(tried, x.shape[0]) - size + 1), size), x.shape[0] - size]
    return all(
        torch.equal(packed(x[rows]), expected[0][rows])
        and torch.equal(packed(x[rows], residual[rows]), expected[1][rows])
        for rows in (slice(start, start + size) for start in starts)
    )
