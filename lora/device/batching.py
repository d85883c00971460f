"""LoraBatches: the adapters of a step's tokens, in the kernels' format. Most steps have those of the step before.

The native kernel takes each run of one adapter's tokens, the kernels of a CUDA device take all tokens of an adapter as
one group. Without these kernels one masked product over all rank rows in use serves the tokens of several adapters. A
long run of one adapter's tokens has a separate product with that adapter's rows; a long run of the base model's has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...kernels.lora import keep_mask
from ...kernels.lora.groups import GroupBuffer, RowGroups, is_grouped
from ...kernels.lora.native import is_native
from ...models.batch import DraftWeights
from ..registry.versions import AdapterVersion
from .layers import LoraBatch, LoraRun, LoraSegment, RowSelection, row_segments
from .learnt import LearntWeights
from .pool import Allocation, RowPool

LONG_RUN = 64
"""Minimum tokens of a run with a separate matrix product."""

Rows = Sequence[tuple[Allocation | None, int]]
"""(the adapter's device rows or None, number of tokens)."""
PlanRows = Sequence[tuple[AdapterVersion | None, int]]
"""(request.adapter, number of tokens or logits rows); every adapter is that of an admitted request."""
DraftRows = Sequence[tuple[AdapterVersion | LearntWeights | None, int]]
"""The same of a drafter's pass; learnt draft weights replace the adapter's own."""
TargetDraftRows = Sequence[tuple[AdapterVersion | DraftWeights | None, int]]
"""The same of a pass by which the target drafts for itself."""


class DeviceWeights(NamedTuple):
    """Weights on the device; the fields after the first as in `AdapterVersion`."""

    allocation: Allocation
    is_plain: bool
    targets_experts: bool


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
    """Return the long runs of adapters, and groups of the other runs, without base tokens at a group's ends."""
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
    """Builds the LoraBatches of one kind of pass."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool = False,
        buffer: GroupBuffer | None = None,
    ) -> None:
        """Make a batcher for rank rows of a dtype on a device.

        Args:
            dtype: Dtype of the rows.
            device: Device of the rows.
            batch_invariant: True when no bit of a token's delta may depend on the other tokens.
            buffer: Memory of this batcher alone, from which captured graphs read the groups of small steps.
        """
        self._buffer = buffer
        self._batch_invariant = batch_invariant
        self._dtype = dtype
        self._device = device
        self._is_native = is_native(dtype, device)
        self._is_grouped = is_grouped(dtype, device)
        self._last: tuple[tuple[Rows, bool], LoraBatch | None] = (((), False), None)

    def build(
        self, rows: Rows, *, is_plain: bool = True, targets_experts: bool = False, always: bool = False
    ) -> LoraBatch | None:
        """Return the batch for a step's rows; None when all are the base model's.

        Args:
            rows: The rows.
            is_plain: No adapter has more than rank rows.
            targets_experts: An adapter has weights of experts.
            always: Return an empty batch instead of None, if captured graphs are used.
        """
        if (rows, always) != self._last[0]:
            batch = self._build(rows, is_plain, always=always)
            if batch is not None and targets_experts:
                batch = replace(batch, targets_experts=True, replayable=False)
            self._last = ((rows, always), batch)
        return self._last[1]

    def _build(self, rows: Rows, is_plain: bool, *, always: bool) -> LoraBatch | None:
        runs = _runs(rows)
        owned = [run for run in runs if run.owner is not None]
        if not owned and not (always and self._is_grouped):
            return None
        if self._is_grouped:
            ranges = [(run.start, run.stop, run.owner.index) for run in owned if run.owner is not None]
            num_tokens, invariant = sum(count for _, count in rows), self._batch_invariant
            groups = RowGroups(ranges, num_tokens, self._device, self._buffer, invariant=invariant)
            return LoraBatch(
                tuple(owned), None, (), invariant, groups=groups, replayable=groups.replayable and is_plain
            )
        if self._is_native:
            return LoraBatch(tuple(owned), row_segments(owned), (), self._batch_invariant)
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


class StepAdapters:
    """Builds the LoraBatches of a step's passes: of the target, its head and the drafter.

    In the head and in the drafter an adapter without weights there counts as the base model, so a pass without any such
    weights costs nothing.
    """

    def __init__(
        self,
        pool: RowPool,
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int,
        *,
        batch_invariant: bool = False,
        target_draft: DeviceWeights | None = None,
    ) -> None:
        """Make the batchers of a pool's rank rows.

        Args:
            pool: Pool of the rows.
            dtype: Dtype of the rows.
            device: Device of the rows.
            max_rank: Largest rank of steps that are replayed from captured graphs.
            batch_invariant: See `LoraBatcher`; for the target and its head, since a drafter's rounding changes no text.
            target_draft: Draft weights of the base model, if the target drafts for itself; in rows after the pool's.
        """
        self._pool, self._target_draft = pool, target_draft
        num_more = 0 if target_draft is None else len(target_draft.allocation.rows)

        def batcher(batch_invariant: bool, max_rank: int = max_rank) -> LoraBatcher:
            buffer = GroupBuffer(pool.num_rows + num_more, max_rank, device) if is_grouped(dtype, device) else None
            return LoraBatcher(dtype, device, batch_invariant=batch_invariant, buffer=buffer)

        self._tokens, self._head = batcher(batch_invariant), batcher(batch_invariant)
        self._draft = batcher(False, max(max_rank, num_more))

    def prepare(self, rows: PlanRows, *, always: bool = False) -> LoraBatch | None:
        """Return the batch of the target's pass over rows of tokens; None when all are the base model's. `always`: see
        `LoraBatcher.build`."""
        return self._build(self._tokens, rows, self._allocation, always=always)

    def prepare_head(self, rows: PlanRows, *, always: bool = False) -> LoraBatch | None:
        """Return the batch of rows of logits; None when no adapter of theirs targets lm_head."""
        find = self._allocation
        return self._build(
            self._head, rows, lambda version: find(version) if version.targets_head else None, always=always
        )

    def prepare_draft(self, rows: DraftRows, *, always: bool = False) -> LoraBatch | None:
        """Return the batch of a drafter's pass over rows of tokens; None when no adapter has draft weights. An adapter
        that was unloaded and dropped at the commit of its last request counts as the base model."""

        def find(version: AdapterVersion | LearntWeights) -> Allocation | None:
            if isinstance(version, LearntWeights):
                return version.allocation
            return self._pool.ready_allocation(version.digest) if version.has_draft else None

        return self._build(self._draft, rows, find, always=always)

    def prepare_target_draft(self, rows: TargetDraftRows, *, always: bool = False) -> LoraBatch | None:
        """Return the batch of a pass by which the target drafts for itself: tokens of requests have their adapters, and
        tokens that stand for drafts their adapters' draft weights, else the base model's."""
        found = [(self._weights(handle), count) for handle, count in rows]
        return self._build(self._draft, found, lambda weights: weights.allocation, always=always)

    def _weights(self, handle: AdapterVersion | DraftWeights | None) -> DeviceWeights | None:
        is_draft = isinstance(handle, DraftWeights)
        version: AdapterVersion | None = handle.adapter if isinstance(handle, DraftWeights) else handle
        allocation = None if version is None else self._pool.ready_allocation(version.digest)
        if is_draft and allocation is not None:
            allocation = allocation.draft
        if version is None or allocation is None:
            return self._target_draft if is_draft else None
        return DeviceWeights(allocation, version.is_plain, version.targets_experts)

    def _allocation(self, version: AdapterVersion) -> Allocation:
        assert version.digest is not None
        return self._pool.allocation(version.digest)

    def _build(
        self,
        batcher: LoraBatcher,
        rows: Sequence[tuple[AdapterVersion | LearntWeights | DeviceWeights | None, int]],
        find: Callable[[Any], Allocation | None],
        *,
        always: bool,
    ) -> LoraBatch | None:
        """Build a batch; `find` returns the rows of a version, None if it counts as the base model."""
        allocations, is_plain, targets_experts = [], True, False
        for version, count in rows:
            allocation = None if version is None else find(version)
            if version is not None and allocation is not None:
                is_plain &= version.is_plain
                targets_experts |= version.targets_experts
            allocations.append((allocation, count))
        if all(allocation is None for allocation, _ in allocations):
            # It must not keep the allocations of its last batch.
            return batcher.build([(None, sum(count for _, count in rows))] if always else (), always=always)
        return batcher.build(allocations, is_plain=is_plain, targets_experts=targets_experts)
