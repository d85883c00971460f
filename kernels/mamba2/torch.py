"""Recurrence of Mamba-2 in PyTorch: the reference, and the path of devices without another.

Tokens one by one for runs of one token, else in chunks: within one as attention without softmax, and by the states
between them (section 6). R rows, L tokens; all in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..state_plan import CHUNK, Run, StatePlan

if TYPE_CHECKING:
    from . import GroupNorm, MixerWeights, Projected


class ScanInputs(NamedTuple):
    """Inputs of T tokens, or of [R, L] of them."""

    value: Tensor
    """[T, H, P] dt · x"""
    decay: Tensor
    """[T, H] rate · dt, at most 0"""
    key: Tensor
    """[T, J, N] B"""
    query: Tensor
    """[T, J, N] C"""


def mamba2(inputs: Projected, weights: MixerWeights, plan: StatePlan, states: Tensor) -> Tensor:
    """See `kernels.mamba2.mamba2`."""
    _, heads, state_dim, head_dim = states.shape
    size, parts = heads * head_dim, weights.groups * state_dim
    x, key, query = inputs.mixed.float().split([size, parts, parts], 1)
    x = x.unflatten(1, (heads, -1))
    step = F.softplus(inputs.step.float() + weights.step_bias).clamp(*weights.limits)
    key, query = (part.unflatten(1, (weights.groups, -1)) for part in (key, query))
    y = scan(ScanInputs(x * step.unsqueeze(-1), step * weights.rate, key, query), plan, states)
    y = (y + x * weights.skip.unsqueeze(-1)).flatten(1)
    return _gated(y, inputs.gate.float(), weights).to(inputs.mixed.dtype)


def _gated(y: Tensor, gate: Tensor, weights: MixerWeights) -> Tensor:
    """Result [T, H · P] in float32, gated and maybe normalised by groups."""
    norm = weights.norm
    if norm is None:
        return y * F.silu(gate)
    if not norm.is_before_gate:
        y = y * F.silu(gate)
    y = normalise(y, norm, weights.groups)
    return y * F.silu(gate) if norm.is_before_gate else y


def normalise(y: Tensor, norm: GroupNorm, groups: int) -> Tensor:
    """Norm of y [T, H · P] in float32 by groups."""
    grouped = y.unflatten(1, (groups, -1))
    squares = grouped.square().sum(-1, keepdim=True)
    squares = squares if norm.sum is None else norm.sum(squares)
    return (grouped * torch.rsqrt(squares / norm.size + norm.eps)).flatten(1) * norm.scale


def scan(inputs: ScanInputs, plan: StatePlan, memory: Tensor) -> Tensor:
    """Compute S[t]ᵀ C[t] [T, H, P], and write the states of `memory` [S, H, N, P]."""

    def compute_run(run: Run, before: Tensor) -> tuple[Tensor, Tensor]:
        compute = _step if run.tokens.shape[1] == 1 else _chunks
        return compute(_gathered(inputs, run), before)

    return plan.compute(memory, torch.empty_like(inputs.value), compute_run)


def _gathered(inputs: ScanInputs, run: Run) -> ScanInputs:
    """Inputs [R, L, ...] of a run; padding neither decays the state nor adds to it."""
    found = ScanInputs(*(part[run.tokens] for part in inputs))
    if run.is_padding is None:
        return found
    value = found.value.masked_fill(run.is_padding[..., None, None], 0.0)
    return found._replace(value=value, decay=found.decay.masked_fill(run.is_padding[..., None], 0.0))


def _step(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [R, 1, H, P] of one token for each row, and the states [R, H, N, P] after them."""
    value, decay, key, query = (part.squeeze(1) for part in inputs)
    shared = value.shape[1] // key.shape[1]
    key, query = key.repeat_interleave(shared, 1), query.repeat_interleave(shared, 1)
    state = torch.addcmul(state * decay.exp()[..., None, None], key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).transpose(1, 2), state


def _chunks(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [R, L, H, P] of rows with inputs [R, L, ...], and the states [R, H, N, P] after them."""
    size = min(CHUNK, inputs.value.shape[1])
    chunked = (part.transpose(1, 2).unflatten(2, (-1, size)) for part in inputs)
    value, decay, key, query = chunked  # [R, heads or groups, chunks, size, ...]
    shared = value.shape[1] // key.shape[1]
    total = decay.cumsum(3)
    future = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (total.unsqueeze(4) - total.unsqueeze(3)).masked_fill(future, -torch.inf).exp()
    within = ((query @ key.mT).repeat_interleave(shared, 1) * between) @ value
    query = query.repeat_interleave(shared, 1) * total.exp().unsqueeze(-1)
    key = key.repeat_interleave(shared, 1) * (total[..., -1:] - total).exp().unsqueeze(-1)
    added, whole = key.mT @ value, total[..., -1].exp()[..., None, None]
    results = []
    for i in range(value.shape[2]):
        results.append(within[:, :, i] + query[:, :, i] @ state)
        state = state * whole[:, :, i] + added[:, :, i]
    return torch.cat(results, 2).transpose(1, 2), state
