"""Experts in PyTorch: one packed product for each expert that has tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..act_and_mul import act_and_mul, act_and_mul_invariant
from ..linear import Packed


class Routing(NamedTuple):
    """Experts of each token."""

    experts: Tensor
    """[T, k] int64, the best first; E: another process computes the pair, which adds nothing here."""
    weights: Tensor
    """[T, k] float32."""


class Scoring(NamedTuple):
    """Rule of DeepSeek-V2 and V3 (DeepSeek-AI 2024, sections 2.2.2 and 2.1.2)."""

    num_groups: int = 1
    """Groups of experts, one after another."""
    top_groups: int = 1
    """Groups whose experts a token may visit: those of the best expert or, with `sigmoid`, of the best two together."""
    sigmoid: bool = False
    """True: a score is a sigmoid; False: the softmax."""
    scale: float = 1.0
    """Factor of the weights."""
    bias: Tensor | None = None
    """[E] float32, added to the scores for the choice alone."""


Product = Callable[[int, Tensor, Tensor], Tensor]
"""Function of an expert, its inputs [n, in], and the indices [n] of their tokens, ascending; returns [n, out]."""


class Products(NamedTuple):
    """Computation of the experts."""

    gate_up: Product
    """[n, H] -> [n, 2I]."""
    activation: Callable[[Tensor], Tensor]
    """[n, 2I] -> [n, I]."""
    down: Product
    """[n, I] -> [n, H]."""
    num_experts: int


class TorchExperts:
    """Packed weights of each expert of a layer."""

    def __init__(
        self,
        gate_up: Sequence[Packed],
        down: Sequence[Packed],
        *,
        activation: str = "silu",
        batch_invariant: bool = False,
    ) -> None:
        self.products = Products(
            lambda expert, x, tokens: gate_up[expert](x),
            partial(act_and_mul_invariant if batch_invariant else act_and_mul, activation=activation),
            lambda expert, x, tokens: down[expert](x),
            len(down),
        )

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        """Compute y [T, H] from x [T, H], as a new tensor; `residual` [T, H] is added."""
        return combine(outputs_of_pairs(x, routing, self.products), routing.weights, residual)


def route(logits: Tensor, top_k: int, *, renormalised: bool, rounded: bool) -> Routing:
    """See the package."""
    weights, experts = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    if renormalised:
        weights /= weights.sum(-1, keepdim=True)
    return Routing(experts, weights.to(logits.dtype).float() if rounded else weights)


def route_scored(logits: Tensor, top_k: int, scoring: Scoring, *, renormalised: bool) -> Routing:
    """See the package; `logits` [T, E]."""
    logits = logits.float()
    scores = sigmoid(logits) if scoring.sigmoid else logits.softmax(-1)
    choice = scores if scoring.bias is None else scores + scoring.bias
    if scoring.num_groups > 1:
        groups = choice.view(len(choice), scoring.num_groups, -1)
        best = groups.topk(2).values.sum(-1) if scoring.sigmoid else groups.amax(-1)
        hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(scoring.top_groups).indices, False)
        choice = groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(top_k).indices
    weights = scores.gather(1, experts)
    if renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * scoring.scale)


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoid as the softmax of x and 0: torch's own depends on an element's index, in the last bit."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def outputs_of_pairs(x: Tensor, routing: Routing, products: Products) -> Tensor:
    """Outputs [T, k, H] of each token's experts for x [T, H]."""
    num_tokens, top_k = routing.experts.shape
    experts = routing.experts.flatten()
    order = experts.argsort(stable=True)
    outputs = x.new_zeros(num_tokens * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(experts.bincount().tolist()[: products.num_experts]):
        if not count:
            continue
        pairs = order[start : start + count]
        tokens = pairs // top_k
        inner = products.activation(products.gate_up(expert, x[tokens], tokens))
        outputs[pairs] = products.down(expert, inner, tokens)
        start += count
    return outputs.view(num_tokens, top_k, -1)


def combine(outputs: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """Weighted sum [T, H] of outputs [T, k, H], in float32 and in the order of a token's experts."""
    total = outputs[:, 0] * weights[:, :1]
    for index in range(1, weights.shape[1]):
        total += outputs[:, index] * weights[:, index, None]
    if residual is not None:
        total += residual
    return total.to(outputs.dtype)
