"""Recurrence of Mamba-2 (Dao, Gu 2024, "Transformers are SSMs").

    S[t] = exp(g[t]) · S[t-1] + B[t] v[t]ᵀ        g = A · dt, v = dt · x
    y[t] = S[t]ᵀ C[t]

Tokens one by one for runs of one token, else in chunks: within one as attention without softmax, and by the states
between them (section 6).
R rows, H heads in J groups that share B and C, L tokens, N elements of B and C, P of a head; all in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.state_plan import CHUNK, Run, StatePlan


class ScanInputs(NamedTuple):
    """Inputs of T tokens, or of [R, L] of them."""

    value: Tensor
    """[T, H, P] v"""
    decay: Tensor
    """[T, H] g, at most 0"""
    key: Tensor
    """[T, J, N] B"""
    query: Tensor
    """[T, J, N] C"""


def scan(inputs: ScanInputs, states: StatePlan, memory: Tensor) -> Tensor:
    """Compute y [T, H, P], and write the states of `memory` [S, H, N, P]."""

    def compute_run(run: Run, before: Tensor) -> tuple[Tensor, Tensor]:
        compute = _step if run.tokens.shape[1] == 1 else _chunks
        return compute(_gathered(inputs, run), before)

    return states.compute(memory, torch.empty_like(inputs.value), compute_run)


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
