"""From a step's rows to its LoraBatch, once a step and mostly the one of the step before.

Tokens of several adapters go through one masked product over all their rank rows. A long run of one adapter's tokens
(a prompt chunk) is computed apart with that adapter's rows only, and a long run of the base model's not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..kernels.lora import keep_mask
from .layers import LoraBatch, LoraSegment, RowSelection
from .pool import Allocation, RowPool

# Tokens from which a run is cheaper on its own than masked with the others: beyond it the masked product's time grows
# with the tokens, below it the calls dominate.
LONG_RUN = 64
# A selection is packed when it has served this many steps: packing costs 5 to 15 uses, and a set of adapters that
# lasted so long will last.
PACK_AFTER = 4


class _Run(NamedTuple):
    """Neighbouring tokens of one adapter; `owner` None: of the base model."""

    owner: Allocation | None
    start: int
    stop: int


class _Step(NamedTuple):
    """The last step, to be recognized when it comes again."""

    rows: list[tuple[Allocation | None, int]]
    batch: LoraBatch | None
    selects: bool
    """Whether the batch uses the lasting selection."""


def _runs(rows: Iterable[tuple[Allocation | None, int]]) -> list[_Run]:
    runs: list[_Run] = []
    position = 0
    for owner, num_tokens in rows:
        if runs and runs[-1].owner is owner:
            runs[-1] = _Run(owner, runs[-1].start, position + num_tokens)
        elif num_tokens:
            runs.append(_Run(owner, position, position + num_tokens))
        position += num_tokens
    return runs


def _groups(runs: Sequence[_Run]) -> tuple[list[_Run], list[list[_Run]]]:
    """Long adapter runs that stand alone, and groups of neighbouring runs without base tokens at their ends."""
    split = len({run.owner for run in runs}) > 1
    alone: list[_Run] = []
    groups: list[list[_Run]] = [[]]
    for run in runs:
        if not split or run.stop - run.start < LONG_RUN:
            groups[-1].append(run)
            continue
        groups.append([])
        if run.owner is not None:
            alone.append(run)
    for group in groups:
        while group and group[-1].owner is None:
            group.pop()
        while group and group[0].owner is None:
            group.pop(0)
    return alone, [group for group in groups if group]


class LoraBatcher:
    """Builds LoraBatches, keeping the row selection (and with it the sites' packed copies) as long as it fits."""

    def __init__(
        self, pool: RowPool, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        """`batch_invariant`: each adapter's tokens by themselves, so that they do not depend on the others."""
        self._batch_invariant = batch_invariant
        self._pool = pool
        self._dtype = dtype
        self._device = device
        self._selection: RowSelection | None = None
        self._uses = 0
        self._last: _Step | None = None

    def build(self, rows: list[tuple[Allocation | None, int]]) -> LoraBatch | None:
        """The batch for rows of (the adapter's device rows or None, number of tokens); None when all are the base's."""
        last = self._last
        if last is not None and rows == last.rows and not (last.selects and self._uses == PACK_AFTER):
            self._uses += last.selects
            return last.batch
        runs = _runs(rows)
        alone, groups = (runs, []) if self._batch_invariant else _groups(runs)
        segments = [
            LoraSegment(
                run.start,
                run.stop,
                RowSelection([run.owner], self._device),
                keep=None,
                packed=False,
                rows_in_use=run.owner.mask,
                invariant=self._batch_invariant,
            )
            for run in alone
            if run.owner is not None
        ]
        if groups:
            active = {run.owner: None for group in groups for run in group if run.owner is not None}
            selection = self._select(list(active))
            segments.extend(self._segment(group, selection) for group in groups)
        segments.sort(key=lambda segment: segment.start)
        batch = LoraBatch(tuple(segments)) if segments else None
        self._last = _Step(rows, batch, bool(groups))
        return batch

    def _select(self, active: list[Allocation]) -> RowSelection:
        """A selection that covers `active`: the last one while it does and is not much larger, else a new one."""
        previous = self._selection.allocations if self._selection is not None else ()
        alive = [a for a in previous if a.key in self._pool and self._pool.allocation(a.key) is a]
        limit = 2 * sum(len(a.rows) for a in active) + 32
        union = list(dict.fromkeys([*alive, *active]))
        if sum(len(a.rows) for a in union) > limit:
            union = active
        if self._selection is None or set(union) != set(previous):
            self._selection = RowSelection(union, self._device)
            self._uses = 0
        self._uses += 1
        return self._selection

    def _segment(self, group: list[_Run], selection: RowSelection) -> LoraSegment:
        keep = None
        if len(group) > 1 or len(selection.allocations) > 1:
            index = {allocation: i for i, allocation in enumerate(selection.allocations)}
            owners = torch.tensor([-1 if run.owner is None else index[run.owner] for run in group], device=self._device)
            lengths = torch.tensor([run.stop - run.start for run in group], device=self._device)
            owned = owners.repeat_interleave(lengths)[:, None] == selection.row_owners
            keep = keep_mask(owned, self._dtype)
        in_use = 0
        for owner in {run.owner for run in group if run.owner is not None}:
            in_use |= owner.mask
        return LoraSegment(group[0].start, group[-1].stop, selection, keep, self._uses > PACK_AFTER, in_use)
