"""Activations of MLPs without a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]

_GELU_TANH = partial(F.gelu, approximate="tanh")
PLAIN_ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}
"""Function of each `hidden_act`; its argument may be mutated."""


def plain_activation(name: str, *, batch_invariant: bool) -> Activation:
    """Activation `name` of x [T, I].

    With `batch_invariant` each row is computed by itself: the functions of a vector's lane and of a leftover element
    differ in the last bit.
    """
    function = PLAIN_ACTIVATIONS[name]
    if not batch_invariant or name == "relu":
        return function
    return lambda x: torch.cat([function(row) for row in x.split(1)]) if len(x) else x
