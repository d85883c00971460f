"""Attention in C++ on a CPU: rows of any lengths in one call, keys read in place, the same bits in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ...kernels.paged_attention import LayerKV, NativeStep, Shape, is_native
from ...kernels.rope import Rotation
from ..batch import SequenceRows
from . import AttentionSpec

if TYPE_CHECKING:
    from ..layers.norm import RMSNorm


def _shape(spec: AttentionSpec) -> Shape:
    return Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim)


def serves(spec: AttentionSpec) -> bool:
    """True when there is a kernel for this model on this machine."""
    return is_native(_shape(spec), spec.dtype, spec.device)


class NativeAttention:
    """Backend that calls the C++ kernel. Implements AttentionBackend."""

    looks_up_angles = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._shape = _shape(spec)
        self._dtype = spec.dtype
        self._options = spec.options

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> NativeStep:
        """See AttentionBackend."""
        ragged = rows.query_lens, rows.starts, rows.block_tables
        return NativeStep(self._shape, self._dtype, block_size, *ragged, rows.first_key, self._options)

    def forward_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norm: RMSNorm | None,
        kv: LayerKV,
        plan: NativeStep,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend."""
        return plan.attend_qkv(qkv, rotation, norm.weight if norm is not None else None, kv, window, sinks)
