"""Check of the products by AMX tiles: `python -m outrider.kernels.tile_check`, run by `native.tiles`.

Its last line is the `TileUse` that the machine may have, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor

from .linear import NativeLinear
from .native import tiles
from .native.tiles import NEVER, TileUse
from .quantized_linear import NativeQuantizedLinear, QuantizedWeight

_SHAPES = ((64, 32), (70, 6), (129, 1066), (200, 96))
_ROWS = (1, 3, 16, 17, 40)
_TIMED = (256, 512)
"""Shape of a weight of which products are timed: few, so that emulated tiles are fast enough too."""
_TIMED_ROWS = (4, 8, 16, 32, 64)
_ROUNDS = 3


def main() -> int:
    """Check all products and print the result."""
    torch.manual_seed(0)
    if not tiles.are_granted():
        print("the system does not grant tiles", file=sys.stderr)
        return 1
    pairs = all(_is_right(*shape) for shape in _SHAPES)
    weights = [_quantized(bits, group, *shape) for bits in (4, 8) for group in (32, 100, 1 << 20) for shape in _SHAPES]
    bytes_ = all(map(_is_same, weights))
    byte_rows = max(_first_faster(_quantized(bits, 128, *_TIMED)) for bits in (4, 8)) if bytes_ else NEVER
    wrong = " and ".join(name for name, right in (("bfloat16", pairs), ("integers", bytes_)) if not right)
    fault = f"products of {wrong} are wrong on this processor" if wrong else ""
    print(json.dumps(TileUse(pairs, byte_rows, fault)._asdict()), end="")
    return 0


def _is_right(out_features: int, in_features: int) -> bool:
    """Compare a product of bfloat16 with float64, and each number of rows with all rows."""
    weight = torch.randn(out_features, in_features).mul_(in_features**-0.5).bfloat16()
    bias, x = torch.randn(out_features).bfloat16(), torch.randn(max(_ROWS), in_features).bfloat16()
    residual = torch.randn(len(x), out_features).bfloat16()
    tiles.use(TileUse(True, NEVER))
    linear = NativeLinear([weight], bias)
    y = linear(x, residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    return torch.allclose(y.double(), expected, rtol=2**-8, atol=1e-4) and all(
        torch.equal(linear(x[-rows:], residual[-rows:]), y[-rows:]) for rows in _ROWS
    )


def _quantized(bits: int, group: int, out_features: int, in_features: int) -> NativeQuantizedLinear:
    codes = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)
    group = min(group, in_features)
    scales = torch.rand(out_features, -(-in_features // group))
    weight = QuantizedWeight(bits=bits, codes=codes, scales=scales, group=group, offsets=-(1 << (bits - 1)) * scales)
    return NativeQuantizedLinear([weight], None)


def _is_same(linear: NativeQuantizedLinear) -> bool:
    """Compare the bits of a product of integers with those without tiles."""
    x = torch.randn(max(_ROWS), linear.in_features).bfloat16()
    return all(torch.equal(_multiply(linear, x[-rows:], 1), _multiply(linear, x[-rows:], NEVER)) for rows in _ROWS)


def _multiply(linear: NativeQuantizedLinear, x: Tensor, byte_rows: int) -> Tensor:
    tiles.use(TileUse(False, byte_rows))
    return linear(x)


def _first_faster(linear: NativeQuantizedLinear) -> int:
    """Rows from which products with tiles take less time than without."""
    first = NEVER
    for rows in reversed(_TIMED_ROWS):
        x = torch.randn(rows, linear.in_features).bfloat16()
        times: list[list[float]] = [[], []]
        for _ in range(_ROUNDS):
            for byte_rows, own in zip((1, NEVER), times, strict=True):
                start = time.perf_counter()
                _multiply(linear, x, byte_rows)
                own.append(time.perf_counter() - start)
        if min(times[0]) >= min(times[1]):
            break
        first = rows
    return first


if __name__ == "__main__":
    sys.exit(main())
