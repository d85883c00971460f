"""Gated delta rule in PyTorch: the reference, and the path of devices without another.

Tokens one by one for runs of one token, else in chunks, whose updates are one triangular system (section 3.3).
R rows, H heads, L tokens, D elements of a key, V elements of a value; all in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rms_norm import rms_norm
from ..state_plan import CHUNK, Run, StatePlan

if TYPE_CHECKING:
    from . import DeltaWeights, Projected

EPS = 1e-6
"""Epsilon of the norms of queries and keys."""


class DeltaInputs(NamedTuple):
    """Inputs of T tokens, or of [R, H, L] of them."""

    query: Tensor
    """[T, H, D] normalised and scaled"""
    key: Tensor
    """[T, H, D] normalised"""
    value: Tensor
    """[T, H, V]"""
    decay: Tensor
    """[T, H, 1] or [T, H, D] g, at most 0"""
    beta: Tensor
    """[T, H]"""


def delta_net(inputs: Projected, weights: DeltaWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """See `kernels.delta_net.delta_net`."""
    _, heads, key_dim, value_dim = states.shape
    sizes = [weights.key_heads * key_dim, weights.key_heads * key_dim, heads * value_dim]
    query, key, value = inputs.mixed.float().split(sizes, 1)
    shared = heads // weights.key_heads
    query, key = (
        _unit(part.unflatten(1, (weights.key_heads, -1))).repeat_interleave(shared, 1) for part in (query, key)
    )
    decay = (inputs.decay.float() + weights.rate_bias).unflatten(1, (heads, -1))
    rule = DeltaInputs(
        query=query * key_dim**-0.5,
        key=key,
        value=value.unflatten(1, (heads, -1)),
        decay=-weights.rate.unsqueeze(1) * F.softplus(decay),
        beta=inputs.beta.float().sigmoid() * weights.beta_scale,
    )
    normed = rms_norm(delta_rule(rule, plan, states), weights.norm)
    activate = torch.sigmoid if weights.sigmoid_gate else F.silu
    return (normed * activate(inputs.gate.float().view(normed.shape))).to(inputs.mixed.dtype).flatten(1)


def _unit(x: Tensor) -> Tensor:
    """Vectors x [..., D] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def delta_rule(inputs: DeltaInputs, plan: StatePlan, memory: Tensor) -> Tensor:
    """Compute o [T, H, V], and write the states of `memory` [S, H, D, V]."""
    return plan.compute(memory, torch.empty_like(inputs.value), lambda run, before: _run(inputs, run, before))


def _run(inputs: DeltaInputs, run: Run, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [R, L, H, V] of a run, and the states after it; see `StatePlan.compute`."""
    if run.tokens.shape[1] == 1:
        result, after = _step(DeltaInputs(*(part.index_select(0, run.tokens[:, 0]) for part in inputs)), state)
        return result.unsqueeze(1), after
    gathered = DeltaInputs(*(part[run.tokens].transpose(1, 2) for part in inputs))
    if run.is_padding is not None:  # neither decays the state nor adds to it
        is_padding = run.is_padding.unsqueeze(1)
        decay = gathered.decay.masked_fill(is_padding.unsqueeze(-1), 0.0)
        gathered = gathered._replace(decay=decay, beta=gathered.beta.masked_fill(is_padding, 0.0))
    result, after = _chunks(gathered, state)
    return result.transpose(1, 2), after


def _step(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [R, H, V] of one token for each row, and the states [R, H, D, V] after them."""
    state = state * inputs.decay.exp().unsqueeze(-1)
    known = (state * inputs.key.unsqueeze(-1)).sum(-2)
    delta = (inputs.value - known) * inputs.beta.unsqueeze(-1)
    state = state + inputs.key.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * inputs.query.unsqueeze(-1)).sum(-2), state


def _chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [R, H, L, V] of rows with inputs [R, H, L, ...], and the states [R, H, D, V] after them."""
    size = min(CHUNK, inputs.query.shape[2])
    query, key, value, decay, beta = (part.unflatten(2, (-1, size)) for part in inputs)  # [R, H, chunks, size, ...]
    total = decay.cumsum(3)
    key_beta, value_beta = key * beta.unsqueeze(-1), value * beta.unsqueeze(-1)
    system, within = _decayed_products(torch.stack((key_beta, query)), key, total)
    sides = torch.cat((value_beta, key_beta * total.exp()), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    query = query * total.exp()
    key = key * (total[..., -1:, :] - total).exp()
    whole = total[..., -1, :].exp().unsqueeze(-1)
    results = []
    for i in range(query.shape[2]):
        new = values[:, :, i] - read_keys[:, :, i] @ state
        results.append(query[:, :, i] @ state + within[:, :, i] @ new)
        state = state * whole[:, :, i] + key[:, :, i].transpose(-1, -2) @ new
    return torch.stack(results, 2).flatten(2, 3), state


def _decayed_products(left: Tensor, key: Tensor, total: Tensor) -> Tensor:
    """Products [..., L, L] of left[i] and key[j], both [..., L, D], decayed from j to i; 0 for j > i.

    `total` has the sums of the decays. If these differ by element, a column is computed at a time: exp(total[i]) and
    exp(-total[j]) alone might overflow.
    """
    size = key.shape[-2]
    if total.shape[-1] == 1:
        future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
        return (left @ key.mT) * (total - total.mT).masked_fill(future, -torch.inf).exp()
    products = left.new_zeros(*left.shape[:-1], size)
    for j in range(size):
        decayed = key[..., j : j + 1, :] * (total[..., j:, :] - total[..., j : j + 1, :]).exp()
        products[..., j:, j] = (left[..., j:, :] * decayed).sum(-1)
    return products
