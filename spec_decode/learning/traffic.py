"""Recorded traffic of one tenant and adapter: tokens and the fused hidden states that a head reads, in bounded memory.

T tokens, H hidden size of the head.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

from torch import Tensor

WINDOW = 64
"""Most labels of a sample, and most tokens before them that the head attends to."""


class Sample(NamedTuple):
    """A stretch of one text."""

    ids: Tensor
    """[T] int64."""
    states: Tensor
    """[T, H] state of each position, as the head reads it."""
    first_label: int
    """Index of the first token that is a label: one that the target generated."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return int(self.ids.nbytes + self.states.nbytes)

    @property
    def num_labels(self) -> int:
        """Tokens that are labels."""
        return len(self.ids) - self.first_label

    def piece(self, size: int, random: Random) -> Sample:
        """At most `size` of its labels, all adjacent, and what is before them."""
        first = self.first_label + random.randrange(max(1, self.num_labels - size + 1))
        return Sample(self.ids[: first + size], self.states[: first + size], first)


class Traffic:
    """Samples, the oldest first. When they exceed the limit, the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all samples."""
        self.num_labels = 0
        """Labels of all samples."""
        self.samples: deque[Sample] = deque()

    def add(self, ids: Tensor, states: Tensor, first_label: int) -> int:
        """Copy a text's tokens [T] and states [T, H], whose tokens from `first_label` on are the target's; returns the
        number of labels."""
        first_label = max(first_label, 2)  # a head guesses the third token first
        for first in range(first_label, len(ids), WINDOW):
            start, stop = max(0, first - WINDOW), first + WINDOW
            sample = Sample(ids[start:stop].clone(), states[start:stop].clone(), first - start)
            self.samples.append(sample)
            self._count(sample, 1)
        while self.num_bytes > self._max_bytes:
            self._count(self.samples.popleft(), -1)
        return max(0, len(ids) - first_label)

    def choose(self, random: Random) -> Sample:
        """A random sample: half of the time one of the newest quarter, since text drifts."""
        return self.samples[-1 - int(len(self.samples) * random.random() ** 2)]

    def _count(self, sample: Sample, sign: int) -> None:
        self.num_bytes += sign * sample.num_bytes
        self.num_labels += sign * sample.num_labels
