"""Passes of Mamba-2 over recurrent states for tests of kernels, and their definition in float64, token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.mamba2 import GroupNorm, MixerWeights, Projected
from outrider.kernels.state_plan import StatePlan

from .state_cases import CPU, NUM_SLOTS, Rows

NORMS = ("none", "after_gate", "before_gate")


class Mixer(NamedTuple):
    """A mixer's pass."""

    inputs: Projected
    weights: MixerWeights
    plan: StatePlan
    states: Tensor


def make_mixer(
    rows: Rows, shape: tuple[int, int, int, int], dtype: torch.dtype, norm: str = "after_gate", device=CPU
) -> Mixer:
    """Random pass of a mixer of (groups, heads, elements of B and C, elements of a head); some time steps are at the
    limits."""
    groups, heads, state_dim, head_dim = shape
    generator = torch.Generator().manual_seed(sum(rows.lens) + state_dim)
    size, parts, count = heads * head_dim, groups * state_dim, sum(rows.lens)
    wide = torch.randn(count, 2 * size + 2 * parts + heads + 3, generator=generator).to(device, dtype)
    gate, mixed, step = wide[:, 3:].split([size, size + 2 * parts, heads], 1)
    rate, bias, skip = (torch.rand(heads, generator=generator).to(device) for _ in range(3))
    found = None
    if norm != "none":
        scale = torch.rand(size, generator=generator).to(device) + 0.5
        found = GroupNorm(scale, 1e-5, norm == "before_gate", size // groups)
    states = torch.randn(NUM_SLOTS, heads, state_dim, head_dim, generator=generator).to(device)
    states[0] = 0
    weights = MixerWeights(-2 * rate, bias, skip, found, groups, (0.2, 1.7))
    return Mixer(Projected(mixed, gate, step), weights, rows.plan(3, device), states)


def mixer_definition(mixer: Mixer, rows: Rows) -> tuple[Tensor, Tensor]:
    """Results [T, H · P] and all states after the pass, in float64."""
    inputs, weights = Projected(*(part.double() for part in mixer.inputs)), mixer.weights
    before, after = mixer.states.double(), mixer.states.double()
    _, heads, state_dim, head_dim = before.shape
    parts, shared = weights.groups * state_dim, heads // weights.groups
    x, key, query = inputs.mixed.split([heads * head_dim, parts, parts], 1)
    x = x.unflatten(1, (heads, -1))
    key, query = (part.unflatten(1, (weights.groups, -1)).repeat_interleave(shared, 1) for part in (key, query))
    step = torch.log1p((inputs.step + weights.step_bias.double()).exp()).clamp(*weights.limits)
    out, token = torch.empty(x.shape, dtype=torch.float64, device=x.device), 0
    for count, source, writes in zip(*rows, strict=True):
        state = before[source]
        for t in range(count):
            decay = (weights.rate.double() * step[token]).exp()[:, None, None]
            state = decay * state + key[token][:, :, None] * (step[token][:, None] * x[token])[:, None]
            out[token] = torch.einsum("hnp,hn->hp", state, query[token]) + weights.skip.double()[:, None] * x[token]
            token += 1
            for offset, slot in writes:
                if offset == t + 1:
                    after[slot] = state
    return _gated(out.flatten(1), inputs.gate, weights), after


def _gated(y: Tensor, gate: Tensor, weights: MixerWeights) -> Tensor:
    opened, norm = gate * gate.sigmoid(), weights.norm
    if norm is None:
        return y * opened
    y = y if norm.is_before_gate else y * opened
    grouped = y.unflatten(1, (weights.groups, -1))
    y = (grouped / (grouped.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(1) * norm.scale.double()
    return y * opened if norm.is_before_gate else y
