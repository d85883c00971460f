"""Choice between the native product by AMX tiles and oneDNN's: a trial of each shape, kept for each machine.

A shape has one product for all numbers of rows. The native one gives a row the same bits in any batch. If oneDNN's is
faster, a near-tie may have another winner in another batch, as on processors without a native product. Without tiles
the native product is always faster and is not tried.
"""

from __future__ import annotations

import functools
import logging
import time
from statistics import geometric_mean

import torch
from torch import Tensor

from ..memory import weight_memory
from ..native import tiles
from .native import NativeLinear
from .torch import PackedLinear, pack

logger = logging.getLogger(__name__)

ROWS = (1, 8, 32, 128)
"""Rows of the inputs of a trial, from one decode to a part of a prompt; each counts the same."""
ROUNDS = 5
"""Rounds of a trial, of which the shortest counts."""
TOLERANCE = 1.02
"""Ratio of two times that count as equal. The geometric mean over `ROWS` is compared: on a shared machine some single
time is always longer by chance."""
_KEPT = "shapes by the mean of their rows"
"""Name of the stored results. It changes with the rule, so that a machine tries its shapes again."""
_MAX_WEIGHT = 1 << 24
"""Elements of a trial's weight; larger ones lose outputs."""


def prefers_native(out_features: int, in_features: int, *, batch_invariant: bool = False) -> bool:
    """True when `NativeLinear` should hold weights [out, in]; the trial of a new shape takes about half a second.

    With `batch_invariant` it always should, with tiles or without: the order of its sums is fixed, while oneDNN's
    kernels depend on the number of rows and on the processor.
    """
    if not tiles.are_granted():
        return True
    pairs = tiles.prepare().pairs  # before the first product: afterwards the process does not change between the two
    if batch_invariant or not pairs:
        return batch_invariant
    return tiles.are_forced() or _wins(out_features, in_features, torch.get_num_threads())


@functools.cache
def _wins(out_features: int, in_features: int, num_threads: int) -> bool:
    shape = f"{out_features}x{in_features}, {num_threads} threads"
    try:
        with tiles.findings() as kept:
            shapes = kept.get(_KEPT)
            shapes = dict(shapes) if isinstance(shapes, dict) else {}
            if not isinstance(shapes.get(shape), bool):
                shapes[shape] = _try(min(out_features, max(64, _MAX_WEIGHT // in_features)), in_features)
                kept[_KEPT] = shapes
            return bool(shapes[shape])
    except OSError:
        return True  # Other processes of the same model could find another product faster.


@torch.inference_mode()
def _try(out_features: int, in_features: int) -> bool:
    weight = torch.empty(out_features, in_features, dtype=torch.bfloat16).normal_(std=in_features**-0.5)
    with weight_memory.of_model():  # on pages like a model's, and freed with the trial
        products = NativeLinear([weight], None), pack(weight)
    ratios = []
    for rows in ROWS:
        x = torch.empty(rows, in_features, dtype=torch.bfloat16).normal_()
        y, expected = (product(x) for product in products)
        if not torch.allclose(y.float(), expected.float(), rtol=2**-7, atol=1e-3):  # two roundings to bfloat16
            logger.warning("the product by AMX tiles is wrong for %dx%d and not used there", out_features, in_features)
            return False
        times = [[_seconds(product, x) for product in products] for _ in range(ROUNDS)]
        native, other = map(min, zip(*times, strict=True))
        ratios.append(native / other)
    return geometric_mean(ratios) <= TOLERANCE


def _seconds(product: NativeLinear | PackedLinear, x: Tensor) -> float:
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start
