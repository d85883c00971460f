"""Hidden states of past steps that wait to be written: most never are, since nobody drafts before their requests end.

While nothing is drafted this is all that a step does for a drafter that reads hidden states, so it has to be cheap:

- Steps after which nobody was asked for drafts come some at once (`rests`), and stay one `Bundle`.
- On a CPU, states are copied into a `Ring`, by the target itself where it can. Were their tensors kept, the memory that
  the next steps take would be other memory each time, whose pages are fresh. On a GPU a copy would cost a launch, and
  its allocator has no such trouble: there the tensors are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....platform.core.request import Request, Status
from ..base import DraftRow, RestedSteps
from .state_ring import Ring, most_pending

_FEW = 16

PlacedStates = tuple[int, tuple[Tensor, ...]]
"""A step's hidden states: their place in the ring, or -1 and [T, H_target] each."""


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
    def readers(self) -> Iterator[Request]:
        """Those of whom somebody may read something of it."""
        return (row.request for row in self.rows if not _has_gone(row.request, row.block_table))

    def pieces(self, block_size: int) -> Iterator[Piece]:
        """What is to be written."""
        for row in self.rows:
            count = row.num_valid - row.start
            if count > 0 and not _has_gone(row.request, row.block_table):
                index = np.arange(row.first_index, row.first_index + count)
                yield Piece(row.request.adapter, index, slots_of(row.block_table, row.start, row.num_valid, block_size))


class Bundle:
    """Steps after which nobody was asked for drafts, looked at together."""

    __slots__ = ("_spells", "_starts", "num_tokens", "place", "states")

    def __init__(
        self, spells: Sequence[RestedSteps], states: tuple[Tensor, ...], starts: Sequence[int], place: int
    ) -> None:
        """`states`: [n, H_target] each, those of all these steps among them; `starts`: where each step's begin;
        `place`: see `Step`."""
        self._spells = [(steps.rows, steps.tables, len(steps.targets)) for steps in spells]
        self._starts = starts
        self.num_tokens = sum(sum(count_tokens(steps)) for steps in spells)
        """That these steps computed."""
        self.states = states
        self.place = place

    @property
    def readers(self) -> Iterator[Request]:
        """Those of whom somebody may read something of it; one may occur several times."""
        return (
            row.request
            for rows, tables, _ in self._spells
            for row, table in zip(rows, tables, strict=True)
            if not _has_gone(row.request, table)
        )

    def pieces(self, block_size: int) -> Iterator[Piece]:
        """What is to be written."""
        done = 0
        for rows, tables, num_steps in self._spells:
            first, *others = self._starts[done : done + num_steps]
            later = np.array(others, dtype=np.int64)
            for column, (row, table) in enumerate(zip(rows, tables, strict=True)):
                if not _has_gone(row.request, table):
                    index = np.concatenate([np.arange(first, first + row.num_tokens), later + column])
                    yield Piece(
                        row.request.adapter, index, slots_of(table, row.start, row.end + num_steps - 1, block_size)
                    )
                first += row.num_tokens
            done += num_steps


def count_tokens(steps: RestedSteps) -> list[int]:
    """That each of them computed."""
    return [sum([row.num_tokens for row in steps.rows])] + [len(steps.rows)] * (len(steps.targets) - 1)


class PendingStates:
    """What waits, oldest first."""

    def __init__(self, ring: Ring | None = None) -> None:
        """`ring`: whose places the target fills itself; the steps come here in the order in which they took them, and
        each before anything else is asked for."""
        self.num_tokens = 0
        self.most_tokens = 0 if ring is None else ring.size
        """That may wait; known with the first states."""
        self._queue: deque[Step | Bundle] = deque()
        self._ring = ring

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...], *, passing: bool = False) -> None:
        """The states [T, H_target] of a step. They may change afterwards, unless they are `passing`: about to be taken,
        and not worth a copy."""
        self._drop_gone()
        kept, place = self._kept([states], copies=not passing)
        self._queue.append(Step(rows, kept, place))
        self.num_tokens += len(kept[0])

    def add_rested(self, spells: Sequence[RestedSteps], steps: Sequence[PlacedStates]) -> None:
        """The states of all `spells`' steps, one after another."""
        places = [place for place, _ in steps]
        if self._ring is not None and min(places) >= 0:
            bundle = Bundle(spells, self._ring.states, places, places[0])
        else:
            bundle = self._gathered(spells, steps)
        self._queue.append(bundle)
        self.num_tokens += bundle.num_tokens
        self._drop_gone()  # no sooner: these places are not to be given back

    def _gathered(self, spells: Sequence[RestedSteps], steps: Sequence[PlacedStates]) -> Bundle:
        """Of steps that are not all in the ring."""
        counts = [count for spell in spells for count in count_tokens(spell)]
        states = [s if at < 0 else self._views(at, n) for (at, s), n in zip(steps, counts, strict=True)]
        self._drop_gone()  # what it gives back is not taken before it is copied
        kept, place = self._kept(states, copies=all(place < 0 for place, _ in steps))
        return Bundle(spells, kept, np.cumsum([0, *counts[:-1]]).tolist(), place)

    def _kept(self, steps: Sequence[tuple[Tensor, ...]], *, copies: bool) -> tuple[tuple[Tensor, ...], int]:
        """The states of some steps, one after another, and where in the ring they are if they are there."""
        if self.most_tokens == 0:
            self._begin(steps[0])
        num_tokens = sum([states[0].shape[0] for states in steps])
        if self._ring is not None and copies:
            place = self._ring.take(num_tokens)
            if place >= 0:
                self._ring.put(place, num_tokens, steps)
                return self._ring.views(place, num_tokens), place
        return steps[0] if len(steps) == 1 else tuple(map(torch.cat, zip(*steps, strict=True))), -1

    def _views(self, place: int, num_tokens: int) -> tuple[Tensor, ...]:
        assert self._ring is not None
        return self._ring.views(place, num_tokens)

    def uses(self, adapter: bytes) -> bool:
        """Whether somebody may read something that is of an adapter with that content."""
        users = (request.adapter for entry in self._queue for request in entry.readers)
        return any(version is not None and version.digest == adapter for version in users)

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
        if states[0].is_cpu:
            self._ring = Ring(range(len(states)), states[0].shape[1], states[0].dtype)
        self.most_tokens = most_pending(len(states) * states[0].shape[1] * states[0].element_size())

    def _drop_gone(self) -> None:
        dropped = False
        while self._queue and next(self._queue[0].readers, None) is None:
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
