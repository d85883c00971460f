"""Inputs of adapters for each pass of a step: three views of the same rows, each with a batcher of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...kernels.lora.groups import GroupBuffer, is_grouped
from ..registry.versions import AdapterVersion
from .batching import LoraBatcher
from .layers import LoraBatch
from .pool import RowPool

PlanRows = Sequence[tuple[AdapterVersion | None, int]]
"""(request.adapter, number of tokens or logits rows); every adapter is that of an admitted request."""


class StepAdapters:
    """Makes LoraBatches. In the head and in the draft pass adapters without weights there count as the base model, so
    that a pass where none has any costs nothing."""

    def __init__(
        self,
        pool: RowPool,
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            pool: Whose rows the adapters have.
            dtype: Of the rows.
            device: Where they are.
            max_rank: Steps with larger ranks are never replayed from captured graphs.
            batch_invariant: For the target and its head; a drafter's rounding changes no text.
        """
        self._pool = pool

        def batcher(batch_invariant: bool) -> LoraBatcher:
            buffer = GroupBuffer(pool.num_rows, max_rank, device) if is_grouped(dtype, device) else None
            return LoraBatcher(dtype, device, batch_invariant=batch_invariant, buffer=buffer)

        self._tokens, self._head, self._draft = batcher(batch_invariant), batcher(batch_invariant), batcher(False)

    def prepare(self, rows: PlanRows) -> LoraBatch | None:
        """For the target's forward pass over rows of tokens; None when all are the base model's."""
        return self._build(self._tokens, rows, lambda version: True)

    def prepare_head(self, rows: PlanRows) -> LoraBatch | None:
        """For rows of logits; None when no adapter of theirs targets lm_head."""
        return self._build(self._head, rows, lambda version: version.targets_head)

    def prepare_draft(self, rows: PlanRows) -> LoraBatch | None:
        """For the drafter's forward pass over rows of tokens; None when no adapter of theirs has draft weights."""
        return self._build(self._draft, rows, lambda version: version.has_draft)

    def _build(
        self, batcher: LoraBatcher, rows: PlanRows, applies: Callable[[AdapterVersion], bool]
    ) -> LoraBatch | None:
        if not any(version is not None and applies(version) for version, _ in rows):
            return None
        allocations, has_gains = [], False
        for version, count in rows:
            allocation = None
            if version is not None and applies(version):
                assert version.digest is not None
                allocation = self._pool.allocation(version.digest)
                has_gains |= version.has_gains
            allocations.append((allocation, count))
        return batcher.build(allocations, has_gains=has_gains)
