"""Attention in C++ on a CPU: rows of any lengths in one call, keys read in place, the same bits in any batch."""

from __future__ import annotations

import numpy as np

from ...kernels.paged_attention import NativeStep, is_native
from ..batch import SequenceRows
from . import AttentionBackend, AttentionSpec


def serves(spec: AttentionSpec) -> bool:
    """True when there is a kernel for this model on this machine."""
    return is_native(spec.shape, spec.dtype, spec.device)


class NativeAttention(AttentionBackend):
    """Backend that calls the C++ kernel."""

    looks_up_angles = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._options = spec.options

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> NativeStep:
        """See AttentionBackend."""
        ragged = rows.query_lens, rows.starts, rows.block_tables
        return NativeStep(self._shape, self._dtype, block_size, *ragged, rows.first_key, self._options)
