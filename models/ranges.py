"""Rows of a matrix that one of several ranks has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """A rank's units of all units of a matrix, such as heads, and the rows of each."""

    total: int
    first: int
    count: int
    size: int = 1

    @property
    def length(self) -> int:
        """Rows of all units."""
        return self.total * self.size

    @property
    def own(self) -> int:
        """Rows of this rank."""
        return self.count * self.size

    def rows(self, start: int) -> slice:
        """Rows of this rank in a matrix whose first unit begins at `start`."""
        return slice(start + self.first * self.size, start + (self.first + self.count) * self.size)

    @property
    def alone(self) -> Rows:
        """Rows of this rank in a matrix that has these units alone."""
        return Rows(self.length, [self.rows(0)])

    def sized(self, size: int) -> Range:
        """The same units of `size` rows."""
        return Range(self.total, self.first, self.count, size)


class Rows(NamedTuple):
    """Rows of one tensor that a rank has."""

    total: int
    """Rows of the whole tensor."""
    slices: Sequence[slice]

    @classmethod
    def whole(cls, total: int) -> Rows:
        """All rows."""
        return cls(total, [slice(0, total)])

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These rows of a tensor, or these indices of its dimension `dim`."""
        parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def rows_of_tensors(ranges: Sequence[Range], sizes: Sequence[int]) -> Iterator[Rows]:
    """Divide consecutive ranges among tensors of which this rank has `sizes` rows."""
    rest = iter(ranges)
    for size in sizes:
        start, slices = 0, []
        while size > 0:
            part = next(rest)
            slices.append(part.rows(start))
            start += part.length
            size -= part.own
        assert size == 0, "a range belongs to one tensor"
        yield Rows(start, slices)
