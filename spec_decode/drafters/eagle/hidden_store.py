"""Keeps the target's hidden states for drafters that read them, beside the KV they belong to.

A drafter may lag: while nobody asks it for drafts, and for what the prefix cache had. But the target's hidden states
are there only in the step that computes them. So those of every position are kept, as one more layer of the shared
block table: valid wherever the target's own KV is, after prefix-cache hits and preemption too.

    step: hidden states [T, H] --append--> pending (`pending_states`) --flush--> fuse --> cache[slots]

Fusing is left for later: it costs a product, and a step without drafts should cost nothing. What belongs to requests
that have gone meanwhile is dropped, unless the prefix cache may have their blocks: these may outlive the requests and
their adapters, and are written before an adapter goes (`adapter_leaves`). A block may be freed and reused while entries
wait: the last one to a slot wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import device_slots
from ....kernels.staging import to_device
from ....models.batch import KVLayerSpec, LayerKV
from ....platform.core.batch import RowPlan
from ..base import AdapterPreparer, DraftRow, RestedSteps, no_adapters
from .pending_states import Bundle, PendingStates, PlacedStates, Step, slots_of
from .state_ring import Ring

_KEPT = 0.9
"""Share of what may wait that goes on waiting when there is too much: the oldest are written, those of requests that
have gone meanwhile are not."""

Fuse = Callable[[Sequence[Tensor], Any], Tensor]
"""From hidden states [T, H_target] each, and their tokens' adapters, to what is kept of them: [T, width]."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The new positions of some sequences in one or several steps."""

    states: tuple[Tensor, ...]
    """[T, H_target] each, of these steps."""
    index: np.ndarray
    """[n] which of the T..."""
    slots: np.ndarray
    """[n] ...and where they go."""
    handles: list[tuple[Any, int]]
    """(adapter, number of tokens), in the order of `index`."""
    may_repeat: bool
    """Whether a place may occur twice: of several steps, one may have got a block that another gave back."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all tokens of these steps, in order. Those of one step are in order."""
        count = len(self.states[0])
        return len(self.index) == count and (not self.may_repeat or np.array_equal(self.index, np.arange(count)))


class HiddenStore:
    """One vector for each position of each sequence."""

    def __init__(
        self,
        width: int,
        fuse: Fuse,
        device: torch.device,
        *,
        adapts: bool,
        defers: bool = False,
        ring: Ring | None = None,
    ) -> None:
        """`width` elements a vector, an even number. `adapts`: whether adapters have a part in `fuse`; `defers`:
        whether `adapter_leaves` will be called. `ring`: memory that the target may copy its hidden states into."""
        self._width = width
        self._fuse = fuse
        self._device = device
        self._adapts = adapts
        self._flushes_for_adapters = adapts and not defers
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._halves: tuple[Tensor, Tensor] | None = None
        self._block_size = 0
        self._pending = PendingStates(ring)

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
        """Take the hidden states [T, H_target] of a step; of `rows` all positions that count. The rows are not changed
        afterwards."""
        if rows:
            self._pending.add(rows, states)
            self._flush_for_adapters(rows)
            self._limit()

    def append_rested(self, spells: Sequence[RestedSteps], steps: Sequence[PlacedStates]) -> None:
        """`append` of steps that verified no drafts: the hidden states of each step of all `spells`."""
        self._pending.add_rested(spells, steps)
        for spell in spells:
            self._flush_for_adapters(spell.rows)
        self._limit()

    def append_passing(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...]) -> None:
        """`append` of states that are about to be read: the tensors are kept, and not changed afterwards."""
        if rows:
            self._pending.add(rows, states, passing=True)
            self._flush_for_adapters(rows)
            self._limit()

    def _flush_for_adapters(self, rows: Sequence[DraftRow | RowPlan]) -> None:
        if not self._flushes_for_adapters:
            return
        if any(row.request.adapter is not None and row.request.namespace is not None for row in rows):
            self.flush()  # its blocks may outlive the request, and the request is what keeps its adapter

    def adapter_leaves(self, digest: bytes) -> None:
        """Write all that waits if an adapter with this content has a part in it: it is about to be gone."""
        if self._adapts and self._pending.uses(digest):
            self.flush()

    def _limit(self) -> None:
        pending = self._pending
        if pending.num_tokens > pending.most_tokens:
            self._flush_to(int(_KEPT * pending.most_tokens))

    @torch.inference_mode()
    def keep(
        self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: tuple[Tensor | None, int]
    ) -> Tensor:
        """Write the hidden states [T, H_target] of all T tokens of a step at once: the host, which takes all its drafts
        to be valid, does not know which are right, and the others' are overwritten by the next steps.

        Args:
            overshoot: see `device_slots`.

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
        slots = device_slots(tables, starts, counts, self._block_size, overshoot, self._device)
        self._put(slots, vectors)
        return vectors

    def slots(self, block_table: Sequence[int], start: int, end: int) -> np.ndarray:
        """[end - start] int64: where positions [start, end) of a sequence lie."""
        return slots_of(block_table, start, end, self._block_size)

    def flush(self) -> None:
        """Write all that waits."""
        self._flush_to(0)

    def flush_and_read(self, slots: np.ndarray) -> Tensor:
        """`flush`, then `read`: mostly it is what was just written, of the last step."""
        written = self._flush_to(0)
        if written is not None and np.array_equal(written[0], slots):
            return written[1]
        return self.read(slots)

    @torch.inference_mode()
    def _flush_to(self, num_left: int) -> tuple[np.ndarray, Tensor] | None:
        """Write the oldest of what waits, until no more than `num_left` tokens do; returns the slots [n] and what was
        written there [n, width], if anything was."""
        entries = []
        while self._pending.num_tokens > num_left:
            entry = self._entry(self._pending.pop())
            if entry is not None:
                entries.append(entry)
        handles = [handle for entry in entries for handle in entry.handles]
        adapters = None
        if self._adapts and any(adapter is not None for adapter, _ in handles):
            adapters = self._prepare_adapters(handles)
        written = self._write(entries, adapters) if entries else None
        self._pending.popped()
        return written

    def _entry(self, steps: Step | Bundle) -> _Entry | None:
        """What is to be written of them."""
        pieces = list(steps.pieces(self._block_size))
        if not pieces:
            return None
        return _Entry(
            steps.states,
            _joined([piece.places for piece in pieces]),
            _joined([piece.slots for piece in pieces]),
            [(piece.adapter, len(piece.places)) for piece in pieces],
            isinstance(steps, Bundle),
        )

    def read(self, slots: np.ndarray) -> Tensor:
        """[n, width] of `slots` [n], each of which holds a position that the target has computed."""
        assert self._halves is not None
        assert not len(self._pending), "read before flush"
        index = self._tensor(slots)
        return torch.cat([half.index_select(0, index) for half in self._halves], dim=-1)

    def _write(self, entries: list[_Entry], adapters: Any) -> tuple[np.ndarray, Tensor]:
        picked = [entry.states if entry.is_whole else self._picked(entry) for entry in entries]
        states = picked[0] if len(picked) == 1 else [torch.cat(parts) for parts in zip(*picked, strict=True)]
        # What is not finite becomes 0, as in the cache of attention: whoever gets the block next may not see it, but
        # 0 · NaN is NaN.
        vectors = self._fuse(states, adapters).nan_to_num(0.0, 0.0, 0.0)
        slots = _joined([entry.slots for entry in entries])
        if len(entries) > 1 or entries[0].may_repeat:
            unique, last = np.unique(slots[::-1], return_index=True)
            if len(unique) < len(slots):  # copying to one place twice has no defined order
                slots, vectors = unique, vectors.index_select(0, self._tensor(len(slots) - 1 - last))
        self._put(self._tensor(slots), vectors)
        return slots, vectors

    def _picked(self, entry: _Entry) -> tuple[Tensor, ...]:
        index = self._tensor(entry.index)
        return tuple(state.index_select(0, index) for state in entry.states)

    def _put(self, slots: Tensor, vectors: Tensor) -> None:
        assert self._halves is not None
        for half, values in zip(self._halves, vectors.chunk(2, dim=-1), strict=True):
            half.index_copy_(0, slots, values)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One after another; the one there is, as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
