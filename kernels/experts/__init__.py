"""Experts of a layer: y[t] = Σ_j w[t, j] · E_{e[t, j]}(x[t]), with E(x) = W_down (silu(W_gate x) · W_up x).
The weights may have biases, and the activation may be another of `act_and_mul`.

The pairs of a token and its j-th expert are sorted by expert, and each expert that has tokens multiplies all of its
tokens at once: its weights are read once, those of other experts not at all.

T tokens, k experts of a token, E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as bound
from typing import Any, TypeAlias, cast

from torch import Tensor, stack

from ..dispatch import use_triton
from ..linear import Packed
from ..linear.torch import PackedLinear
from ..quantized_linear.device_weight import DeviceWeight
from . import native as _native
from . import torch as _torch
from .native import NativeExperts, Weights, is_native
from .torch import Product, Products, Routing, Scoring, TorchExperts, sigmoid

__all__ = [
    "PackedExperts",
    "Product",
    "Products",
    "Routing",
    "Scoring",
    "on_triton",
    "pack",
    "route",
    "run_products",
    "sigmoid",
]

PackedExperts: TypeAlias = Callable[..., Tensor]
"""Experts of one layer; a call computes y [T, H] from x [T, H], as `TorchExperts` does."""


def pack(
    gate_up: Sequence[Packed],
    down: Sequence[Packed],
    *,
    activation: str = "silu",
    batch_invariant: bool = False,
    partial: bool = False,
) -> PackedExperts:
    """Pack E experts: `gate_up` [2I, H] each, as `activation` takes their products, and `down` [H, I] each.

    With `batch_invariant` a row's result does not depend, bit for bit, on other rows. With `partial` other processes
    have more experts, which have the number E in a routing.
    """
    if is_native(gate_up, down) and activation in ("silu", "clamped_swiglu"):
        return NativeExperts(cast(Weights, gate_up), cast(Weights, down), activation)
    served = [_on_triton(weights) for weights in (gate_up, down)]
    if all(served) and activation != "relu2":
        from .triton import TritonExperts

        biases = [_biases(weights) for weights in (gate_up, down)]
        return TritonExperts(*served, biases=biases, activation=activation, partial=partial)
    plain = TorchExperts(gate_up, down, activation=activation, batch_invariant=batch_invariant)
    return bound(run_products, products=plain.products)


def on_triton(weights: Sequence[Packed]) -> bool:
    """True when Triton's kernels serve the weights of one projection of all experts."""
    return bool(_on_triton(weights))


def _biases(weights: Sequence[Any]) -> Tensor | None:
    """Biases [E, out] of weights for Triton's kernels; None: they have none."""
    found = [weight.bias for weight in weights if weight.bias is not None]
    return stack(found) if found else None


def _on_triton(weights: Sequence[Packed]) -> list[Any]:
    """Weights for one of Triton's kernels; none if it does not serve them."""
    plain = [weight.plain for weight in weights if isinstance(weight, PackedLinear)]
    if plain:
        served = [weight for weight in plain if weight is not None and use_triton(weight)]
        return served if len(served) == len(weights) else []
    stored: list[list[DeviceWeight]] = [getattr(weight, "device_weights", []) for weight in weights]
    if not all(len(parts) == 1 for parts in stored):
        return []
    from .triton_quantized import serves

    every = [parts[0] for parts in stored]
    return every if serves(every) else []


def route(logits: Tensor, top_k: int, *, renormalised: bool, rounded: bool, scoring: Scoring | None = None) -> Routing:
    """Route by the softmax of logits [T, E] in float32.

    Args:
        logits: Products of the router, in the model's dtype.
        top_k: Experts of a token.
        renormalised: True: a token's weights are divided by their sum.
        rounded: True: they are rounded to the logits' dtype then.
        scoring: Another rule for the choice and weights of experts; the weights are not rounded.
    """
    if scoring is not None:
        return _torch.route_scored(logits, top_k, scoring, renormalised=renormalised)
    options = {"renormalised": renormalised, "rounded": rounded}
    return _native.route(logits, top_k, **options) or _torch.route(logits, top_k, **options)


def run_products(x: Tensor, routing: Routing, residual: Tensor | None = None, *, products: Products) -> Tensor:
    """Experts by the caller's products, which may include other terms. The bits are those of `PackedExperts` with
    the same products."""
    outputs = _torch.outputs_of_pairs(x, routing, products)
    y = _native.combine(outputs, routing, residual)
    return _torch.combine(outputs, routing.weights, residual) if y is None else y
