"""Keeps the target's hidden states for drafters that read them, beside the KV they belong to.

A drafter may lag: while nobody asks it for drafts, and for what the prefix cache had. But the target's hidden states
are there only in the step that computes them. So those of every position are kept, as one more layer of the shared
block table: valid wherever the target's own KV is, after prefix-cache hits and preemption too.

    step: hidden states [T, H] --append--> pending (references and slots) --flush--> fuse --> cache[slots]

Fusing is left for later: it costs a product, and a step without drafts should cost nothing. A block may be freed and
reused while entries wait, so they are written in order, the last one to a slot wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.batch import KVLayerSpec, LayerKV
from .proposer import AdapterPreparer, DraftRow, no_adapters

MAX_PENDING = 256
"""Tokens whose hidden states may wait: they are held in memory."""

_FEW = 16

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""From hidden states [T, H_target] each, and their tokens' adapters, to what is kept of them: [T, width]."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The new positions of one step."""

    states: tuple[Tensor, ...]
    """[T, H_target] each, of the whole step."""
    index: np.ndarray
    """[n] which of the T..."""
    slots: np.ndarray
    """[n] ...and where they go. Taken when the entry was made: block tables change."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all tokens of the step, in order."""
        return np.array_equal(self.index, np.arange(len(self.states[0])))


class HiddenStore:
    """One vector for each position of each sequence."""

    def __init__(self, width: int, fuse: Fuse, device: torch.device, *, adapts: bool) -> None:
        """`width` elements a vector, an even number. `adapts`: whether adapters have a part in `fuse`."""
        self._width = width
        self._fuse = fuse
        self._device = device
        self._adapts = adapts
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._halves: tuple[Tensor, Tensor] | None = None
        self._block_size = 0
        self._pending: list[_Entry] = []
        self._num_pending = 0

    @property
    def spec(self) -> KVLayerSpec:
        """The layer that it asks of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2)

    def bind(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Its layer of the cache."""
        self._block_size = kv.k.shape[2]
        self._halves = (kv.k.view(-1, self._width // 2), kv.v.view(-1, self._width // 2))
        self._prepare_adapters = prepare_adapters

    def append(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...]) -> None:
        """Take the hidden states [T, H_target] of a step; of `rows` all positions that count."""
        if not rows:
            return
        index: list[int] = []
        slots: list[int] = []
        for row in rows:
            index.extend(range(row.first_index, row.first_index + row.num_valid - row.start))
            slots.extend(self._slots(row.block_table, row.start, row.num_valid))
        entry = _Entry(states, np.array(index, dtype=np.int64), np.array(slots, dtype=np.int64))
        if self._adapts and any(row.request.adapter is not None for row in rows):
            adapters = self._prepare_adapters([(row.request.adapter, row.num_valid - row.start) for row in rows])
            if adapters is not None:  # an adapter may be gone when its request is
                self.flush()
                self._write([entry], adapters)
                return
        self._pending.append(entry)
        self._num_pending += len(index)
        if self._num_pending > MAX_PENDING:
            self.flush()

    def slots(self, block_table: Sequence[int], start: int, end: int) -> np.ndarray:
        """[end - start] int64: where positions [start, end) of a sequence lie."""
        first = start // self._block_size
        blocks = np.array(block_table[first : -(-end // self._block_size)], dtype=np.int64)
        block, offset = np.divmod(np.arange(start, end), self._block_size)
        return blocks[block - first] * self._block_size + offset

    def _slots(self, block_table: Sequence[int], start: int, end: int) -> list[int]:
        """`slots`; for the few positions of a decode step an array would take longer to make than to use."""
        if end - start > _FEW:
            return self.slots(block_table, start, end).tolist()
        size = self._block_size
        return [block_table[position // size] * size + position % size for position in range(start, end)]

    def flush(self) -> None:
        """Write all that waits."""
        entries, self._pending, self._num_pending = self._pending, [], 0
        if len(entries) > 1:
            entries = _last_writes(entries)
        if entries:
            self._write(entries, None)

    def read(self, slots: np.ndarray) -> Tensor:
        """[n, width] of `slots` [n], each of which holds a position that the target has computed."""
        assert self._halves is not None
        assert not self._pending, "read before flush"
        index = self._tensor(slots)
        return torch.cat([half.index_select(0, index) for half in self._halves], dim=-1)

    def _write(self, entries: list[_Entry], adapters: Any) -> None:
        assert self._halves is not None
        picked = [
            [state if whole else state.index_select(0, index) for state in entry.states]
            for entry, index, whole in ((entry, self._tensor(entry.index), entry.is_whole) for entry in entries)
        ]
        states = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*picked, strict=True)]
        slots = self._tensor(np.concatenate([entry.slots for entry in entries]))
        # What is not finite becomes 0, as in the cache of attention: whoever gets the block next may not see it, but
        # 0 · NaN is NaN.
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _last_writes(entries: list[_Entry]) -> list[_Entry]:
    """`entries` without what later ones overwrite."""
    slots = np.concatenate([entry.slots for entry in entries])
    keep = np.zeros(len(slots), dtype=bool)
    keep[len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]] = True
    if keep.all():
        return entries
    ends = np.cumsum([len(entry.slots) for entry in entries])
    kept = []
    for entry, mask in zip(entries, np.split(keep, ends[:-1]), strict=True):
        if mask.any():
            kept.append(_Entry(entry.states, entry.index[mask], entry.slots[mask]))
    return kept
