"""Hidden states of past steps that wait to be written: most never are, since nobody drafts before their requests end.

While nothing is drafted this is all that a step does for a drafter that reads hidden states, so it is cheap: the step's
tensors are kept as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....platform.core.request import Request, Status
from ..base import DraftRow

MAX_PENDING = 8192
"""Most tokens whose hidden states wait."""
MAX_PENDING_BYTES = 32 << 20
"""Most memory that waiting hidden states hold, beyond those of one step."""
_FEW = 16
"""Positions up to which a list is faster than arrays."""


class PendingStep(NamedTuple):
    """Hidden states of one step, as they came."""

    rows: Sequence[DraftRow]
    """Their block tables only grow while they are in use, and one that was given back is a list that nobody changes:
    they still say where these positions lie."""
    states: tuple[Tensor, ...]
    """[T, H] each."""

    @property
    def num_tokens(self) -> int:
        """T: the tokens that the step computed."""
        return self.states[0].shape[0]

    def readable(self) -> list[DraftRow]:
        """Rows with new positions that somebody may still read."""
        return [row for row in self.rows if row.num_valid > row.start and not _has_gone(row.request, row.block_table)]


class PendingStates:
    """Hidden states that wait, oldest first."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.most_tokens = 0
        """Most tokens that may wait; known with the first states."""
        self._queue: deque[PendingStep] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, rows: Sequence[DraftRow], states: tuple[Tensor, ...]) -> None:
        """Add the states [T, H] of a step. Neither they nor the rows are changed afterwards."""
        while self._queue and not self._queue[0].readable():
            self.pop()
        if not self.most_tokens:
            num_bytes = len(states) * states[0].shape[1] * states[0].element_size()
            self.most_tokens = min(MAX_PENDING, MAX_PENDING_BYTES // num_bytes)
        self._queue.append(PendingStep(rows, states))
        self.num_tokens += states[0].shape[0]

    def uses(self, adapter: bytes) -> bool:
        """True when somebody may read states of a request whose adapter has that content."""
        versions = (row.request.adapter for step in self._queue for row in step.readable())
        return any(version is not None and version.digest == adapter for version in versions)

    def pop(self) -> PendingStep:
        """Remove the oldest step."""
        oldest = self._queue.popleft()
        self.num_tokens -= oldest.num_tokens
        return oldest


class Placement(NamedTuple):
    """Places of n positions: among some steps' states, and in the cache."""

    places: list[int]
    """[n], which of the states each is."""
    slots: list[int]
    """[n], where it goes."""
    handles: list[tuple[Any, int]]
    """(adapter, number of tokens), in the order of `places`."""


def placement(steps: Sequence[PendingStep], block_size: int) -> Placement:
    """Places of all positions of `steps` that somebody may still read; a slot may occur in several steps."""
    found = Placement([], [], [])
    offset = 0
    for step in steps:
        for row in step.readable():
            count = row.num_valid - row.start
            first = offset + row.first_index
            found.places.extend(range(first, first + count))
            found.slots.extend(slots_of(row.block_table, row.start, row.num_valid, block_size))
            found.handles.append((row.request.adapter, count))
        offset += step.num_tokens
    return found


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """[end - start] slots of positions [start, end) of a sequence."""
    if end - start <= _FEW:
        return [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
    first = start // block_size
    blocks = np.array(table[first : -(-end // block_size)], dtype=np.int64)
    block, offset = np.divmod(np.arange(start, end), block_size)
    found: list[int] = (blocks[block - first] * block_size + offset).tolist()
    return found


def _has_gone(request: Request, table: list[int]) -> bool:
    """True when nobody will read the results of a row with this block table: the request has finished or was preempted,
    and its blocks are not shared."""
    if request.namespace is not None:
        return False
    if request.status is Status.FINISHED:
        return True
    return request.num_preemptions > 0 and request.blocks is not table
