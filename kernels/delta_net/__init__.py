"""Gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"), with the
norms before it and the gated norm after it.

    q[t], k[t] = unit(query[t]) / sqrt(D), unit(key[t])                 unit(x) = x / sqrt(|x|² + 1e-6)
    g[t] = -rate · softplus(decay[t] + rate_bias), b[t] = beta_scale · sigmoid(beta[t])
    S[t] = exp(g[t]) · S[t-1] + k[t] (b[t] · (v[t] - exp(g[t]) · S[t-1]ᵀ k[t]))ᵀ
    o[t] = norm(S[t]ᵀ q[t]) · silu(gate[t])

In Kimi Delta Attention (Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture") g[t] is a
vector of D elements, one for each row of S, and the gate is a sigmoid.

T tokens, H value heads, G key heads, each shared by H / G consecutive value heads, D elements of a key, V elements of a
value, S slots of states.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import use_triton
from ..rms_norm import NormWeight
from ..state_plan import StatePlan
from . import native as _native
from . import torch as _torch

__all__ = ["DeltaWeights", "Projected", "delta_net"]


class Projected(NamedTuple):
    """Projections of T tokens, in one dtype; elements of a row are consecutive, rows may be any distance apart."""

    mixed: Tensor
    """[T, 2 · G · D + H · V] queries, keys and values, after the convolution."""
    gate: Tensor
    """[T, H · V]"""
    beta: Tensor
    """[T, H]"""
    decay: Tensor
    """[T, H], or [T, H · D] if each element of a key has a decay of its own"""


class DeltaWeights(NamedTuple):
    """Weights of a layer, and its sizes."""

    rate: Tensor
    """[H] float32"""
    rate_bias: Tensor
    """[H], or [H · D] as for the decays; float32"""
    norm: NormWeight
    """Weights of the norm of each head's result, [V]."""
    key_heads: int
    beta_scale: float = 1.0
    """Largest b[t]. Above 1, a state may change its sign along a key (Grazzi et al. 2024)."""
    sigmoid_gate: bool = False
    """True: the gate is sigmoid(gate[t]) in place of silu(gate[t])."""

    @property
    def by_element(self) -> bool:
        """True: each element of a key has a decay of its own."""
        return len(self.rate_bias) > len(self.rate)


def delta_net(inputs: Projected, weights: DeltaWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """Compute o [T, H · V], contiguous, in the inputs' dtype; sums are made in float32. The `states` [S, H, D, V]
    float32 that `plan` names are written."""
    assert len(inputs.mixed) == plan.num_tokens, "a row for each token of the plan"
    if use_triton(inputs.mixed):
        from . import triton as _triton

        if _triton.serves(plan, weights.by_element, states):
            return _triton.delta_net(inputs, weights, plan, states)
    out = _native.delta_net(inputs, weights, plan, states)
    return _torch.delta_net(inputs, weights, plan, states) if out is None else out
