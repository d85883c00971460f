"""Keeps the target's hidden states for drafters that read them, beside the KV they belong to.

A drafter may lag: while nobody asks it for drafts, and for tokens that the prefix cache had. But the target's hidden
states are there only in the step that computes them. So those of every position are fused and written after each step,
as one more layer of the shared block table: valid wherever the target's own KV is, after prefix-cache hits and
preemption too. For one EAGLE-3 head this costs one product more for each token, about 1% of a target with 24 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels.device_outcome import device_slots
from ....models.batch import AdapterPreparer, KVLayerSpec, LayerKV
from ....platform.core.speculative_config import MAX_DRAFTS
from ..base import DraftRow, no_adapters

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""From hidden states [T, H] each, and their tokens' adapters, to the vectors that are kept: [T, width]."""


class HiddenStore:
    """One vector for each position of each sequence."""

    def __init__(self, width: int, fuse: Fuse, device: torch.device, *, adapts: bool) -> None:
        """`width` elements a vector, an even number. `adapts`: adapters have a part in `fuse`."""
        self._width = width
        self._fuse = fuse
        self._device = device
        self._adapts = adapts
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._halves: tuple[Tensor, Tensor] | None = None
        self._block_size = 0

    @property
    def spec(self) -> KVLayerSpec:
        """The layer that it asks of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2, is_attention=False)

    def bind(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Take its layer of the cache."""
        self._block_size = kv.k.shape[2]
        self._halves = (kv.k.view(-1, self._width // 2), kv.v.view(-1, self._width // 2))
        self._prepare_adapters = prepare_adapters

    def write(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: Tensor | None) -> Tensor:
        """Write the hidden states [T, H] of all T tokens of a step. The vectors of rejected drafts are overwritten by
        the next steps.

        Args:
            rows: all B rows of the step.
            states: not changed.
            overshoot: see `DeviceStep`.

        Returns:
            [T, width], as written. Elements that are not finite are 0, as in the cache of attention: another request
            that gets the block next may not see them, but 0 · NaN is NaN.
        """
        ends = [row.first_index for row in rows[1:]] + [len(states[0])]
        counts = [end - row.first_index for row, end in zip(rows, ends, strict=True)]
        adapters = None
        if self._adapts and any(row.request.adapter is not None for row in rows):
            handles = [(row.request.adapter, count) for row, count in zip(rows, counts, strict=True)]
            adapters = self._prepare_adapters(handles)
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        slots = self._slots([row.block_table for row in rows], [row.start for row in rows], counts, overshoot)
        assert self._halves is not None, "bind comes first"
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)
        return vectors

    def read(self, block_tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[T, width] of B sequences' positions [start, start + count), which the target has computed."""
        assert self._halves is not None, "bind comes first"
        slots = self._slots(block_tables, starts, counts, None)
        return torch.cat([half.index_select(0, slots) for half in self._halves], dim=-1)

    def _slots(
        self,
        block_tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        overshoot: Tensor | None,
    ) -> Tensor:
        most = 0 if overshoot is None else MAX_DRAFTS
        return device_slots(block_tables, starts, counts, self._block_size, overshoot, most, self._device)
