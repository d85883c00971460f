"""Attention in Triton on a GPU: rows of any lengths in at most two launches and their reductions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from ...kernels.paged_attention import RowArrays
from ...kernels.paged_attention.device_step import DeviceStep
from ...kernels.paged_attention.prompt_trial import min_fused_tokens
from ...kernels.paged_attention.schedule import Capacity, Planner, describe_gpu, is_supported
from ...kernels.tuning import configs_of
from ..batch import SequenceRows
from . import AttentionBackend, AttentionSpec
from .tables import RowTables


def serves(spec: AttentionSpec) -> bool:
    """True when there are kernels for this model."""
    return is_supported(spec.shape, spec.dtype)


class TritonAttention(AttentionBackend):
    """Backend that launches the Triton kernels. Implements ReplayableAttention."""

    invariant = False
    """True when the bits of a query's result do not depend on the rest of a step."""

    def __init__(self, spec: AttentionSpec, num_splits: int | None = None) -> None:
        """Prepare launches; `num_splits` programs share a tile's keys, a power of two; None: chosen for the device."""
        self._spec = spec
        gpu = describe_gpu(spec.device)
        configs = configs_of(spec.device)
        planner = Planner(spec.shape, spec.dtype.itemsize, gpu, num_splits, configs, spec.options, self.invariant)
        self._planner = replace(planner, min_fused_tokens=min_fused_tokens(planner, spec.dtype, spec.device))

    def plan(self, rows: SequenceRows, positions: np.ndarray, block_size: int) -> DeviceStep:
        """See AttentionBackend."""
        return self._step(RowTables(rows, block_size).arrays(positions), block_size, rows.first_key)

    @property
    def max_queries(self) -> int:
        """See ReplayableAttention."""
        return self._planner.max_short_queries

    def max_long_tiles(self, num_tokens: int) -> int:
        """See ReplayableAttention."""
        return self._planner.max_long_tiles(num_tokens)

    def reserve(
        self, capacity: Capacity, block_size: int, first_key: int = 0, storage: Tensor | None = None
    ) -> DeviceStep:
        """See ReplayableAttention."""
        return self._step(capacity, block_size, first_key, storage)

    def _step(
        self, rows: RowArrays | Capacity, block_size: int, first_key: int, storage: Tensor | None = None
    ) -> DeviceStep:
        return DeviceStep(self._planner, self._spec.dtype, block_size, rows, self._spec.device, first_key, storage)


class TritonInvariantAttention(TritonAttention):
    """Batch-invariant backend: one kernel and one order of sums for decodes, verification rows and prompts."""

    invariant = True
