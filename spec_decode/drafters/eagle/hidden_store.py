"""Keeps the target's hidden states for drafters that read them, in the same blocks as their KV.

A drafter may lag: while no drafts are requested, and for tokens from the prefix cache. But the target's hidden states
exist only in the step that computes them. So those of every position are fused and written after each step, as an
additional layer of the shared block table: valid wherever the target's own KV is, even after prefix-cache hits and
preemption. For one EAGLE-3 head this costs one more product for each token, about 1% of a target with 24 layers.

Steps after which nothing is drafted are deferred, and written together: one launch of each kernel for up to 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import device_slots
from ....kernels.staging import to_device
from ....models.batch import AdapterPreparer, KVLayerSpec, LayerKV
from ....platform.core.request import Status
from ....platform.core.speculative_config import MAX_DRAFTS
from ..base import DraftRow, no_adapters

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""Function from hidden states [T, H] each, and their tokens' adapters, to the stored vectors [T, width]."""
_MOST_DEFERRED = 128
"""Maximum of deferred tokens: their hidden states take 3 MB on a model of hidden size 4096 in bfloat16, and one
product for them takes less than a step."""


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
        self._deferred: list[tuple[Tensor, ...]] = []  # hidden states of steps that are not written yet
        self._deferred_rows: list[tuple[Any, int]] = []  # adapter and number of tokens of their rows
        self._deferred_slots: dict[int, None] = {}  # slot of each of their tokens, in their order

    @property
    def spec(self) -> KVLayerSpec:
        """Its layer of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2, is_attention=False)

    def bind(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Set its layer of the cache."""
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
            [T, width], as written. Elements that are not finite are 0, as in the cache of attention: the next request
            to use the block does not attend to them, but 0 · NaN is NaN.
        """
        self.flush()
        counts = _counts(rows, len(states[0]))
        if overshoot is None:
            slots = to_device(np.array(self._known_slots(rows, counts), dtype=np.int64), self._device)
        else:
            slots = self._slots([row.block_table for row in rows], [row.start for row in rows], counts, overshoot)
        return self._write(states, _adapter_rows(rows, counts), slots)

    def defer(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: Tensor | None) -> None:
        """`write` for a step whose vectors are not read now. It may be deferred until `read`, `write` or `flush`, if
        its slots are known, and while all requests run: adapters of others may leave the device. Draft weights that
        are gone nevertheless, as after an abort, take no part, which costs acceptance."""
        num_tokens = len(states[0])
        counts = _counts(rows, num_tokens)
        ends = any(row.request.adapter is not None and row.request.status is Status.FINISHED for row in rows)
        if ends or overshoot is not None or num_tokens >= _MOST_DEFERRED:
            self.write(rows, states, overshoot)
            return
        slots = self._known_slots(rows, counts)
        pending = self._deferred_slots
        if len(pending) + num_tokens > _MOST_DEFERRED or any(slot in pending for slot in slots):
            self.flush()  # a slot is written once in a product: of two writes either may be the last
        self._deferred.append(tuple(state.clone() for state in states))  # the next step may be written over them
        self._deferred_rows += _adapter_rows(rows, counts)
        self._deferred_slots.update(dict.fromkeys(slots))

    def flush(self) -> None:
        """Write deferred vectors."""
        if not self._deferred:
            return
        deferred, slots = self._deferred, np.fromiter(self._deferred_slots, dtype=np.int64)
        states = deferred[0] if len(deferred) == 1 else tuple(map(torch.cat, zip(*deferred, strict=True)))
        self._write(states, self._deferred_rows, to_device(slots, self._device))
        # Not before: their tokens' KV counts as valid.
        self._deferred, self._deferred_rows, self._deferred_slots = [], [], {}

    def _known_slots(self, rows: Sequence[DraftRow], counts: Sequence[int]) -> list[int]:
        size, slots = self._block_size, []
        for row, count in zip(rows, counts, strict=True):
            table = row.block_table
            slots += [table[at // size] * size + at % size for at in range(row.start, row.start + count)]
        return slots

    def _write(self, states: Sequence[Tensor], rows: list[tuple[Any, int]], slots: Tensor) -> Tensor:
        adapts = self._adapts and any(adapter is not None for adapter, _ in rows)
        adapters = self._prepare_adapters(rows) if adapts else None
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        assert self._halves is not None, "bind comes first"
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)
        return vectors

    def read(self, block_tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[T, width] of B sequences' positions [start, start + count), which the target has computed."""
        assert self._halves is not None, "bind comes first"
        self.flush()
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


def _adapter_rows(rows: Sequence[DraftRow], counts: Sequence[int]) -> list[tuple[Any, int]]:
    """Adapter and number of tokens of each row."""
    return [(row.request.adapter, count) for row, count in zip(rows, counts, strict=True)]


def _counts(rows: Sequence[DraftRow], num_tokens: int) -> list[int]:
    """Numbers of tokens of all rows of a step of `num_tokens`."""
    ends = [row.first_index for row in rows[1:]] + [num_tokens]
    return [end - row.first_index for row, end in zip(rows, ends, strict=True)]
