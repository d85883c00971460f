"""Passes over recurrent states for tests of kernels, and their definitions in float64, token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.delta_net import DeltaWeights, Projected
from outrider.kernels.rms_norm import prepare
from outrider.kernels.short_convolution import Filters
from outrider.kernels.state_plan import StatePlan

CPU = torch.device("cpu")
NUM_SLOTS = 24


class Rows(NamedTuple):
    """Rows of a pass."""

    lens: list[int]
    sources: list[int]
    writes: list[list[tuple[int, int]]]

    def plan(self, history: int, device: torch.device = CPU) -> StatePlan:
        """Plan over states with `history` inputs of a convolution."""
        return StatePlan(self.lens, self.sources, self.writes, history, device)


ROWS = {
    "decode": Rows([1], [3], [[(1, 4)]]),
    "decodes": Rows([1, 1, 1], [0, 5, 7], [[(1, 1)], [(1, 6)], [(1, 8)]]),
    # Drafts; the last row's ring is full, so it writes the slot that it starts with.
    "verification": Rows([4, 1, 3], [2, 6, 9], [[(1, 3), (2, 4), (3, 5), (4, 1)], [(1, 7)], [(2, 10), (3, 9)]]),
    # A chunk with snapshots, one of them of a length that the ring has too.
    "chunks": Rows([150, 2, 33], [0, 11, 12], [[(64, 1), (149, 2), (150, 3), (150, 4)], [(2, 5)], [(32, 6), (33, 7)]]),
}
MORE_ROWS = {
    # The last row starts at slot 0, writes a length to two slots and does not write its first ones.
    "short": Rows([2, 20], [4, 0], [[(2, 5)], [(17, 2), (20, 3), (20, 1)]]),
    # A decode alongside drafts and two prompts: a full chunk, and one token more.
    "mixed": Rows([1, 3, 64, 65], [4, 6, 0, 9], [[(1, 5)], [(2, 7), (3, 6)], [(64, 1)], [(64, 10), (65, 9)]]),
}
"""More passes, for kernels with several paths."""


class Net(NamedTuple):
    """A delta net's pass."""

    inputs: Projected
    weights: DeltaWeights
    plan: StatePlan
    states: Tensor


def make_net(
    rows: Rows,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    is_kimi: bool = False,
) -> Net:
    """Random pass of a net of (key heads, value heads, elements of a key, elements of a value), of Kimi Delta Attention
    if `is_kimi`."""
    key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(rows.lens) + key_dim)
    channels, size, count = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim, sum(rows.lens)
    decays = heads * key_dim if is_kimi else heads
    wide = torch.randn(count, channels + size + heads + decays + 3, generator=generator).to(device, dtype)
    inputs = Projected(*wide[:, 3:].split([channels, size, heads, decays], 1))
    rate, bias, norm = (torch.rand(n, generator=generator).to(device) for n in (heads, decays, value_dim))
    states = torch.randn(NUM_SLOTS, heads, key_dim, value_dim, generator=generator).to(device)
    states[0] = 0
    weights = DeltaWeights(2 * rate, bias, prepare(norm, 1e-6), key_heads, sigmoid_gate=is_kimi)
    return Net(inputs, weights, rows.plan(3, device), states)


def net_definition(net: Net, rows: Rows) -> tuple[Tensor, Tensor]:
    """Results [T, H · V] and all states after the pass, in float64."""
    inputs, weights = Projected(*(part.double() for part in net.inputs)), net.weights
    before, after = net.states.double(), net.states.double()
    _, heads, key_dim, value_dim = before.shape
    query, key, value = inputs.mixed.split([weights.key_heads * key_dim] * 2 + [heads * value_dim], 1)
    query, key = (
        part.unflatten(1, (-1, key_dim)).repeat_interleave(heads // weights.key_heads, 1) for part in (query, key)
    )
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    logits = (inputs.decay + weights.rate_bias.double()).unflatten(1, (heads, -1))
    decay = (-weights.rate.double()[:, None] * torch.log1p(logits.exp())).exp()  # [T, H, 1] or [T, H, D]
    beta, value = inputs.beta.sigmoid(), value.unflatten(1, (heads, -1))
    out, token = torch.empty(len(query), heads, value_dim, dtype=torch.float64), 0
    for count, source, writes in zip(*rows, strict=True):
        state = before[source]
        for t in range(count):
            state = state * decay[token, ..., None]
            known = torch.einsum("hdv,hd->hv", state, key[token])
            delta = beta[token, :, None] * (value[token] - known)
            state = state + key[token, :, :, None] * delta[:, None]
            out[token] = torch.einsum("hdv,hd->hv", state, query[token]) * key_dim**-0.5
            token += 1
            for offset, slot in writes:
                if offset == t + 1:
                    after[slot] = state
    scale = weights.norm.scale.double() * value_dim**-0.5
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    gate = inputs.gate.view(out.shape)
    return (out * (1 if weights.sigmoid_gate else gate) * gate.sigmoid()).flatten(1), after


class Conv(NamedTuple):
    """A convolution's pass."""

    x: Tensor
    filters: Filters
    plan: StatePlan
    states: Tensor


def make_conv(
    rows: Rows, channels: int, kernel: int, dtype: torch.dtype, *, bias: bool, device: torch.device = CPU
) -> Conv:
    """Random pass."""
    generator = torch.Generator().manual_seed(sum(rows.lens) + channels)
    x = torch.randn(sum(rows.lens), channels + 5, generator=generator).to(device, dtype)[:, 5:]
    taps = torch.randn(kernel, channels, generator=generator).to(device)
    states = torch.randn(NUM_SLOTS, kernel - 1, channels, generator=generator).to(device, dtype)
    states[0] = 0
    return Conv(x, Filters(taps, taps[0] * 2 if bias else None), rows.plan(kernel - 1, device), states)


def conv_definition(conv: Conv, rows: Rows, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Results [T, C] in float64, and all states after the pass in their dtype."""
    taps, after, results, token = conv.filters.taps.double(), conv.states.clone(), [], 0
    size = len(taps) - 1
    for count, source, writes in zip(*rows, strict=True):
        inputs = torch.cat((conv.states[source], conv.x[token : token + count]))
        for t in range(count):
            y = (inputs[t : t + size + 1].double() * taps).sum(0)
            y = y if conv.filters.bias is None else y + conv.filters.bias.double()
            results.append(y * y.sigmoid() if silu else y)
        for offset, slot in writes:
            after[slot] = inputs[offset : offset + size]
        token += count
    return torch.stack(results), after
