"""Activations of MLPs without a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.act_and_mul.native import gelu as native_gelu

Activation = Callable[..., Tensor]


def _gelu(x: Tensor, *, tanh: bool, by_rows: bool = False) -> Tensor:
    y = native_gelu(x, tanh=tanh)
    if y is not None:
        return y
    approximate = "tanh" if tanh else "none"
    if not by_rows or len(x) <= 1:
        return F.gelu(x, approximate=approximate)
    return torch.cat([F.gelu(row, approximate=approximate) for row in x.split(1)])


_GELU_TANH = partial(_gelu, tanh=True)
PLAIN_ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu_,
    "relu2": lambda x, **_: torch.relu_(x).square_(),
    "gelu": partial(_gelu, tanh=False),
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}
"""Function of each `hidden_act`; its argument may be mutated."""


def plain_activation(name: str, *, batch_invariant: bool) -> Activation:
    """Activation `name` of x [T, I].

    With `batch_invariant` torch computes each row by itself: its functions of a vector's lane and of a leftover element
    differ in the last bit. The native kernel needs no such care.
    """
    function = PLAIN_ACTIVATIONS[name]
    return partial(function, by_rows=True) if batch_invariant and not name.startswith("relu") else function
