"""Attention backends by their names, and attention of queries and keys that are not rotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.paged_attention import Chunks, LayerKV, WholeRow, Window
from outrider.kernels.rope import Rotation
from outrider.models.attention import AttentionBackend, AttentionSpec
from outrider.models.attention.native import NativeAttention
from outrider.models.attention.torch import InvariantAttention, TorchAttention

CPU_BACKENDS = {"torch": TorchAttention, "invariant": InvariantAttention, "native": NativeAttention}


def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`."""
    if name != "triton":
        return CPU_BACKENDS[name](spec)
    from outrider.models.attention.triton import TritonAttention

    return TritonAttention(spec)


def unrotated(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Rotation]:
    """q [T, H, D], k and v [T, Hk, D] as a projection's output, and a rotation by no angle; v None: k is v too."""
    ones = torch.ones(len(q), 1, q.shape[2], dtype=q.dtype, device=q.device)
    parts = (q, k) if v is None else (q, k, v)
    return torch.cat(parts, 1).flatten(1), Rotation(ones, torch.zeros_like(ones))


def attend(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv: LayerKV,
    plan: Any,
    window: Window,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention without rotation and norm: [T, H · D]."""
    qkv, rotation = unrotated(q, k, v)
    return backend.forward_qkv(qkv, rotation, None, kv, plan, window, sinks)


def hidden_keys(positions: Tensor, num_keys: int, window: Window) -> Tensor:
    """[Q, K] True for keys that the queries at `positions` [Q, 1] do not see; the last key ends the row."""
    keys = torch.arange(num_keys)
    if isinstance(window, WholeRow):
        return torch.zeros(len(positions), num_keys, dtype=torch.bool)
    hidden = keys > positions
    return hidden if window is None else hidden | (keys < first_seen(positions, window))


def first_seen(positions: Tensor, window: int | Chunks) -> Tensor:
    """First position that queries see."""
    return positions - positions % window.size if isinstance(window, Chunks) else positions - window + 1


def attention_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [H, Q, K], with `sinks` [H] as scores of one key more."""
    if sinks is None:
        return scores.softmax(-1)
    block = sinks.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat((scores, block), -1).softmax(-1)[..., :-1]
