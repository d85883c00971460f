"""From a step's rows to its LoraBatch, once a step and mostly the one of the step before.

The native kernel takes each run of one adapter's tokens as it is, the kernels of a CUDA device all tokens of an adapter
as one group. Where neither serves, tokens of several adapters go through one masked product over all their rank rows; a
long run of one adapter's tokens is computed apart with that adapter's rows only, and a long run of the base model's not
at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...kernels.lora import keep_mask
from ...kernels.lora.groups import GroupBuffer, RowGroups, is_grouped
from ...kernels.lora.native import RowSegments, is_native
from .layers import LoraBatch, LoraRun, LoraSegment, RowSelection
from .pool import Allocation

# Tokens from which a run goes through matrix products of its own.
LONG_RUN = 64

Rows = Sequence[tuple[Allocation | None, int]]
"""(the adapter's device rows or None, number of tokens)."""


class _Step(NamedTuple):
    """The last step, to be recognized when it comes again."""

    rows: Rows
    batch: LoraBatch | None


def _runs(rows: Iterable[tuple[Allocation | None, int]]) -> list[LoraRun]:
    runs: list[LoraRun] = []
    position = 0
    for owner, num_tokens in rows:
        if runs and runs[-1].owner is owner:
            runs[-1] = LoraRun(owner, runs[-1].start, position + num_tokens)
        elif num_tokens:
            runs.append(LoraRun(owner, position, position + num_tokens))
        position += num_tokens
    return runs


def _is_long(run: LoraRun) -> bool:
    return run.stop - run.start >= LONG_RUN


def _groups(runs: Sequence[LoraRun]) -> tuple[list[LoraRun], list[list[LoraRun]]]:
    """Long adapter runs that stand alone, and groups of neighbouring runs without base tokens at their ends."""
    split = len({run.owner for run in runs}) > 1
    alone: list[LoraRun] = []
    groups: list[list[LoraRun]] = [[]]
    for run in runs:
        if not split or not _is_long(run):
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
    """Builds LoraBatches."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool = False,
        buffer: GroupBuffer | None = None,
    ) -> None:
        """
        Args:
            dtype: Of the rows.
            device: Where they are.
            batch_invariant: What an adapter gives a token must not depend on the other tokens, bit for bit.
            buffer: Of this batcher alone, where captured graphs find the groups of small steps.
        """
        self._buffer = buffer
        self._batch_invariant = batch_invariant
        self._dtype = dtype
        self._device = device
        self._is_native = is_native(dtype, device)
        self._is_grouped = is_grouped(dtype, device) and not batch_invariant
        self._last: _Step | None = None

    def build(self, rows: Rows, *, has_gains: bool = False) -> LoraBatch | None:
        """The batch for a step's rows; None when all are the base model's. `has_gains`: of an adapter among them."""
        if self._last is None or rows != self._last.rows:
            self._last = _Step(rows, self._build(rows, has_gains))
        return self._last.batch

    def _build(self, rows: Rows, has_gains: bool) -> LoraBatch | None:
        runs = _runs(rows)
        owned = [run for run in runs if run.owner is not None]
        if not owned:
            return None
        if self._is_grouped:
            ranges = [(run.start, run.stop, run.owner.index) for run in owned if run.owner is not None]
            groups = RowGroups(ranges, sum(count for _, count in rows), self._device, self._buffer)
            return LoraBatch(tuple(owned), None, (), groups=groups, replayable=groups.replayable and not has_gains)
        if self._is_native:
            native = RowSegments([(run.start, run.stop, run.owner.rows) for run in owned if run.owner is not None])
            return LoraBatch(tuple(owned), native, (), self._batch_invariant)
        alone, masked = (owned, []) if self._batch_invariant else _groups(runs)
        segments = [self._alone(run) for run in alone] + [self._masked(group) for group in masked]
        segments.sort(key=lambda segment: segment.start)
        return LoraBatch(tuple(owned), None, tuple(segments), self._batch_invariant)

    def _alone(self, run: LoraRun) -> LoraSegment:
        assert run.owner is not None
        selection = RowSelection([run.owner], self._device)
        return LoraSegment(run.start, run.stop, selection, invariant=self._batch_invariant)

    def _masked(self, group: list[LoraRun]) -> LoraSegment:
        owners = list(dict.fromkeys(run.owner for run in group if run.owner is not None))
        selection = RowSelection(owners, self._device)
        keep = None
        if len(group) > 1:
            places = {owner: place for place, owner in enumerate(owners)}
            place = torch.tensor([places.get(run.owner, -1) for run in group], device=self._device)  # type: ignore[arg-type]
            lengths = torch.tensor([run.stop - run.start for run in group], device=self._device)
            keep = keep_mask(place.repeat_interleave(lengths)[:, None] == selection.row_owners, self._dtype)
        return LoraSegment(group[0].start, group[-1].stop, selection, keep)
