"""Experts of a layer: y[t] = Σ_j w[t, j] · E_{e[t, j]}(x[t]), with E(x) = W_down (silu(W_gate x) · W_up x).

The token-expert pairs are sorted by expert, and each expert that has tokens multiplies all of its tokens at once: its
weights are read once, those of other experts not at all.

T tokens, k experts of a token, E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

from torch import Tensor

from . import torch as _torch
from .torch import ExpertWeights, Products, Routing, route

__all__ = ["ExpertWeights", "Products", "Routing", "apply_experts", "route", "run_products"]


def apply_experts(x: Tensor, routing: Routing, weights: ExpertWeights, residual: Tensor | None = None) -> Tensor:
    """Compute y [T, H] from x [T, H], as a new tensor; `residual` [T, H] is added."""
    return _torch.run_products(x, routing, weights.products(), residual)


def run_products(x: Tensor, routing: Routing, products: Products, residual: Tensor | None = None) -> Tensor:
    """`apply_experts` with the products of the caller, which may add something to them."""
    return _torch.run_products(x, routing, products, residual)
