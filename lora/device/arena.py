"""Memory of the rank rows: one tensor [R, width] with the columns of a `RowLayout`.

All weights of a rank row are side by side, so a thread copies a row at once, while steps read other rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.lora.groups import is_grouped
from ...kernels.memory import lazy_zeros
from ..step_yield import yield_to_steps
from .layout import ALIGNMENT, PackedRows, RowLayout
from .pool import Allocation

_PAGE = 4096


class RowArena:
    """Rank rows of one layout on a device."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        """Make an arena without rows; call `allocate` when all sites have their columns in the layout."""
        self.layout = layout
        self._device = device
        self.rows = torch.empty(0, 0, dtype=layout.dtype, device=device)
        """[R, width]; only `write` changes them."""
        self.live: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        """[R, modules]: 0 where a row has no weights of the module."""
        self.live_on_device: Tensor | None = None
        """`live` in the memory of a CUDA device, for its kernels; None elsewhere."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank row."""
        return self.layout.width * self.layout.dtype.itemsize

    def allocate(self, num_rows: int, width: int | None = None) -> None:
        """Allocate the rows; `width`: of the first columns alone, as other memory has the rest."""
        width = self.layout.width if width is None else width
        dtype, stride = self.layout.dtype, width
        if stride * dtype.itemsize % _PAGE < ALIGNMENT:
            # A cache finds addresses by their low bits: rows a multiple of the page apart would share its few lines.
            stride += 5 * ALIGNMENT // dtype.itemsize
        self.rows = lazy_zeros((num_rows, stride), dtype, self._device)[:, :width]
        self.live = np.zeros((num_rows, len(self.layout.pieces)), np.uint8, order="F")  # as the kernel reads it
        if is_grouped(dtype, self._device):
            self.live_on_device = torch.zeros(self.live.shape, dtype=torch.uint8, device=self._device)

    def write(self, allocation: Allocation, packed: PackedRows) -> None:
        """Write an adapter's rows, and clear the weights of a former owner. Thread-safe while no step reads these rows;
        lets steps run between two spans."""
        num_rows = len(packed.data)
        owned = allocation.index
        live = np.zeros((len(owned), len(self.layout.pieces)), np.uint8)
        live[:num_rows] = packed.live
        stale = (self.live[owned] & ~live).any(0)
        for index in np.flatnonzero(stale):
            for columns in self.layout.pieces[index]:
                self.rows[_where(owned), columns] = 0
        column = 0
        for start, stop in packed.spans:
            yield_to_steps()
            here = min(stop, self.rows.shape[1])
            if here > start:
                part = packed.data[:, column : column + here - start]
                self.rows[_where(owned[:num_rows]), start:here] = part.to(self._device, non_blocking=True)
            column += stop - start
        self.live[owned] = live
        if self.live_on_device is not None:
            self.live_on_device[_where(owned)] = torch.from_numpy(live).to(self._device)


def _where(index: NDArray[np.int32]) -> slice | Tensor:
    """Return rows as an index: a slice for neighbours, which copies several times faster."""
    if len(index) and int(index[-1]) - int(index[0]) + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index.astype(np.int64))
