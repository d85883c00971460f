"""Rank rows of draft weights that are learnt while serving: those after the pool's, in the drafter's arena alone.

Each learner has a slot of `rank` rows. The thread that runs steps writes them, between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import LoraWeights
from .pool import Allocation
from .sites import RowSites

ModuleWeights = Mapping[str, tuple[Tensor, Tensor]]
"""A [r, in] and B [r, out], with the scale folded in, of each module."""


@dataclass(frozen=True, slots=True, eq=False)
class LearntWeights:
    """One version of learnt draft weights on the device: what a row of a drafter's pass has in place of its adapter."""

    allocation: Allocation
    digest: bytes
    """SHA-256 of names and tensors."""
    weights: ModuleWeights
    """The content, in host memory."""
    is_plain: bool = True
    """As `AdapterVersion.is_plain`."""
    targets_experts: bool = False
    """As `AdapterVersion.targets_experts`."""


class LearntRows:
    """Writes learnt draft weights to their rows."""

    def __init__(self, sites: RowSites, first_row: int, rank: int, num_slots: int) -> None:
        """`sites`: the drafter's, with `num_slots` times `rank` rows from `first_row` on."""
        self._sites = sites
        self._rows = [tuple(range(first_row + i * rank, first_row + (i + 1) * rank)) for i in range(num_slots)]
        self.rank = rank

    def write(self, slot: int, weights: ModuleWeights) -> LearntWeights:
        """Write weights of at most `rank` to a slot, while no step runs. Later steps use the result."""
        layout = self._sites.model.layout
        kept = {name: (a.to(layout.linears.dtype), b.to(layout.linears.dtype)) for name, (a, b) in weights.items()}
        digest = hashlib.sha256()
        for name, pair in sorted(kept.items()):
            digest.update(name.encode() + b"\0")
            for part in pair:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        # Other objects than those of the version before: batches of steps are cached by them.
        allocation = Allocation(digest.digest(), self._rows[slot])
        self._sites.write(allocation, layout.pack({name: LoraWeights(a, b) for name, (a, b) in kept.items()}))
        return LearntWeights(allocation, allocation.key, kept)
