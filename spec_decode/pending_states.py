"""Hidden states of past steps that wait to be written: most never are, since nobody drafts before their requests end.

While nothing is drafted this is all that a step does for a drafter that reads hidden states, so it has to be cheap:

- Steps after which nobody was asked for drafts come some at once (`rests`), and stay one `Bundle`.
- On a CPU, states are copied into a `Ring`. Were their tensors kept, the memory that the next steps take would be other
  memory each time, whose pages are fresh. On a GPU a copy would cost a launch, and its allocator has no such trouble:
  there the tensors are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import memmove
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..platform.core.request import Request, Status
from .proposer import DraftRow, RestedSteps

MAX_PENDING = 8192
"""Tokens whose hidden states may wait..."""
MAX_PENDING_BYTES = 32 << 20
"""...and the memory that they may hold, beyond those of one step."""
_MAX_COPIED_BYTES = 1 << 20
"""At once: beyond that a copy is no trifle, and so much memory is not found in caches anyway."""
_FEW = 16


class Piece(NamedTuple):
    """The new positions of one sequence in one or several steps."""

    adapter: Any
    places: np.ndarray
    """[n] int64: which of the states..."""
    slots: np.ndarray
    """[n] int64: ...and where they go."""


class Step:
    """One step's hidden states, as they came."""

    __slots__ = ("place", "rows", "states")

    def __init__(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], place: int) -> None:
        """`states`: [T, H_target] each; `place`: in the ring, or -1 where the tensors themselves are kept."""
        self.rows = rows
        """Their block tables only grow while they are in use, and one that was given back is a list that nobody
        changes: they still say where these positions lie."""
        self.states = states
        self.place = place

    @property
    def num_tokens(self) -> int:
        """That it computed."""
        return self.states[0].shape[0]

    @property
    def has_gone(self) -> bool:
        """Whether nobody will read any of it."""
        return all(_has_gone(row.request, row.block_table) for row in self.rows)

    def pieces(self, block_size: int) -> Iterator[Piece]:
        """What is to be written."""
        for row in self.rows:
            count = row.num_valid - row.start
            if count > 0 and not _has_gone(row.request, row.block_table):
                index = np.arange(row.first_index, row.first_index + count)
                yield Piece(row.request.adapter, index, slots_of(row.block_table, row.start, row.num_valid, block_size))


class Bundle:
    """Steps after which nobody was asked for drafts, looked at together."""

    __slots__ = ("_spells", "place", "states")

    def __init__(self, spells: Sequence[RestedSteps], states: tuple[Tensor, ...], place: int) -> None:
        """`states`: [T, H_target] each, of all these steps; `place`: see `Step`."""
        self._spells = [(steps.rows, steps.tables, len(steps.targets)) for steps in spells]
        self.states = states
        self.place = place

    @property
    def num_tokens(self) -> int:
        """That these steps computed."""
        return self.states[0].shape[0]

    @property
    def has_gone(self) -> bool:
        """Whether nobody will read any of it."""
        return all(
            _has_gone(row.request, table)
            for rows, tables, _ in self._spells
            for row, table in zip(rows, tables, strict=True)
        )

    def pieces(self, block_size: int) -> Iterator[Piece]:
        """What is to be written."""
        first = 0
        for rows, tables, num_steps in self._spells:
            width, later = len(rows), first + sum(row.num_tokens for row in rows)  # where the second step begins
            end = later + (num_steps - 1) * width
            for column, (row, table) in enumerate(zip(rows, tables, strict=True)):
                if not _has_gone(row.request, table):
                    index = np.arange(first, first + row.num_tokens)
                    if num_steps > 1:
                        index = np.concatenate([index, np.arange(later + column, end, width)])
                    yield Piece(
                        row.request.adapter, index, slots_of(table, row.start, row.end + num_steps - 1, block_size)
                    )
                first += row.num_tokens
            first = end


class Ring:
    """Memory for hidden states on a CPU, taken and given back in the same order."""

    def __init__(self, like: tuple[Tensor, ...], num_tokens: int) -> None:
        """Room for `num_tokens` states of the kinds `like` [T, H] each."""
        self._parts = tuple(torch.empty(num_tokens, state.shape[1], dtype=state.dtype) for state in like)
        self._rows = [(part.data_ptr(), part.shape[1] * part.element_size()) for part in self._parts]
        self._size = num_tokens
        self._first = self._end = 0  # what is taken lies between, maybe around the end; none where they are equal

    def take(self, num_tokens: int) -> int:
        """A place for so many tokens, or -1: there is none."""
        first, end = self._first, self._end
        limit = self._size if end >= first else first - 1
        if end + num_tokens > limit:
            if end < first or num_tokens >= first:
                return -1
            end = 0  # what is left before the end of the memory stays unused
        self._end = end + num_tokens
        return end

    def put(self, place: int, num_tokens: int, steps: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy the states of some steps, T tokens in all, to a place that was taken for them."""
        if len(steps) > 1:
            for part, states in zip(self._parts, zip(*steps, strict=True), strict=True):
                torch.cat(states, out=part[place : place + num_tokens])
            return
        for (address, size), state in zip(self._rows, steps[0], strict=True):
            dense = state.contiguous()  # lives until it is copied
            memmove(address + place * size, dense.data_ptr(), num_tokens * size)

    def views(self, place: int, num_tokens: int) -> tuple[Tensor, ...]:
        """What lies there."""
        return tuple(part[place : place + num_tokens] for part in self._parts)

    def give_back(self, first: int) -> None:
        """All that was taken before the place `first` is free; -1: all."""
        if first < 0:
            self._first = self._end = 0
        else:
            self._first = first


class PendingStates:
    """What waits, oldest first."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.most_tokens = 0
        """That may wait; known with the first states."""
        self._queue: deque[Step | Bundle] = deque()
        self._ring: Ring | None = None
        self._most_copied = 0  # tokens at once

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], *, passing: bool = False) -> None:
        """The states [T, H_target] of a step. They may change afterwards, unless they are `passing`: about to be taken,
        and not worth a copy."""
        kept, place = self._kept([states], copies=not passing)
        self._queue.append(Step(rows, kept, place))

    def add_rested(self, spells: Sequence[RestedSteps], states: Sequence[tuple[Tensor, ...]]) -> None:
        """The states [T, H_target] of all `spells`' steps, one after another."""
        kept, place = self._kept(states)
        self._queue.append(Bundle(spells, kept, place))

    def _kept(self, steps: Sequence[tuple[Tensor, ...]], *, copies: bool = True) -> tuple[tuple[Tensor, ...], int]:
        """The states of some steps, one after another, and where in the ring they are if they are there."""
        self._drop_gone()
        if self.most_tokens == 0:
            self._begin(steps[0])
        num_tokens = sum([states[0].shape[0] for states in steps])
        self.num_tokens += num_tokens
        if self._ring is not None and copies and num_tokens <= self._most_copied:
            place = self._ring.take(num_tokens)
            if place >= 0:
                self._ring.put(place, num_tokens, steps)
                return self._ring.views(place, num_tokens), place
        return steps[0] if len(steps) == 1 else tuple(map(torch.cat, zip(*steps, strict=True))), -1

    def pop(self) -> Step | Bundle:
        """The oldest; its states stay as they are until `popped`."""
        oldest = self._queue.popleft()
        self.num_tokens -= oldest.num_tokens
        return oldest

    def popped(self) -> None:
        """What was popped is not needed any more."""
        if self._ring is not None:
            self._ring.give_back(next((entry.place for entry in self._queue if entry.place >= 0), -1))

    def _begin(self, states: tuple[Tensor, ...]) -> None:
        each = len(states) * states[0].shape[-1] * states[0].element_size()
        self.most_tokens = min(MAX_PENDING, MAX_PENDING_BYTES // each)
        self._most_copied = _MAX_COPIED_BYTES // each
        if states[0].is_cpu:
            self._ring = Ring(states, self.most_tokens)

    def _drop_gone(self) -> None:
        dropped = False
        while self._queue and self._queue[0].has_gone:
            self.pop()
            dropped = True
        if dropped:
            self.popped()


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> np.ndarray:
    """[end - start] int64: where positions [start, end) of a sequence lie."""
    if end - start <= _FEW:  # arrays would take longer to make than to use
        return np.array([table[at // block_size] * block_size + at % block_size for at in range(start, end)])
    first = start // block_size
    blocks = np.array(table[first : -(-end // block_size)], dtype=np.int64)
    block, offset = np.divmod(np.arange(start, end), block_size)
    return blocks[block - first] * block_size + offset


def _has_gone(request: Request, table: list[int]) -> bool:
    """Whether nobody will read what a row with this block table computed: the request has finished or was preempted,
    and its blocks are not shared."""
    if request.namespace is not None:
        return False
    if request.status is Status.FINISHED:
        return True
    return request.num_preemptions > 0 and request.blocks is not table
