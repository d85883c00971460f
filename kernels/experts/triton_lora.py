"""Adapters on experts: y[p] += B[e] (A[e] x[t]) for the pairs p = (t, e) of an adapter's tokens, by the grouped product
of the experts themselves, once with A and once with B.

P pairs of a token and its j-th expert, k experts of a token, E experts, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .device_plan import Plan, plan_tiles
from .triton import PlainExperts

_ALIGNMENT = 16
"""Alignment in bytes of each expert's weight that the kernel assumes."""


class ExpertRows(NamedTuple):
    """Weights of one adapter for some columns of a projection of all experts."""

    a: PlainExperts
    """[r, in] of each expert that has some."""
    b: PlainExperts
    """[out, r] of each."""
    columns: slice
    """Columns of the projection's output."""
    held: Tensor
    """[E + 1] bool: experts that have weights; the others take no memory. The last is for those of other processes."""


def stack(weights: dict[int, Tensor], num_experts: int, shape: tuple[int, int], device: torch.device) -> PlainExperts:
    """Copy weights by expert, of `shape` or smaller, to the device; the rest of a shape is zeros. Experts without
    weights must not be used."""
    dtype = next(iter(weights.values())).dtype
    size, unit = shape[0] * shape[1], _ALIGNMENT // dtype.itemsize
    rows = torch.zeros(len(weights), -(-size // unit) * unit, dtype=dtype, device=device)
    views = {expert: row[:size].view(shape) for expert, row in zip(weights, rows, strict=True)}
    for expert, weight in weights.items():
        views[expert][: weight.shape[0], : weight.shape[1]] = weight.to(device, non_blocking=True)
    unread = next(iter(views.values()))
    return PlainExperts([views.get(expert, unread) for expert in range(num_experts)], None)


def add_rows(y: Tensor, x: Tensor, experts: Tensor, owned: Tensor, parts: list[ExpertRows]) -> None:
    """Add an adapter's deltas in place.

    Args:
        y: Outputs [P, out]; mutated.
        x: [T, in], or [P, in] of each pair.
        experts: [T, k].
        owned: [T] bool: the adapter's tokens.
        parts: Weights of the adapter for parts of the output.
    """
    pairs = experts.numel() // len(x) if len(x) else 1
    plans: dict[Tensor, Plan] = {}  # parts of the same experts share one
    for part in parts:
        if part.held not in plans:
            num_experts = len(part.held) - 1
            mine = part.held[experts] & owned.unsqueeze(1)
            plans[part.held] = plan_tiles(experts.masked_fill(~mine, num_experts), num_experts)
        plan = plans[part.held]
        y[:, part.columns] += part.b(part.a(x, plan, pairs, partial=True), plan, 1, partial=True)
