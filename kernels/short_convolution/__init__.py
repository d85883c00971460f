"""Causal depthwise convolution over ragged rows, whose first tokens read inputs of their state.

y[t] = act(b + sum over j in [0, K) of w[j] · x[t - (K - 1) + j]), act is SiLU or nothing

T tokens, C channels, S slots of states, which hold the last K - 1 inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import use_triton
from ..state_plan import StatePlan
from . import native as _native
from . import torch as _torch

__all__ = ["Filters", "short_convolution"]


class Filters(NamedTuple):
    """Weights, one filter for each channel."""

    taps: Tensor
    """[K, C] float32 contiguous, the oldest input's first."""
    bias: Tensor | None
    """[C] float32."""


def short_convolution(x: Tensor, filters: Filters, plan: StatePlan, states: Tensor, *, silu: bool) -> Tensor:
    """Compute y [T, C], contiguous, from x [T, C], whose rows may be any distance apart; sums are made in float32. The
    `states` [S, K - 1, C] that `plan` names are written."""
    assert x.shape == (plan.num_tokens, states.shape[2]), "a row for each token of the plan"
    assert x.dtype == states.dtype
    if use_triton(x):
        from . import triton as _triton

        return _triton.short_convolution(x, filters, plan, states, silu=silu)
    y = _native.short_convolution(x, filters, plan, states, silu=silu)
    return _torch.short_convolution(x, filters, plan, states, silu=silu) if y is None else y
