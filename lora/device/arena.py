"""Memory of the rank rows: one tensor [R, width] with the columns of a `RowLayout`.

All weights of a rank row are contiguous, so a thread copies a row at once, while steps read other rows.

From pinned memory only contiguous copies are asynchronous: any other goes through pageable memory, and the thread waits
for it. So each packed row is copied whole to a staging buffer on the device, and from there its columns to their
positions, without allocations and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.lora.groups import is_grouped
from ...kernels.memory import lazy_zeros
from ...kernels.staging import to_device
from ..step_yield import yield_to_steps
from .layout import ALIGNMENT, PackedRows, RowLayout
from .pool import Allocation

_PAGE = 4096
_STAGED_BYTES = 16 << 20
"""Device staging memory for packed rows, in bytes: three rows of an adapter on all projections of Llama-3-8B."""


class RowArena:
    """Rank rows of one layout on a device."""

    def __init__(self, layout: RowLayout, device: torch.device, *, is_apart: bool | None = None) -> None:
        """Make an arena without rows; call `allocate` when all sites have their columns in the layout. `is_apart`: the
        rows are in other memory than packed ones; by default true unless the device is a CPU."""
        self.layout = layout
        self._device = device
        self._is_apart = device.type != "cpu" if is_apart is None else is_apart
        self._staging = torch.empty(0, dtype=layout.dtype, device=device)
        self.rows = torch.empty(0, 0, dtype=layout.dtype, device=device)
        """[R, width]; only `write` changes them."""
        self.live: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        """[R, modules]: 0 if a row has no weights of the module."""
        self.live_on_device: Tensor | None = None
        """`live` in the memory of a CUDA device, for its kernels; None elsewhere."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank row."""
        return self.layout.width * self.layout.dtype.itemsize

    def allocate(self, num_rows: int, width: int | None = None) -> None:
        """Allocate the rows; `width`: only of the first columns, if other memory has the rest."""
        width = self.layout.width if width is None else width
        dtype, stride = self.layout.dtype, width
        if stride * dtype.itemsize % _PAGE < ALIGNMENT:
            # Caches index by low address bits: rows a multiple of the page apart would share a few lines.
            stride += 5 * ALIGNMENT // dtype.itemsize
        self.rows = lazy_zeros((num_rows, stride), dtype, self._device)[:, :width]
        self.live = np.zeros((num_rows, len(self.layout.pieces)), np.uint8, order="F")  # as the kernel reads it
        if self._is_apart:
            size = min(num_rows * width, max(width, _STAGED_BYTES // dtype.itemsize))
            self._staging = torch.empty(size, dtype=dtype, device=self._device)
        if is_grouped(dtype, self._device):
            self.live_on_device = torch.zeros(self.live.shape, dtype=torch.uint8, device=self._device)

    def write(self, allocation: Allocation, packed: PackedRows) -> None:
        """Write an adapter's rows, and clear the weights of the previous owner, while no step reads these rows. One
        thread writes at a time; steps may run between two spans."""
        num_rows = len(packed.data)
        owned = allocation.index
        live = np.zeros((len(owned), len(self.layout.pieces)), np.uint8)
        live[:num_rows] = packed.live
        stale = (self.live[owned] & ~live).any(0)
        for index in np.flatnonzero(stale):
            for columns in self.layout.pieces[index]:
                for _, rows in _runs(owned):
                    self.rows[rows, columns] = 0
        width = self.rows.shape[1]
        spans = [(start, min(stop, width)) for start, stop in packed.spans if start < width]
        for here, rows in self._pieces(owned[:num_rows], sum(stop - start for start, stop in spans)):
            data, column = self._staged(packed.data[here], spans), 0
            for start, stop in spans:
                yield_to_steps()
                self.rows[rows, start:stop] = data[:, column : column + stop - start]
                column += stop - start
        self.live[owned] = live
        if self.live_on_device is not None:
            there = to_device(live, self._device)
            for here, rows in _runs(owned):
                self.live_on_device[rows] = there[here]

    def _pieces(self, owned: NDArray[np.int32], num_columns: int) -> Iterator[tuple[slice, slice]]:
        """Yield (packed rows, rows of the arena) that are copied together: adjacent rows that fit into the staging
        memory."""
        most = max(1, self._staging.numel() // max(1, num_columns)) if self._is_apart else max(1, len(owned))
        for here, rows in _runs(owned):
            for start in range(here.start, here.stop, most):
                stop, first = min(start + most, here.stop), rows.start + start - here.start
                yield slice(start, stop), slice(first, first + stop - start)

    def _staged(self, data: Tensor, spans: list[tuple[int, int]]) -> Tensor:
        """Return the columns of `spans` of packed rows [n, packed width] in device memory, contiguous."""
        if not self._is_apart:
            return data
        num_columns = sum(stop - start for start, stop in spans)
        staged = self._staging[: len(data) * num_columns].view(len(data), num_columns)
        for row, packed in zip(staged, data, strict=True):
            row.copy_(packed[:num_columns], non_blocking=True)
        return staged


def _runs(index: NDArray[np.int32]) -> Iterator[tuple[slice, slice]]:
    """Yield (positions in `index`, rows) of each run of adjacent rows among ascending ones. A slice is copied several
    times faster than single rows, and needs no index on the device."""
    starts = np.flatnonzero(np.diff(index, prepend=-2) != 1).tolist()
    for start, stop in itertools.pairwise([*starts, len(index)]):
        yield slice(start, stop), slice(int(index[start]), int(index[start]) + stop - start)
