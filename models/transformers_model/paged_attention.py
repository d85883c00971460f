"""Attention function that transformers calls: keys and values go to the paged cache, and queries attend there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.rope import Rotation
from .rotation import NotedRotation

if TYPE_CHECKING:
    from ..attention import AttentionBackend
    from ..batch import ForwardBatch

NAME = "outrider_paged"
"""Name in transformers' `AttentionInterface`. It has no mask function, so models make no masks."""


class AttentionCall(NamedTuple):
    """Attention of one layer."""

    module: str
    """Name of the module that calls the interface."""
    window: int | None


class PassState:
    """Batch of the pass that is in flight: modules of transformers cannot be given one."""

    __slots__ = ("batch", "head_adapters", "noted")

    def __init__(self) -> None:
        self.batch: ForwardBatch = None  # type: ignore[assignment]  # set before every pass
        self.head_adapters: Any = None
        self.noted = NotedRotation()


class PagedLayer:
    """Attention of one layer over its cache."""

    def __init__(self, call: AttentionCall, index: int, backend: AttentionBackend, state: PassState) -> None:
        self._window = call.window
        self._index = index
        self._forward = backend.forward_qkv
        self._state = state

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        """Attend with query [1, H, T, D], key and value [1, Hk, T, D]; return [1, T, H, D]. They are rotated, unless
        the rotation was noted."""
        batch = self._state.batch
        rotation = self._state.noted.rotation or batch.rotations[0]
        _, _, tokens, dim = query.shape
        qkv = _merged(query, key, value)
        kv, sinks = batch.kv[self._index], options.get("s_aux")
        sinks = None if sinks is None else sinks.float()
        y = self._forward(qkv, rotation, None, kv, batch.attention, self._window, sinks)
        return y.view(1, tokens, -1, dim)


def _merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Heads [T, (H + 2 Hk) · D] side by side, as a copy unless they are parts of a product that has this form."""
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    width = (heads + 2 * kv_heads) * dim
    start, size = query.data_ptr(), dim * query.itemsize
    if (
        key.data_ptr() == start + heads * size
        and value.data_ptr() == start + (heads + kv_heads) * size
        and all(part.stride(1) == dim and part.stride(3) == 1 for part in (query, key, value))
        and (tokens == 1 or query.stride(2) == key.stride(2) == value.stride(2) == width)
    ):
        with suppress(RuntimeError):  # they are neighbours by chance
            return query.as_strided((tokens, width), (width, 1))
    return torch.cat((query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), 2).view(tokens, width)


class NoRotation:
    """Angles for a backend whose queries and keys come rotated: cosines are 1, sines 0. Implements Rope."""

    short_context: int | None = None

    def __init__(self, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._cos = torch.ones(1, 1, head_dim, dtype=dtype, device=device)
        self._sin = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)

    def rotations(
        self, positions: Tensor, end: int, in_long_prompt: Tensor | None = None, *, gathers: bool = True
    ) -> tuple[Rotation, ...]:
        """See RotaryEmbedding: one row for all tokens."""
        shape = (len(positions), 1, self._cos.shape[2])
        return (Rotation(self._cos.expand(shape), self._sin.expand(shape)),)


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function of the interface; `module.paged` is a `PagedLayer`, or records the call in the dry pass."""
    return module.paged(query, key, value, attention_mask, options), None


def register() -> None:
    """Make the function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
