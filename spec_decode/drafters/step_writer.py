"""Writes what a drafter keeps of the target's hidden states, in the same blocks as the target's KV.

A drafter may lag: while no drafts are requested, and for tokens from the prefix cache. But the target's hidden states
exist only in the step that computes them. So what the drafter keeps of every position is written after each step, to
further layers of the shared block table: valid wherever the target's own KV is, even after prefix-cache hits and
preemption.

Steps after which nothing is drafted are deferred, and written together: one launch of each kernel for up to 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.device_outcome import device_places
from ...kernels.staging import upload
from ...models.batch import AdapterPreparer
from ...platform.core.request import Status
from ...platform.core.speculative_config import MAX_DRAFTS
from .base import DraftRow, no_adapters

_MOST_DEFERRED = 128
"""Maximum of deferred tokens: their hidden states take 3 MB on a model of hidden size 4096 in bfloat16, and one
product for them takes less than a step."""


class Places(NamedTuple):
    """Where the states of T tokens are kept."""

    slots: Tensor
    """[T] int64, all different."""
    positions: Tensor
    """[T] int64"""
    end: int
    """An upper bound of the positions."""


Write = Callable[[Sequence[Tensor], Any, Places], Tensor]
"""Function that writes what is kept of hidden states [T, H] each, with their tokens' adapters, and returns it."""


class StepWriter:
    """Calls `write` for the tokens of each step, at once or later."""

    def __init__(self, write: Write, device: torch.device, *, adapts: bool) -> None:
        """`adapts`: adapters have a part in what is kept."""
        self._write_states = write
        self._device = device
        self._adapts = adapts
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._block_size = 0
        self._deferred: list[tuple[Tensor, ...]] = []  # hidden states of steps that are not written yet
        self._deferred_rows: list[tuple[Any, int]] = []  # adapter and number of tokens of their rows
        self._deferred_slots: dict[int, None] = {}  # slot of each of their tokens, in their order
        self._deferred_spans: list[range] = []  # positions of their rows

    def bind(self, block_size: int, prepare_adapters: AdapterPreparer) -> None:
        """Set the size of the cache's blocks."""
        self._block_size = block_size
        self._prepare_adapters = prepare_adapters

    def write(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: Tensor | None) -> Tensor:
        """Write the hidden states [T, H] of all T tokens of a step. What is kept of rejected drafts is overwritten by
        the next steps.

        Args:
            rows: all B rows of the step.
            states: not changed.
            overshoot: see `DeviceStep`.

        Returns:
            The result of the function `write`.
        """
        self.flush()
        counts = _counts(rows, len(states[0]))
        if overshoot is None:
            places = self._uploaded(self._known_slots(rows, counts), _spans(rows, counts))
        else:
            starts = [row.start for row in rows]
            there = device_places(
                *([row.block_table for row in rows], starts, counts, self._block_size),
                *(overshoot, MAX_DRAFTS, self._device),
            )
            places = Places(*there, max(start + count for start, count in zip(starts, counts, strict=True)))
        return self._write(states, _adapter_rows(rows, counts), places)

    def defer(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], overshoot: Tensor | None) -> None:
        """`write` for a step whose states are not read now. It may be deferred until `write` or `flush`, if its slots
        are known, and while all requests run: adapters of others may leave the device. Draft weights that are gone
        nevertheless, as after an abort, take no part, which costs acceptance."""
        num_tokens = len(states[0])
        counts = _counts(rows, num_tokens)
        ends = any(row.request.adapter is not None and row.request.status is Status.FINISHED for row in rows)
        if ends or overshoot is not None or num_tokens >= _MOST_DEFERRED:
            self.write(rows, states, overshoot)
            return
        slots = self._known_slots(rows, counts)
        if len(self._deferred_slots) + num_tokens > _MOST_DEFERRED or not self._deferred_slots.keys().isdisjoint(slots):
            self.flush()  # a slot is written once in a product: of two writes either may be the last
        self._deferred.append(tuple(state.clone() for state in states))  # the next step may be written over them
        self._deferred_rows += _adapter_rows(rows, counts)
        self._deferred_slots.update(dict.fromkeys(slots))
        self._deferred_spans += _spans(rows, counts)

    def flush(self) -> None:
        """Write deferred states."""
        if not self._deferred:
            return
        deferred = self._deferred
        states = deferred[0] if len(deferred) == 1 else tuple(map(torch.cat, zip(*deferred, strict=True)))
        self._write(states, self._deferred_rows, self._uploaded(self._deferred_slots, self._deferred_spans))
        # Not before: their tokens' KV counts as valid.
        self._deferred, self._deferred_rows, self._deferred_slots, self._deferred_spans = [], [], {}, []

    def _known_slots(self, rows: Sequence[DraftRow], counts: Sequence[int]) -> list[int]:
        """Slot of each token."""
        size, slots = self._block_size, []
        for row, count in zip(rows, counts, strict=True):
            table = row.block_table
            slots += [table[at // size] * size + at % size for at in range(row.start, row.start + count)]
        return slots

    def _uploaded(self, slots: Collection[int], spans: Sequence[range]) -> Places:
        positions = np.fromiter(chain.from_iterable(spans), np.int64, len(slots))
        there = upload(self._device, np.fromiter(slots, np.int64, len(slots)), positions)
        return Places(there[0], there[1], max(span.stop for span in spans))

    def _write(self, states: Sequence[Tensor], rows: list[tuple[Any, int]], places: Places) -> Tensor:
        adapts = self._adapts and any(adapter is not None for adapter, _ in rows)
        return self._write_states(states, self._prepare_adapters(rows) if adapts else None, places)


def _adapter_rows(rows: Sequence[DraftRow], counts: Sequence[int]) -> list[tuple[Any, int]]:
    """Adapter and number of tokens of each row."""
    return [(row.request.adapter, count) for row, count in zip(rows, counts, strict=True)]


def _spans(rows: Sequence[DraftRow], counts: Sequence[int]) -> list[range]:
    """Positions of each row's tokens."""
    return [range(row.start, row.start + count) for row, count in zip(rows, counts, strict=True)]


def _counts(rows: Sequence[DraftRow], num_tokens: int) -> list[int]:
    """Numbers of tokens of all rows of a step of `num_tokens`."""
    ends = [row.first_index for row in rows[1:]] + [num_tokens]
    return [end - row.first_index for row, end in zip(rows, ends, strict=True)]
