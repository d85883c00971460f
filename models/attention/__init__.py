"""Attention over the paged KV cache, one backend a module.

Once a step a backend plans how the rows are computed (`plan`); then it computes them for every layer (`forward_qkv`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...kernels.dispatch import has_triton
from ...kernels.paged_attention import DEFAULT_OPTIONS, AttentionOptions, Shape

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from ...kernels.paged_attention import LayerKV, RowArrays, Window
    from ...kernels.paged_attention.schedule import Capacity
    from ...kernels.rope import Rotation
    from ..batch import SequenceRows
    from ..config import DecoderConfig
    from ..layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Properties of a model that a backend depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: frozenset[Window]
    """Windows and chunks of the layers."""
    dtype: torch.dtype
    device: torch.device
    options: AttentionOptions = DEFAULT_OPTIONS

    @property
    def shape(self) -> Shape:
        """Heads as kernels know them."""
        return Shape(self.num_heads, self.num_kv_heads, self.head_dim)


def attention_spec(config: DecoderConfig, device: torch.device) -> AttentionSpec:
    """Properties of a decoder's attention."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=frozenset(config.windows),
        dtype=config.dtype,
        device=device,
        options=AttentionOptions(
            config.attention_scale,
            config.attention_cap,
            config.rope.rotary_dim,
            config.rope.interleaved,
            config.latent is not None,
        ),
    )


class AttentionBackend(ABC):
    """Method of computing attention."""

    looks_up_angles = False
    """True when it takes rotations whose angles are not gathered."""

    @abstractmethod
    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> Any:
        """Plan for `rows` all that does not depend on the layer; `positions` [T] int64 are their tokens'."""

    def forward_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: RMSNorm | None,
        kv: LayerKV,
        plan: Any,
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalise, rotate, store and attend with a projection's output qkv [T, (H + 2 Hk) · D], which may be mutated.

        Queries and keys are normalised, if there is a `norm` for their H + Hk heads, and rotated before they are used.
        `sinks` [H] float32 are the heads' scores of a key without a value. With queries alone, qkv [T, H · D], the
        cache holds the tokens' keys and values already.
        """
        attended: Tensor = plan.attend_qkv(qkv, rotation, None if norm is None else norm.weight, kv, window, sinks)
        return attended


class ReplayablePlan(Protocol):
    """Plan whose tensors and launches stay the same for other rows."""

    def refill(self, rows: RowArrays) -> None:
        """Replace the rows for all later launches.

        Raises:
            ValueError: they do not fit.
        """

    def settle(self, overshoot: Tensor, positions: Tensor) -> None:
        """Move the rows `overshoot` [B] int64 positions back; `positions` [T] int64 of their tokens are mutated. The
        host does not wait for the device."""

    def advance(self, first: Tensor, left: Tensor, positions: Tensor, step: int) -> None:
        """Put rows of one query min(step, left) positions after their `first`, [R] int64 each; `positions` [R] int64 of
        their tokens are mutated. Rows whose `left` is smaller than `step` write no keys."""


@runtime_checkable
class ReplayableAttention(Protocol):
    """Backend whose launches can be captured in a graph. Its plans, also those of `plan`, are ReplayablePlans."""

    @property
    def max_queries(self) -> int:
        """Most queries in a short row."""

    def max_long_tiles(self, num_tokens: int) -> int:
        """Most tiles of long rows with `num_tokens` together."""

    def reserve(
        self, capacity: Capacity, block_size: int, first_key: int = 0, storage: Tensor | None = None
    ) -> ReplayablePlan:
        """Plan without rows. `storage` is int32 memory, shared with plans that never run at the same time.

        Raises:
            ValueError: rows of so many queries do not go, or the storage is too small.
        """


def make_attention(spec: AttentionSpec, *, batch_invariant: bool = False) -> AttentionBackend:
    """Fastest backend for this model on this device, batch-invariant if wanted."""
    return best_backend(spec, batch_invariant=batch_invariant)(spec)


def best_backend(spec: AttentionSpec, *, batch_invariant: bool = False) -> Callable[[AttentionSpec], AttentionBackend]:
    """Class of that backend."""
    from . import native, torch

    if native.serves(spec):
        return native.NativeAttention
    if spec.device.type == "cuda" and has_triton():
        from . import triton

        if triton.serves(spec):
            return triton.TritonInvariantAttention if batch_invariant else triton.TritonAttention
    return torch.InvariantAttention if batch_invariant else torch.TorchAttention
