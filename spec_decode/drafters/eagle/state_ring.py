"""Memory for hidden states that wait, on a CPU: see `pending_states`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

MAX_PENDING = 8192
"""Tokens whose hidden states may wait..."""
MAX_PENDING_BYTES = 32 << 20
"""...and the memory that they may hold, beyond those of one step."""
_MAX_COPIED_BYTES = 4 << 20
"""At once: beyond that a copy is no trifle, and so much memory is not found in caches anyway."""


def most_pending(num_bytes: int) -> int:
    """Tokens that may wait, of so many bytes each."""
    return min(MAX_PENDING, MAX_PENDING_BYTES // num_bytes)


class Ring:
    """Memory that is taken and given back in the same order."""

    def __init__(self, layers: Sequence[int], width: int, dtype: torch.dtype, size: int | None = None) -> None:
        """Room for `size` tokens with hidden states of `width` elements, one for each of the `layers`."""
        each = len(layers) * width * dtype.itemsize
        self.size = most_pending(each) if size is None else size
        self.states = tuple(torch.empty(self.size, width, dtype=dtype) for _ in layers)
        """[size, width] each, all of it."""
        self._addresses = [(layer, part.data_ptr()) for layer, part in zip(layers, self.states, strict=True)]
        self._row = width * dtype.itemsize  # bytes
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

    def copies(self, place: int) -> dict[int, int]:
        """Addresses of a place, by layer."""
        offset = place * self._row
        return {layer: address + offset for layer, address in self._addresses}

    def put(self, place: int, num_tokens: int, steps: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy the states of some steps, T tokens in all, to a place that was taken for them."""
        if len(steps) > 1:
            for part, states in zip(self.states, zip(*steps, strict=True), strict=True):
                torch.cat(states, out=part[place : place + num_tokens])
            return
        for address, state in zip(self.copies(place).values(), steps[0], strict=True):
            dense = state.contiguous()  # lives until it is copied
            memmove(address, dense.data_ptr(), num_tokens * self._row)

    def views(self, place: int, num_tokens: int) -> tuple[Tensor, ...]:
        """What lies there."""
        return tuple(part[place : place + num_tokens] for part in self.states)

    def give_back(self, first: int) -> None:
        """All that was taken before the place `first` is free; -1: all."""
        if first < 0:
            self._first = self._end = 0
        else:
            self._first = first
