"""The decoder layer of EAGLE heads in plain torch, unrolled over its own output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....models.config import DecoderConfig


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
    """Rotary embedding (Su et al. 2021), halves rotated as in Llama: x [B, heads, T, D] at positions [B or 1, T]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None, :, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass(slots=True)
class ChainKV:
    """Keys and values of one unroll.

    The first pair, [B, kv heads, T, D], comes from the target's features. Entry j > 0, [B, kv heads, W, D], is what the
    chain from each root t computed in its step j, and only that chain sees it: it stands at position t + j, after the
    positions up to t of entry 0.
    """

    roots: Tensor
    """[B, W] where the chains start that go beyond step 0."""
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class ChainAttention(nn.Module):
    """Grouped-query attention of T chains at once (the training-time test of EAGLE-3, arXiv:2503.01840, section 3)."""

    def __init__(self, layer: DecoderConfig, in_features: int) -> None:
        super().__init__()
        self._layer = layer
        heads, kv_heads = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(in_features, heads, bias=False)
        self.k_proj = nn.Linear(in_features, kv_heads, bias=False)
        self.v_proj = nn.Linear(in_features, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, layer.hidden_size, bias=False)

    def forward(self, x: Tensor, kv: ChainKV) -> Tensor:
        """Step `len(kv.keys)` of every chain, [B, T, in] to [B, T, H], or W for T after step 0; appends to `kv`."""
        layer, step = self._layer, len(kv.keys)
        positions = kv.roots + step if step else torch.arange(x.shape[1], device=x.device)[None]

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), positions, layer.rope.theta)
        kv.keys.append(rotate(heads(self.k_proj(x)), positions, layer.rope.theta))
        kv.values.append(heads(self.v_proj(x)))
        if step == 0:
            grouped = layer.num_heads != layer.num_kv_heads
            out = F.scaled_dot_product_attention(q, kv.keys[0], kv.values[0], is_causal=True, enable_gqa=grouped)
        else:
            out = _attend_chains(q, kv, layer.num_heads // layer.num_kv_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend_chains(q: Tensor, kv: ChainKV, group: int) -> Tensor:
    """q [B, heads, W, D] over entry 0 up to the chain's start, and over the chain's own later entries."""
    batch, num_heads, width, dim = q.shape
    length = kv.keys[0].shape[2]
    q = q.view(batch, num_heads // group, group, width, dim) * dim**-0.5
    scores = (q @ kv.keys[0][:, :, None].transpose(-1, -2)).float()  # [B, kv heads, group, W, T]
    future = torch.arange(length, device=q.device) > kv.roots[:, :, None]
    scores = scores.masked_fill(future[:, None, None], float("-inf"))
    own = torch.stack([(q * k[:, :, None]).sum(-1) for k in kv.keys[1:]], dim=-1).float()
    weights = torch.cat((scores, own), dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ kv.values[0][:, :, None]
    for step, value in enumerate(kv.values[1:]):
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
