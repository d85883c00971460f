"""Gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule").

    S[t] = exp(g[t]) · S[t-1] + k[t] (beta[t] · (v[t] - exp(g[t]) · S[t-1]ᵀ k[t]))ᵀ
    o[t] = S[t]ᵀ q[t]

Tokens one by one for runs of one token, else in chunks, whose updates are one triangular system (section 3.3).
G rows, H heads, L tokens, D elements of a key, V elements of a value; all in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .memory import CHUNK, StatePass


class DeltaInputs(NamedTuple):
    """Inputs of T tokens, or of [G, H, L] of them."""

    query: Tensor
    """[T, H, D] normalised and scaled"""
    key: Tensor
    """[T, H, D] normalised"""
    value: Tensor
    """[T, H, V]"""
    decay: Tensor
    """[T, H] g, at most 0"""
    beta: Tensor
    """[T, H]"""


def delta_rule(inputs: DeltaInputs, states: StatePass, memory: Tensor) -> Tensor:
    """Compute o [T, H, V], and write the states of `memory` [S, H, D, V]."""
    running = memory.index_select(0, states.sources)
    out = torch.empty_like(inputs.value)
    for stage in states.stages:
        for run in stage.runs:
            before = running.index_select(0, run.rows)
            if run.tokens.shape[1] == 1:
                tokens = run.tokens[:, 0]
                result, after = _step(DeltaInputs(*(part.index_select(0, tokens) for part in inputs)), before)
                out.index_copy_(0, tokens, result)
            else:
                gathered = DeltaInputs(*(part[run.tokens].transpose(1, 2) for part in inputs))
                if run.is_padding is not None:  # neither decays the state nor adds to it
                    is_padding = run.is_padding.unsqueeze(1)
                    gathered = gathered._replace(
                        decay=gathered.decay.masked_fill(is_padding, 0.0),
                        beta=gathered.beta.masked_fill(is_padding, 0.0),
                    )
                result, after = _chunks(gathered, before)
                result = result.transpose(1, 2)
                if run.is_padding is None:
                    out[run.tokens] = result
                else:
                    out[run.tokens[~run.is_padding]] = result[~run.is_padding]
            running.index_copy_(0, run.rows, after)
        memory[stage.slots] = running.index_select(0, stage.written_rows)
    return out


def _step(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [G, H, V] of one token for each row, and the states [G, H, D, V] after them."""
    state = state * inputs.decay.exp()[..., None, None]
    known = (state * inputs.key.unsqueeze(-1)).sum(-2)
    delta = (inputs.value - known) * inputs.beta.unsqueeze(-1)
    state = state + inputs.key.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * inputs.query.unsqueeze(-1)).sum(-2), state


def _chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [G, H, L, V] of rows with inputs [G, H, L, ...], and the states [G, H, D, V] after them."""
    size = min(CHUNK, inputs.query.shape[2])
    query, key, value, decay, beta = (part.unflatten(2, (-1, size)) for part in inputs)  # [G, H, chunks, size, ...]
    total = decay.cumsum(3)
    future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (total.unsqueeze(4) - total.unsqueeze(3)).masked_fill(future, -torch.inf).exp()
    key_beta, value_beta = key * beta.unsqueeze(-1), value * beta.unsqueeze(-1)
    system = (key_beta @ key.transpose(-1, -2)) * between
    within = (query @ key.transpose(-1, -2)) * between
    sides = torch.cat((value_beta, key_beta * total.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    query = query * total.exp().unsqueeze(-1)
    key = key * (total[..., -1:] - total).exp().unsqueeze(-1)
    whole = total[..., -1].exp()[..., None, None]
    results = []
    for i in range(query.shape[2]):
        new = values[:, :, i] - read_keys[:, :, i] @ state
        results.append(query[:, :, i] @ state + within[:, :, i] @ new)
        state = state * whole[:, :, i] + key[:, :, i].transpose(-1, -2) @ new
    return torch.stack(results, 2).flatten(2, 3), state
