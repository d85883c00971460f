"""The adapters' side of the model's linears, and what one step's forward needs to know of adapters.

LoraSite (one a Linear)          LoraBatch (one a step)
a  [R, S, in]    row r of all    segments of tokens, each with the rows it needs
b  S x [R, out_s]  pools belongs   and, where several adapters meet, a mask
                 to one adapter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..kernels.lora import PackedRows, expand_invariant, shrink_expand, shrink_expand_invariant
from .adapter import LoraWeights
from .pool import Allocation, row_mask


class RowSelection:
    """A set of adapters and their pool rows, used together for one step or many; caches are keyed by its identity."""

    def __init__(self, allocations: Sequence[Allocation], device: torch.device) -> None:
        self.allocations = tuple(allocations)
        owners = sorted((row, index) for index, allocation in enumerate(allocations) for row in allocation.rows)
        rows = [row for row, _ in owners]
        self.num_rows = len(rows)
        self.row_owners = torch.tensor([index for _, index in owners], device=device)
        """[n]: index into `allocations`."""
        contiguous = rows[-1] - rows[0] + 1 == len(rows)
        self._where: slice | Tensor = (
            slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows, dtype=torch.int64, device=device)
        )

    def gather(self, pool: Tensor) -> Tensor:
        """The selected rows of a pool [R, ...]: a view where they are neighbours, else a copy."""
        return pool[self._where] if isinstance(self._where, slice) else pool.index_select(0, self._where)

    def columns(self, pool: Tensor, index: Tensor) -> Tensor:
        """Of the selected rows of a pool [R, V], the columns `index` [T]: a copy [T, n], without one of whole rows."""
        if isinstance(self._where, slice):
            return pool[self._where].index_select(1, index).t().contiguous()
        return pool[self._where, index[:, None]]


@dataclass(slots=True)
class LoraSegment:
    """Tokens [start, stop) of the step, and the rows that they use."""

    start: int
    stop: int
    selection: RowSelection
    keep: Tensor | None
    """[stop - start, n], from `kernels.lora.keep_mask`; None when every row applies to every token."""
    packed: bool
    """Whether the selection lasts, so that each site keeps a packed copy of its rows."""
    rows_in_use: int = -1
    """Bit r: pool row r belongs to an adapter of these tokens. Others of the selection may have none here."""
    invariant: bool = False
    """Whether the deltas must not depend on the other tokens, bit for bit; the selection is one adapter."""
    _tiled: dict[int, Tensor] = field(default_factory=dict)

    def tiled_keep(self, num_slices: int) -> Tensor | None:
        """`keep` side by side for each slice, [stop - start, num_slices * n]; made once."""
        if self.keep is None or num_slices == 1:
            return self.keep
        if num_slices not in self._tiled:
            self._tiled[num_slices] = self.keep.repeat(1, num_slices)
        return self._tiled[num_slices]


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """One step's adapters; opaque to the models, which hand it to every LoraSite."""

    segments: tuple[LoraSegment, ...]
    """Disjoint and ascending. Tokens in none of them belong to the base model."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they take memory only where they are written (calloc): the unused part of a pool is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    start = -raw.data_ptr() % 64  # rows on cache lines
    return raw[start : start + size].view(dtype).view(shape)


class LoraSite:
    """The pools of one linear projection, with one slice for each module merged into it."""

    def __init__(
        self, in_features: int, slice_sizes: Sequence[int], num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._a = _zeros((num_rows, len(slice_sizes), in_features), dtype, device)
        self._b = [_zeros((num_rows, size), dtype, device) for size in slice_sizes]
        self._written = [0] * len(slice_sizes)  # bit r: row r of the slice is not zero; the pool's rest is untouched
        self._any_written = 0
        self._packed: tuple[RowSelection, PackedRows] | None = None  # for the last selection that was to be packed

    @property
    def num_slices(self) -> int:
        """Modules merged into this projection."""
        return len(self._b)

    def write(self, allocation: Allocation, weights: Sequence[LoraWeights | None]) -> None:
        """Fill an adapter's rows; `weights` has one entry a slice, None where the adapter leaves the module alone.

        What a former owner left in the other rows is cleared. Rows that are zero already are not touched: a head's are
        as wide as the vocabulary, and few adapters have any there.
        """
        for index, weight in enumerate(weights):
            rank = 0 if weight is None else len(weight.a)
            stale = [row for row in allocation.rows[rank:] if self._written[index] >> row & 1]
            if stale:
                self._a[stale, index] = 0
                self._b[index][stale] = 0
            self._written[index] &= ~allocation.mask
            if weight is not None:
                rows = torch.tensor(allocation.rows[:rank], device=self._a.device)
                self._a[rows, index] = weight.a.to(self._a.device)
                self._b[index][rows] = weight.b.to(self._a.device)
                self._written[index] |= row_mask(allocation.rows[:rank])
        self._any_written = 0
        for written in self._written:
            self._any_written |= written

    def add(self, y: Tensor, x: Tensor, adapters: LoraBatch) -> None:
        """Add the adapters' deltas for inputs `x` [T, in] to `y` [T, out] in place."""
        for segment in adapters.segments:
            if not self._any_written & segment.rows_in_use:
                continue  # none of these adapters targets the projection
            whole = segment.start == 0 and segment.stop == len(x)
            ys, xs = (y, x) if whole else (y[segment.start : segment.stop], x[segment.start : segment.stop])
            if segment.invariant:
                gather = segment.selection.gather
                shrink_expand_invariant(ys, xs, gather(self._a), [gather(part) for part in self._b])
            elif segment.packed:
                self._pack(segment.selection)(ys, xs, segment.tiled_keep(self.num_slices))
            else:
                gather = segment.selection.gather
                shrink_expand(ys, xs, gather(self._a), [gather(part) for part in self._b], segment.keep)

    def _pack(self, selection: RowSelection) -> PackedRows:
        if self._packed is None or self._packed[0] is not selection:
            self._packed = None  # free the old copy first
            packed = PackedRows(selection.gather(self._a), [selection.gather(part) for part in self._b])
            self._packed = (selection, packed)
        return self._packed[1]


class EmbeddingSite:
    """The pools of a token embedding: token t of an adapter with A [r, V] and B [r, H] gets `A[:, t]ᵀ B` added."""

    def __init__(
        self, vocab_size: int, hidden_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._a = _zeros((num_rows, vocab_size), dtype, device)
        self._b = _zeros((num_rows, hidden_size), dtype, device)
        self._written = 0  # as in LoraSite

    def write(self, allocation: Allocation, weights: Sequence[LoraWeights | None]) -> None:
        """Fill an adapter's rows; `weights` has one entry, None where the adapter leaves the embedding alone."""
        (weight,) = weights
        rank = 0 if weight is None else len(weight.a)
        stale = [row for row in allocation.rows[rank:] if self._written >> row & 1]
        if stale:
            self._a[stale] = 0
            self._b[stale] = 0
        self._written &= ~allocation.mask
        if weight is not None:
            rows = torch.tensor(allocation.rows[:rank], device=self._a.device)
            self._a[rows] = weight.a.to(self._a.device)
            self._b[rows] = weight.b.to(self._a.device)
            self._written |= row_mask(allocation.rows[:rank])

    def add(self, y: Tensor, input_ids: Tensor, adapters: LoraBatch) -> None:
        """Add the adapters' deltas for `input_ids` [T] to their embeddings `y` [T, H] in place."""
        for segment in adapters.segments:
            if not self._written & segment.rows_in_use:
                continue
            tokens = slice(segment.start, segment.stop)
            columns = segment.selection.columns(self._a, input_ids[tokens])
            if segment.keep is not None:
                columns.view(segment.keep.dtype).bitwise_and_(segment.keep)
            rows = segment.selection.gather(self._b)
            if segment.invariant:
                expand_invariant(y[tokens], columns, rows)
            else:
                y[tokens].addmm_(columns, rows)
