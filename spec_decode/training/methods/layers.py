"""The decoder layer of EAGLE heads in plain torch, unrolled over its own output, without padding.

B texts, C tokens of context of all texts, R roots of all texts, of which chains start; W, T most roots and most context
of a text, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.config import DecoderConfig
from ..target import Labels


class RMSNorm(nn.Module):
    """Norm: x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al. 2021), halves rotated as in Llama: x [..., T, D] at positions [..., T], which
    broadcast."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[..., None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Chains:
    """Texts of a batch in one row each of C and R, and the keys and values of one unroll.

    A chain starts at each root: an index so many before a label that it guesses it in one of the steps. Of a text, the
    context is what comes before its last label, and the roots are a part without gaps at its end.

    The first pair of keys and values, [B, kv heads, T, D], comes from the target's features. Entry j > 0,
    [B, kv heads, W, D], is what the chain from each root t computed in its step j, and only that chain sees it: it
    stands at position t + j, after the positions up to t of entry 0.
    """

    def __init__(self, labels: Labels, ids: Tensor, count: int) -> None:
        """Chains of `count` steps over ids [B, T]."""
        batch, device = len(ids), ids.device
        first = ids.new_full((batch,), ids.shape[1]).scatter_reduce(0, labels.rows, labels.positions, "amin")
        self._lengths = ids.new_zeros(batch).scatter_reduce(0, labels.rows, labels.positions, "amax")
        self._starts = (first - count).clamp(min=0).minimum(self._lengths)
        widths = self._lengths - self._starts
        self._ends, self._root_ends = self._lengths.cumsum(0), widths.cumsum(0)
        texts = torch.arange(batch, device=device)
        self.rows = texts.repeat_interleave(self._lengths)
        """[C] text of each token of context."""
        self.positions = torch.arange(len(self.rows), device=device) - (self._ends - self._lengths)[self.rows]
        """[C] its position."""
        self._root_rows = texts.repeat_interleave(widths)
        within = torch.arange(len(self._root_rows), device=device) - (self._root_ends - widths)[self._root_rows]
        self.root_positions = self._starts[self._root_rows] + within
        """[R]."""
        self.roots = (self._ends - self._lengths)[self._root_rows] + self.root_positions
        """[R] number of each root among the context."""
        self._sizes = batch, int(self._lengths.max()), max(1, int(widths.max()))
        self._slots = self.rows * self._sizes[1] + self.positions
        self._root_slots = self._root_rows * self._sizes[2] + within
        window = self._starts[:, None] + torch.arange(self._sizes[2], device=device)
        self.hidden_keys = torch.arange(self._sizes[1], device=device) > window[:, :, None]
        """[B, W, T] True for the context after each root, which it does not see."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [C, ...]."""
        return x[self.rows, self.positions]

    def ahead(self, step: int) -> Tensor:
        """[R] the token of context `step` after each root, or the text's last."""
        return torch.minimum(self.roots + step, self._ends[self._root_rows] - 1)

    def at_labels(self, labels: Labels, step: int) -> tuple[Tensor, Tensor]:
        """Numbers [M] among the roots of those that guess at labels in a step, and these labels [M]."""
        index = (labels.positions > step).nonzero(as_tuple=True)[0]
        rows = labels.rows[index]
        firsts = self._root_ends - (self._lengths - self._starts) - self._starts
        return firsts[rows] + labels.positions[index] - 1 - step, index

    def padded(self, x: Tensor, *, of_roots: bool) -> Tensor:
        """[R or C, heads, D] to [B, heads, W or T, D]."""
        batch, length, width = self._sizes
        slots, size = (self._root_slots, width) if of_roots else (self._slots, length)
        whole = x.new_zeros(batch * size, *x.shape[1:]).index_copy(0, slots, x)
        return whole.unflatten(0, (batch, size)).transpose(1, 2)

    def packed_roots(self, x: Tensor) -> Tensor:
        """[B, heads, W, D] to [R, heads · D]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self._root_slots).flatten(1)


class Columns:
    """Product with some of the inputs of several projections, which are built once for an unroll.

    Projections other than `nn.Linear` have a `base`, and an `added` [r, in] and [out, r] or None.
    """

    def __init__(self, modules: Sequence[Any], start: int, size: int) -> None:
        bases: list[nn.Linear] = [module if isinstance(module, nn.Linear) else module.base for module in modules]
        added: list[tuple[Tensor, Tensor] | None] = [
            None if isinstance(module, nn.Linear) else module.added for module in modules
        ]
        self._weight = torch.cat([base.weight[:, start : start + size] for base in bases])
        self._widths = [len(base.weight) for base in bases]
        self._added = [None if pair is None else (pair[0][:, start : start + size], pair[1]) for pair in added]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, size] to [N, out], the projections' outputs one after the other."""
        y = F.linear(x, self._weight)
        if not any(self._added):
            return y
        parts = [
            y.new_zeros(len(y), width) if pair is None else F.linear(F.linear(x, pair[0]), pair[1])
            for pair, width in zip(self._added, self._widths, strict=True)
        ]
        return y + torch.cat(parts, -1)


class ChainAttention(nn.Module):
    """Grouped-query attention of all chains at once, EAGLE-3's training-time test (arXiv:2503.01840, section 3)."""

    def __init__(self, layer: DecoderConfig, in_features: int) -> None:
        super().__init__()
        self._layer = layer
        heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(in_features, heads, bias=False)
        self.k_proj = nn.Linear(in_features, kv_heads, bias=False)
        self.v_proj = nn.Linear(in_features, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, layer.hidden_size, bias=False)

    def columns(self, start: int, size: int) -> Columns:
        """Product of q, k and v with some of their inputs."""
        return Columns((self.q_proj, self.k_proj, self.v_proj), start, size)

    def forward(self, qkv: Tensor, chains: Chains) -> Tensor:
        """Step `len(chains.keys)` of every chain, from the projections [C, ...], or [R, ...] after step 0, to [R, H];
        appends to `chains`."""
        layer, step = self._layer, len(chains.keys)
        positions = chains.root_positions + step if step else chains.positions
        heads = qkv.unflatten(-1, (-1, layer.head_dim))
        qk = rotate(heads[:, : layer.num_heads + layer.num_kv_heads], positions[:, None], layer.rope.theta)
        q, k = qk.split((layer.num_heads, layer.num_kv_heads), 1)
        chains.keys.append(chains.padded(k, of_roots=step > 0))
        chains.values.append(chains.padded(heads[:, -layer.num_kv_heads :], of_roots=step > 0))
        q = chains.padded(q if step else q[chains.roots], of_roots=True)
        if step == 0:
            grouped, mask = layer.num_heads != layer.num_kv_heads, ~chains.hidden_keys[:, None]
            out = F.scaled_dot_product_attention(
                q, chains.keys[0], chains.values[0], attn_mask=mask, enable_gqa=grouped
            )
        else:
            out = _attend_chains(q, chains, layer.num_heads // layer.num_kv_heads)
        return self.o_proj(chains.packed_roots(out))


def _attend_chains(q: Tensor, chains: Chains, group: int) -> Tensor:
    """q [B, heads, W, D] over entry 0 up to the chain's start, and over the chain's own later entries."""
    batch, num_heads, width, dim = q.shape
    keys, values = chains.keys, chains.values
    length = keys[0].shape[2]
    grouped = batch, num_heads // group, group, width
    folded = q.reshape(*grouped[:2], group * width, dim) * dim**-0.5
    scores = (folded @ keys[0].transpose(-1, -2)).float().unflatten(2, grouped[2:])  # [B, kv heads, group, W, T]
    scores = scores.masked_fill(chains.hidden_keys[:, None, None], float("-inf"))
    q = folded.unflatten(2, grouped[2:])
    own = torch.stack([(q * k[:, :, None]).sum(-1) for k in keys[1:]], dim=-1).float()
    weights = torch.cat((scores, own), dim=-1).softmax(-1).to(q.dtype)
    out = (weights[..., :length].flatten(2, 3) @ values[0]).unflatten(2, grouped[2:])
    for step, value in enumerate(values[1:]):
        out = out + weights[..., length + step, None] * value[:, :, None]
    return out.reshape(batch, num_heads, width, dim)


class MLP(nn.Module):
    """Gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, layer: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=False)
        self.up_proj = nn.Linear(layer.hidden_size, layer.intermediate_size, bias=False)
        self.down_proj = nn.Linear(layer.intermediate_size, layer.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
