"""Memory for hidden states that wait, on a CPU: see `pending_states`."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_PENDING = 8192
"""Most tokens whose hidden states may wait."""
MAX_PENDING_BYTES = 32 << 20
"""Most memory that waiting hidden states may hold, beyond those of one step."""
_MAX_COPIED_BYTES = 4 << 20
"""Most bytes that are copied at once: larger ones are not found in the processor's caches again."""


def most_pending(num_bytes: int) -> int:
    """Tokens that may wait, of so many bytes each."""
    return min(MAX_PENDING, MAX_PENDING_BYTES // num_bytes)


class Ring:
    """Memory that is taken and given back in the same order."""

    def __init__(self, num_states: int, width: int, dtype: torch.dtype, size: int | None = None) -> None:
        """Room for `size` tokens with `num_states` hidden states of `width` elements each."""
        each = num_states * width * dtype.itemsize
        self.size = most_pending(each) if size is None else size
        self._states = tuple(torch.empty(self.size, width, dtype=dtype) for _ in range(num_states))
        self._most_taken = _MAX_COPIED_BYTES // each
        self._first = self._end = 0  # what is taken lies between, maybe around the end; none where they are equal

    def take(self, num_tokens: int) -> int:
        """A place for so many tokens, or -1: there is none."""
        first, end = self._first, self._end
        limit = self.size if end >= first else first - 1
        if num_tokens > self._most_taken:
            return -1
        if end + num_tokens > limit:
            if end < first or num_tokens >= first:
                return -1
            end = 0  # what is left before the end of the memory stays unused
        self._end = end + num_tokens
        return end

    def put(self, place: int, states: tuple[Tensor, ...]) -> None:
        """Copy a step's states [T, width] to a place that was taken for T tokens."""
        for part, state in zip(self._states, states, strict=True):
            part[place : place + len(state)].copy_(state)

    def views(self, place: int, num_tokens: int) -> tuple[Tensor, ...]:
        """The states at a place, [num_tokens, width] each."""
        return tuple(part[place : place + num_tokens] for part in self._states)

    def give_back(self, first: int) -> None:
        """Free all that was taken before the place `first`; -1: all."""
        if first < 0:
            self._first = self._end = 0
        else:
            self._first = first
