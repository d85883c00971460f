"""Sites of the model's projections: the adapters' rank rows there, and their products with a step's tokens.

LoraSite (one for each Linear)    LoraBatch (one for each step)
a  [R, S, in]   row r of all      runs of tokens of one adapter, for the native kernel;
b  [R, sum out] belongs to one    on CUDA groups of an adapter's tokens, for its kernels;
                adapter           elsewhere segments with their rows and, for several
                                  adapters, a mask

R rank rows, S modules of a site, T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.lora import expand_invariant, shrink_expand, shrink_expand_invariant
from ...kernels.lora.groups import RowGroups
from ...kernels.lora.native import NativeRows, RowSegments, is_native
from .pool import Allocation

if TYPE_CHECKING:
    from ...kernels.lora.device_rows import Expansion, Shrunk, TritonRows
    from ...kernels.rms_norm import NormWeight

Live = NDArray[np.uint8]
"""[R, modules]: 0 if a rank row has no weights of a module."""


class RowSelection:
    """Rank rows of a set of adapters."""

    def __init__(self, allocations: Sequence[Allocation], device: torch.device) -> None:
        self.allocations = tuple(allocations)
        owners = sorted((row, index) for index, allocation in enumerate(allocations) for row in allocation.rows)
        rows = [row for row, _ in owners]
        self.num_rows = len(rows)
        self.index: NDArray[np.int64] = np.array(rows, np.int64)
        self.row_owners = torch.tensor([index for _, index in owners], device=device)
        """[n]: index of each row's owner in `allocations`."""
        contiguous = rows[-1] - rows[0] + 1 == len(rows)
        self._where: slice | Tensor = (
            slice(rows[0], rows[-1] + 1) if contiguous else torch.from_numpy(self.index).to(device)
        )

    def gather(self, pool: Tensor) -> Tensor:
        """Return the selected rows of a pool [R, ...]: a view if adjacent, else a copy."""
        return pool[self._where] if isinstance(self._where, slice) else pool.index_select(0, self._where)

    def columns(self, pool: Tensor, index: Tensor) -> Tensor:
        """Return columns `index` [T] of the selected rows of a pool [R, V], as a copy [T, n]."""
        if isinstance(self._where, slice):
            return pool[self._where].index_select(1, index).t().contiguous()
        return pool[self._where, index[:, None]]


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Tokens [start, stop) of the step, and their rank rows."""

    start: int
    stop: int
    selection: RowSelection
    keep: Tensor | None = None
    """[stop - start, n], from `kernels.lora.keep_mask`; None if every row applies to every token."""
    invariant: bool = False
    """True when no bit of a delta may depend on other tokens; then the selection is one adapter."""


class LoraRun(NamedTuple):
    """Adjacent tokens of one adapter, or of the base model if `owner` is None."""

    owner: Allocation | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Adapters of one step's tokens. The models pass it to every site. Tokens outside all runs belong to the base
    model."""

    runs: tuple[LoraRun, ...]
    """Runs of the adapters, ascending."""
    native: RowSegments | None
    """All runs, for the native kernel."""
    segments: tuple[LoraSegment, ...]
    """All runs, if there are no such kernels: disjoint and ascending."""
    invariant: bool = False
    groups: RowGroups | None = None
    """All runs, for the kernels of a CUDA device."""
    replayable: bool = False
    """True when a captured graph of the same batcher, for at least as many tokens, serves this step. The batcher's
    buffer has only rank rows, so a step with gains or biases runs without a graph."""
    targets_experts: bool = False
    """True when an adapter has weights of experts."""
    lookups: dict[EmbeddingSite, tuple[LoraRun, ...]] = field(default_factory=dict, compare=False)
    """Runs whose adapters have embeddings, by site. Cached, since a batch is used for many steps."""

    def tokens(self) -> list[int]:
        """Tokens that have adapters, ascending."""
        return [token for run in self.runs for token in range(run.start, run.stop)]

    def of(self, tokens: Sequence[int]) -> LoraBatch | None:
        """Adapters of some tokens, ascending, in their order; None: they have none. Not for a CUDA device's kernels."""
        places = ((run.owner, bisect_left(tokens, run.start), bisect_left(tokens, run.stop)) for run in self.runs)
        runs = tuple(LoraRun(*place) for place in places if place[1] < place[2])
        if not runs:
            return None
        if self.native is not None:
            return LoraBatch(runs, row_segments(runs), (), self.invariant)
        device = self.segments[0].selection.row_owners.device
        segments = (
            LoraSegment(start, stop, RowSelection([owner], device), invariant=self.invariant)
            for owner, start, stop in runs
            if owner is not None
        )
        return LoraBatch(runs, None, tuple(segments), self.invariant)


def row_segments(runs: Sequence[LoraRun]) -> RowSegments:
    """Runs of adapters for the native kernel."""
    return RowSegments([(run.start, run.stop, run.owner.rows) for run in runs if run.owner is not None])


class LoraSite:
    """Rank rows of one linear projection, with one slice for each module merged into it; views of a `RowArena`."""

    def __init__(
        self, a: Tensor, b: Tensor, slice_sizes: Sequence[int], live: Live, live_on_device: Tensor | None = None
    ) -> None:
        """`a` [R, S, in], `b` [R, sum(slice_sizes)], `live` [R, S], and a copy of it for the kernels of a device."""
        self._a = a
        self._b = b.split(list(slice_sizes), 1)
        self._live = live
        self._native = NativeRows(a, b, slice_sizes, live) if is_native(a.dtype, a.device) else None
        self._grouped = _grouped(a, b, slice_sizes, live_on_device)

    def fused(self, adapters: LoraBatch) -> tuple[int, RowSegments] | None:
        """Return the inputs with which `NativeLinear` does `add` in its own call; None if it cannot."""
        if adapters.native is None or self._native is None:
            return None
        return self._native.address, adapters.native

    def weights_of_runs(self, adapters: LoraBatch) -> list[tuple[int, int, Tensor, Tensor]]:
        """Tokens [start, stop) of each adapter with weights here, and its A [r, in] and B [r, out], for a projection of
        one module."""
        found = []
        for owner, start, stop in adapters.runs:
            if owner is not None and self._live[owner.index].any():
                selection = RowSelection([owner], self._a.device)
                found.append((start, stop, selection.gather(self._a).squeeze(1), selection.gather(self._b[0])))
        return found

    def expands(self, adapters: LoraBatch) -> bool:
        """True if `expansion` serves these tokens."""
        return adapters.groups is not None and adapters.groups.is_few

    def expansion(self, x: Tensor, adapters: LoraBatch, norm: NormWeight | None) -> Expansion | None:
        """Shrink the inputs `x` [T, in], of which the product takes the `norm`, if there is one; return the arguments
        with which it adds the adapters' deltas, None without adapters."""
        assert self._grouped is not None
        assert adapters.groups is not None
        return self._grouped.expansion(x, adapters.groups, norm)

    def start(self, x: Tensor, adapters: LoraBatch) -> Shrunk | None:
        """Start the part of `add` that needs only the inputs `x` [T, in], concurrently with later launches; None if it
        cannot run concurrently."""
        if adapters.groups is None:
            return None
        assert self._grouped is not None
        return self._grouped.shrink(x, adapters.groups)

    def add(self, y: Tensor, x: Tensor, adapters: LoraBatch, started: Shrunk | None = None) -> None:
        """Add the adapters' deltas for inputs `x` [T, in] to `y` [T, out] in place; both are contiguous. `started` is
        the result of `start` for them, if it was called."""
        if adapters.native is not None and self._native is not None:
            self._native.add(y, x, adapters.native)
            return
        if adapters.groups is not None:
            assert self._grouped is not None
            self._grouped.add(y, x, adapters.groups, started)
            return
        for segment in adapters.segments:
            selection = segment.selection
            if not self._live[selection.index].any():
                continue  # none of these adapters targets the projection
            whole = segment.start == 0 and segment.stop == len(x)
            ys, xs = (y, x) if whole else (y[segment.start : segment.stop], x[segment.start : segment.stop])
            a, b = selection.gather(self._a), [selection.gather(part) for part in self._b]
            if segment.invariant:
                shrink_expand_invariant(ys, xs, a, b)
            else:
                shrink_expand(ys, xs, a, b, segment.keep)


def _grouped(a: Tensor, b: Tensor, slice_sizes: Sequence[int], live: Tensor | None) -> TritonRows | None:
    if live is None:
        return None
    from ...kernels.lora.device_rows import TritonRows  # imports Triton

    return TritonRows(a, b, slice_sizes, live)


class EmbeddingSite:
    """Rank rows of a token embedding. The delta of token t is `A[:, t]ᵀ B`, with A [r, V] and B [r, H]."""

    def __init__(self, a: Tensor, b: Tensor, live: Live, live_on_device: Tensor | None = None) -> None:
        """`a` [R, V], `b` [R, H], `live` [R, 1]; views of a `RowArena`."""
        self._a = a
        self._b = b
        self._live = live
        self._device = a.device
        self._grouped = _grouped(a.unsqueeze(1), b, [b.shape[1]], live_on_device)

    def add(self, y: Tensor, input_ids: Tensor, adapters: LoraBatch) -> None:
        """Add the adapters' deltas for `input_ids` [T] to their embeddings `y` [T, H] in place."""
        if adapters.groups is not None:
            assert self._grouped is not None
            self._grouped.add_embeddings(y, input_ids, adapters.groups)
            return
        runs = adapters.lookups.get(self)
        if runs is None:
            runs = adapters.lookups[self] = tuple(run for run in adapters.runs if self._has(run))
        for owner, start, stop in runs:
            assert owner is not None
            selection = RowSelection([owner], self._device)
            columns, rows = selection.columns(self._a, input_ids[start:stop]), selection.gather(self._b)
            if adapters.invariant:
                expand_invariant(y[start:stop], columns, rows)
            else:
                y[start:stop].addmm_(columns, rows)

    def _has(self, run: LoraRun) -> bool:
        """True if the adapter has embeddings; constant while it has its rows."""
        return run.owner is not None and bool(self._live[run.owner.index].any())
