"""Recurrence of Mamba-2 (Dao, Gu 2024, "Transformers are SSMs"), with the gated norm after it.

    dt[t] = clamp(softplus(step[t] + step_bias), limits)
    S[t] = exp(rate · dt[t]) · S[t-1] + B[t] (dt[t] · x[t])ᵀ
    y[t] = S[t]ᵀ C[t] + skip · x[t]
    o[t] = norm(y[t] · silu(gate[t])), or norm(y[t]) · silu(gate[t]), or y[t] · silu(gate[t])

T tokens, H heads in J groups of consecutive ones, which share B and C and are normalised together, N elements of B and
C, P of a head, S slots of states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..dispatch import use_triton
from ..state_plan import StatePlan
from . import native as _native
from . import torch as _torch

__all__ = ["GroupNorm", "MixerWeights", "Projected", "mamba2"]


class Projected(NamedTuple):
    """Projections of T tokens, in one dtype; elements of a row are consecutive, rows may be any distance apart."""

    mixed: Tensor
    """[T, H · P + 2 · J · N] x, B and C, after the convolution."""
    gate: Tensor
    """[T, H · P]"""
    step: Tensor
    """[T, H]"""


class GroupNorm(NamedTuple):
    """Norm of the results of each group: x / sqrt(mean(x²) + eps) · scale."""

    scale: Tensor
    """[H · P] float32"""
    eps: float
    is_before_gate: bool
    size: int
    """Elements of a group, of which this process may have a part."""
    sum: Callable[[Tensor], Tensor] | None = None
    """Sum of [T, J, 1] over the processes that have parts of the same groups; None: this one has all."""


class MixerWeights(NamedTuple):
    """Weights of a layer, and its sizes."""

    rate: Tensor
    """[H] float32, negative"""
    step_bias: Tensor
    """[H] float32"""
    skip: Tensor
    """[H] float32"""
    norm: GroupNorm | None
    groups: int
    limits: tuple[float, float]
    """Smallest and largest dt[t]."""


def mamba2(inputs: Projected, weights: MixerWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """Compute o [T, H · P], contiguous, in the inputs' dtype; sums are made in float32. The `states` [S, H, N, P]
    float32 that `plan` names are written."""
    assert len(inputs.mixed) == plan.num_tokens, "a row for each token of the plan"
    if weights.norm is not None and weights.norm.sum is not None:
        if weights.norm.is_before_gate:
            return _torch.mamba2(inputs, weights, plan, states)
        gated = mamba2(inputs, weights._replace(norm=None), plan, states)
        return _torch.normalise(gated.float(), weights.norm, weights.groups).to(gated.dtype)
    if use_triton(inputs.mixed):
        from . import triton as _triton

        if _triton.serves(states):
            return _triton.mamba2(inputs, weights, plan, states)
    out = _native.mamba2(inputs, weights, plan, states)
    return _torch.mamba2(inputs, weights, plan, states) if out is None else out
