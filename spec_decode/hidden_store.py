"""Keeps the target's hidden states for drafters that read them, beside the KV they belong to.

A drafter may lag: while nobody asks it for drafts, and for what the prefix cache had. But the target's hidden states
are there only in the step that computes them. So those of every position are kept, as one more layer of the shared
block table: valid wherever the target's own KV is, after prefix-cache hits and preemption too.

    step: hidden states [T, H] --append--> pending (references) --flush--> fuse --> cache[slots]

Fusing is left for later: it costs a product, and a step without drafts should cost nothing. What belongs to requests
that have gone meanwhile is dropped, unless the prefix cache may have their blocks. A block may be freed and reused
while entries wait: the last one to a slot wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.late import late_slots
from ..kernels.staging import to_device
from ..models.batch import KVLayerSpec, LayerKV
from ..platform.core.batch import RowPlan
from ..platform.core.request import Request, Status
from .proposer import AdapterPreparer, DraftRow, no_adapters

MAX_PENDING = 8192
"""Tokens whose hidden states may wait..."""
MAX_PENDING_BYTES = 32 << 20
"""...and the memory that they may hold, beyond those of one step."""
_KEPT = 0.9
"""Share of that which goes on waiting when there is too much: the oldest are written, those of requests that have gone
meanwhile are not."""

_FEW = 16

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""From hidden states [T, H_target] each, and their tokens' adapters, to what is kept of them: [T, width]."""


class _Step(NamedTuple):
    """One step's hidden states, as they came."""

    rows: Sequence[DraftRow | RowPlan]
    """Plans of steps all of whose positions count."""
    tables: list[list[int]]
    """Of each row. Block tables in use only grow, and one that was given back is a list that nobody changes: they still
    say where these positions lie."""
    states: tuple[Tensor, ...]
    """[T, H_target] each."""

    @property
    def requests(self) -> Iterator[Request]:
        """Of each row."""
        return (row.request for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The new positions of some rows of one step."""

    states: tuple[Tensor, ...]
    """[T, H_target] each, of the whole step."""
    index: np.ndarray
    """[n] which of the T..."""
    slots: np.ndarray
    """[n] ...and where they go."""
    handles: list[tuple[Any, int]]
    """(adapter, number of tokens) of each row."""

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
        self._pending: deque[_Step] = deque()
        self._num_pending = 0
        self._most_pending = 0  # known with the first states

    @property
    def spec(self) -> KVLayerSpec:
        """The layer that it asks of the cache: half of the vector as a key, half as a value."""
        return KVLayerSpec(1, self._width // 2, is_attention=False)

    def bind(self, kv: LayerKV, prepare_adapters: AdapterPreparer) -> None:
        """Its layer of the cache."""
        self._block_size = kv.k.shape[2]
        self._halves = (kv.k.view(-1, self._width // 2), kv.v.view(-1, self._width // 2))
        self._prepare_adapters = prepare_adapters

    def append(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...]) -> None:
        """Take the hidden states [T, H_target] of a step; of `rows` all positions that count. Neither is changed
        afterwards."""
        self._append(rows, [row.block_table for row in rows], states)

    def append_planned(self, rows: Sequence[RowPlan], states: tuple[Tensor, ...]) -> None:
        """`append` of a step that verified no drafts."""
        self._append(rows, [row.request.blocks for row in rows], states)

    def _append(self, rows: Sequence[DraftRow | RowPlan], tables: list[list[int]], states: tuple[Tensor, ...]) -> None:
        if not rows:
            return
        while self._pending and all(map(_has_gone, self._pending[0].requests, self._pending[0].tables)):
            self._num_pending -= len(self._pending.popleft().states[0])  # its memory is warm
        self._pending.append(_Step(rows, tables, states))
        self._num_pending += len(states[0])
        if self._adapts and any(row.request.adapter is not None and row.request.namespace is not None for row in rows):
            self.flush()  # its blocks may outlive the request, and the request is what keeps its adapter
            return
        if self._num_pending > self._most_pending:
            self._most_pending = min(MAX_PENDING, MAX_PENDING_BYTES // self._bytes_per_token(states))
            self._flush_to(int(_KEPT * self._most_pending))

    @torch.inference_mode()
    def keep(
        self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: tuple[Tensor | None, int]
    ) -> Tensor:
        """Write the hidden states [T, H_target] of all T tokens of a step at once: the host, which takes all its drafts
        to be valid, does not know which are right, and the others' are overwritten by the next steps.

        Args:
            overshoot: see `late_slots`.

        Returns:
            [T, width], what was written.
        """
        self.flush()
        handles = [(row.request.adapter, row.num_valid - row.start) for row in rows]
        adapters = None
        if self._adapts and any(adapter is not None for adapter, _ in handles):
            adapters = self._prepare_adapters(handles)
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        starts, counts = [row.start for row in rows], [count for _, count in handles]
        tables = [row.block_table for row in rows]
        slots = late_slots(tables, starts, counts, self._block_size, overshoot, self._device)
        self._put(slots, vectors)
        return vectors

    def slots(self, block_table: Sequence[int], start: int, end: int) -> np.ndarray:
        """[end - start] int64: where positions [start, end) of a sequence lie."""
        first = start // self._block_size
        blocks = np.array(block_table[first : -(-end // self._block_size)], dtype=np.int64)
        block, offset = np.divmod(np.arange(start, end), self._block_size)
        return blocks[block - first] * self._block_size + offset

    def flush(self) -> None:
        """Write all that waits."""
        self._flush_to(0)

    @torch.inference_mode()
    def _flush_to(self, num_left: int) -> None:
        """Write the oldest of what waits, until no more than `num_left` tokens do."""
        steps = []
        while self._num_pending > num_left:
            steps.append(self._pending.popleft())
            self._num_pending -= len(steps[-1].states[0])
        entries = [entry for entry in map(self._entry, steps) if entry is not None]
        handles = [handle for entry in entries for handle in entry.handles]
        adapters = None
        if self._adapts and any(adapter is not None for adapter, _ in handles):
            adapters = self._prepare_adapters(handles)
        if entries:
            self._write(entries, adapters)

    def _entry(self, step: _Step) -> _Entry | None:
        """What is to be written of a step."""
        size = self._block_size
        index: list[int] = []
        slots: list[int] = []
        handles = []
        first = 0
        for row, table in zip(step.rows, step.tables, strict=True):
            at, start = first, row.start
            if isinstance(row, DraftRow):
                at, end = row.first_index, row.num_valid
            else:
                end = row.end
                first += row.num_tokens
            if _has_gone(row.request, table):
                continue
            handles.append((row.request.adapter, end - start))
            index.extend(range(at, at + end - start))
            if end - start > _FEW:
                slots.extend(self.slots(table, start, end).tolist())
            else:  # an array would take longer to make than to use
                slots.extend([table[at // size] * size + at % size for at in range(start, end)])
        if not index:
            return None
        return _Entry(step.states, np.array(index, dtype=np.int64), np.array(slots, dtype=np.int64), handles)

    def read(self, slots: np.ndarray) -> Tensor:
        """[n, width] of `slots` [n], each of which holds a position that the target has computed."""
        assert self._halves is not None
        assert not self._pending, "read before flush"
        index = self._tensor(slots)
        return torch.cat([half.index_select(0, index) for half in self._halves], dim=-1)

    def _write(self, entries: list[_Entry], adapters: Any) -> None:
        picked = [
            [state if whole else state.index_select(0, index) for state in entry.states]
            for entry, index, whole in ((entry, self._tensor(entry.index), entry.is_whole) for entry in entries)
        ]
        states = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*picked, strict=True)]
        # What is not finite becomes 0, as in the cache of attention: whoever gets the block next may not see it, but
        # 0 · NaN is NaN.
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        slots = np.concatenate([entry.slots for entry in entries])
        if len(entries) > 1:
            unique, last = np.unique(slots[::-1], return_index=True)
            if len(unique) < len(slots):  # copying to one place twice has no defined order
                slots, vectors = unique, vectors.index_select(0, self._tensor(len(slots) - 1 - last))
        self._put(self._tensor(slots), vectors)

    def _put(self, slots: Tensor, vectors: Tensor) -> None:
        assert self._halves is not None
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)

    @staticmethod
    def _bytes_per_token(states: tuple[Tensor, ...]) -> int:
        return len(states) * states[0].shape[-1] * states[0].element_size()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def _has_gone(request: Request, table: list[int]) -> bool:
    """Whether nobody will read what a row with this block table computed: the request has finished or was preempted,
    and its blocks are not shared."""
    if request.namespace is not None:
        return False
    if request.status is Status.FINISHED:
        return True
    return request.num_preemptions > 0 and request.blocks is not table
