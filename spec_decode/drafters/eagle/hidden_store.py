"""Keeps the target's hidden states for drafters that read them, beside the KV they belong to.

A drafter may lag: while nobody asks it for drafts, and for what the prefix cache had. But the target's hidden states
are there only in the step that computes them. So those of every position are kept, as one more layer of the shared
block table: valid wherever the target's own KV is, after prefix-cache hits and preemption too.

    step: hidden states [T, H] --append--> pending (`pending_states`) --flush--> fuse --> cache[slots]

Fusing is left for later: it costs a product, and a step without drafts should cost nothing. States of requests that
have gone meanwhile are dropped, unless the prefix cache may have their blocks: these may outlive the requests and
their adapters, and are written before an adapter goes (`adapter_leaves`). A block may be freed and reused while entries
wait: the last one to a slot wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import device_slots
from ....kernels.staging import to_device
from ....models.batch import KVLayerSpec, LayerKV
from ....platform.core.speculative_config import MAX_DRAFTS
from ..base import AdapterPreparer, DeviceStep, DraftRow, no_adapters
from .pending_states import PendingStates, placement, slots_of

_KEPT = 0.9
"""Share of the limit that goes on waiting when there is too much: the oldest are written, except those of requests that
have gone meanwhile."""

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""From hidden states [T, H] each, and their tokens' adapters, to the vectors that are kept: [T, width]."""


class HiddenStore:
    """One vector for each position of each sequence."""

    def __init__(self, width: int, fuse: Fuse, device: torch.device, *, adapts: bool, defers: bool = False) -> None:
        """`width` elements a vector, an even number. `adapts`: adapters have a part in `fuse`; `defers`:
        `adapter_leaves` will be called."""
        self._width = width
        self._fuse = fuse
        self._device = device
        self._adapts = adapts
        self._flushes_for_adapters = adapts and not defers
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._halves: tuple[Tensor, Tensor] | None = None
        self._block_size = 0
        self._pending = PendingStates()

    @property
    def spec(self) -> KVLayerSpec:
        """The layer that it asks of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2, is_attention=False)

    @property
    def num_pending(self) -> int:
        """Tokens whose hidden states wait."""
        return self._pending.num_tokens

    def bind(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Take its layer of the cache."""
        self._block_size = kv.k.shape[2]
        self._halves = (kv.k.view(-1, self._width // 2), kv.v.view(-1, self._width // 2))
        self._prepare_adapters = prepare_adapters

    def append(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...]) -> None:
        """Take the hidden states [T, H] of a step; of `rows` all positions that count. Neither is changed
        afterwards."""
        if not rows:
            return
        pending = self._pending
        pending.add(rows, states)
        if self._flushes_for_adapters and any(
            row.request.adapter is not None and row.request.namespace is not None for row in rows
        ):
            self.flush()  # its blocks may outlive the request, and the request is what keeps its adapter
        elif pending.num_tokens > pending.most_tokens:
            self._flush_to(int(_KEPT * pending.most_tokens))

    def adapter_leaves(self, digest: bytes) -> None:
        """Write all that waits if an adapter with this content has a part in it: it is about to be gone."""
        if self._adapts and self._pending.uses(digest):
            self.flush()

    @torch.inference_mode()
    def write(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], step: DeviceStep) -> Tensor:
        """Write the hidden states [T, H] of all T tokens of a step at once. Which of its drafts are right is not known:
        the vectors of wrong ones are overwritten by the next steps.

        Returns:
            [T, width], as written.
        """
        self.flush()
        handles = [(row.request.adapter, row.num_valid - row.start) for row in rows]
        vectors = self._vectors(states, handles)
        starts, counts = [row.start for row in rows], [count for _, count in handles]
        tables = [row.block_table for row in rows]
        slots = device_slots(tables, starts, counts, self._block_size, step.overshoot, MAX_DRAFTS, self._device)
        self._put(slots, vectors)
        return vectors

    def slots(self, block_table: Sequence[int], start: int, end: int) -> list[int]:
        """[end - start] slots of positions [start, end) of a sequence."""
        return slots_of(block_table, start, end, self._block_size)

    def flush(self) -> None:
        """Write all that waits."""
        self._flush_to(0)

    def flush_and_read(self, slots: list[int]) -> Tensor:
        """[n, width] of `slots` [n], each of which holds a position that the target has computed."""
        written = self._flush_to(0)
        if written is not None and written[0] == slots:  # mostly these are the last step's, just written
            return written[1]
        assert self._halves is not None
        index = self._tensor(slots)
        return torch.cat([half.index_select(0, index) for half in self._halves], dim=-1)

    @torch.inference_mode()
    def _flush_to(self, num_left: int) -> tuple[list[int], Tensor] | None:
        """Write the oldest of what waits, until no more than `num_left` tokens do; returns the slots [n] and their
        vectors [n, width], if any were written."""
        steps = []
        while self._pending.num_tokens > num_left:
            steps.append(self._pending.pop())
        places, slots, handles = placement(steps, self._block_size)
        if not slots:
            return None
        parts = zip(*(step.states for step in steps), strict=True)
        states = steps[0].states if len(steps) == 1 else [torch.cat(part) for part in parts]
        if places != list(range(len(states[0]))):
            which = self._tensor(places)
            states = [state.index_select(0, which) for state in states]
        vectors = self._vectors(states, handles)
        if len(steps) > 1:
            unique, last = np.unique(slots[::-1], return_index=True)
            if len(unique) < len(slots):  # copying to one place twice has no defined order
                slots, vectors = unique.tolist(), vectors.index_select(0, self._tensor(len(slots) - 1 - last))
        self._put(self._tensor(slots), vectors)
        return slots, vectors

    def _vectors(self, states: Sequence[Tensor], handles: list[tuple[Any, int]]) -> Tensor:
        """[T, width]. Elements that are not finite become 0, as in the cache of attention: whoever gets the block next
        may not see them, but 0 · NaN is NaN."""
        adapters = None
        if self._adapts and any(adapter is not None for adapter, _ in handles):
            adapters = self._prepare_adapters(handles)
        return self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)

    def _put(self, slots: Tensor, vectors: Tensor) -> None:
        assert self._halves is not None
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)

    def _tensor(self, numbers: list[int] | np.ndarray) -> Tensor:
        return to_device(np.asarray(numbers, dtype=np.int64), self._device)
