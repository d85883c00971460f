"""Choice between the native product by AMX tiles and oneDNN's: a trial of each shape, kept for each machine.

Without tiles the native product is always faster and is not tried.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from ..native import tiles
from .native import NativeLinear
from .torch import PackedLinear, pack

ROWS = (1, 8, 32, 128)
"""Rows of the inputs of a trial: the native product must be at least as fast with each of them."""
ROUNDS = 5
"""Rounds of a trial, of which the shortest counts."""
TOLERANCE = 1.02
"""Ratio of two times that are taken for the same."""
_MAX_WEIGHT = 1 << 24
"""Elements of a trial's weight; larger ones lose outputs."""


def is_fastest(out_features: int, in_features: int) -> bool:
    """True when `NativeLinear` should hold weights [out, in]; the trial of a new shape takes about half a second."""
    if not tiles.are_compiled():
        return True
    return tiles.prepare().pairs and _wins(out_features, in_features, torch.get_num_threads())


@functools.cache
def _wins(out_features: int, in_features: int, num_threads: int) -> bool:
    shape = f"{out_features}x{in_features}, {num_threads} threads"
    kept = tiles.recall()
    shapes = kept.get("shapes")
    if not isinstance(shapes, dict):
        shapes = {}
    if not isinstance(shapes.get(shape), bool):
        shapes[shape] = _try(min(out_features, max(64, _MAX_WEIGHT // in_features)), in_features)
        tiles.remember({**kept, "shapes": shapes})
    return shapes[shape]


@torch.inference_mode()
def _try(out_features: int, in_features: int) -> bool:
    weight = torch.empty(out_features, in_features, dtype=torch.bfloat16).normal_(std=in_features**-0.5)
    products = NativeLinear([weight], None), pack(weight)
    for rows in ROWS:
        x = torch.empty(rows, in_features, dtype=torch.bfloat16).normal_()
        times = [[_seconds(product, x) for product in products] for _ in range(ROUNDS)]
        native, other = map(min, zip(*times, strict=True))
        if native > TOLERANCE * other:
            return False
    return True


def _seconds(product: NativeLinear | PackedLinear, x: Tensor) -> float:
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start
