"""The memory of the rank rows: all that a model's adapters have in one rank row lies side by side.

    row r   | A of site 0 | B of site 0 | A of site 1 | B of site 1 | ...       one tensor [R, width]

So a row is written by one copy, beside the step and without the sites, and a parsed adapter is kept in the form in
which it is copied: the columns that it has, cut out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.lora.groups import is_grouped
from ..platform.core.threads import give_way
from .adapter import LoraWeights
from .pool import Allocation

_ALIGNMENT = 64
"""Bytes: a cache line."""
_PAGE = 4096
PARTS_A_TURN = 16
"""Parts of an adapter, of about 20 µs each, between two occasions for other threads."""


class Place(NamedTuple):
    """Where a site's modules are in a row, in elements: `S` of A one after another, then the slices of B."""

    a: int
    b: int
    first: int
    """Index of its first module."""


class PackedRows(NamedTuple):
    """What an adapter has in an arena, ready to be copied. Never changed."""

    spans: tuple[tuple[int, int], ...]
    """Columns of the arena [start, stop) that it has..."""
    data: Tensor
    """...side by side, [n, sum of their lengths]."""
    live: NDArray[np.uint8]
    """[n, modules]: 1 where a row belongs to the module's weights."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.data.nbytes + self.live.nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they take memory only where they are written (calloc): the unused part of an arena is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)


class RowArena:
    """See the module's docstring. Pieces that belong to no adapter's weights are zero."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve every site's place, then `allocate`."""
        self._dtype = dtype
        self._device = device
        self._width = 0
        self._modules: dict[str, int] = {}
        self._pieces: list[tuple[slice, slice]] = []  # of each module: columns of A, columns of B
        self.rows = torch.empty(0, 0, dtype=dtype, device=device)
        """[R, width]; filled by `write` alone."""
        self.live: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        """[R, modules]: 0 where a row has no weights of the module."""
        self.live_on_device: Tensor | None = None
        """The same for kernels of a CUDA device."""

    def reserve(self, names: Sequence[str], in_features: int, sizes: Sequence[int]) -> Place:
        """Columns for a site: modules `names` of one input, with `sizes` outputs."""
        place = Place(self._width, self._aligned(self._width + len(names) * in_features), len(self._pieces))
        b = place.b
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            a = place.a + index * in_features
            self._modules[name] = len(self._pieces)
            self._pieces.append((slice(a, a + in_features), slice(b, b + size)))
            b += size
        self._width = self._aligned(b)
        return place

    def _aligned(self, column: int) -> int:
        unit = _ALIGNMENT // self._dtype.itemsize
        return -(-column // unit) * unit

    @property
    def row_bytes(self) -> int:
        """Of one rank row over all sites."""
        return self._width * self._dtype.itemsize

    def allocate(self, num_rows: int) -> None:
        """Memory for the rows, when all sites have their place."""
        stride = self._width
        if stride * self._dtype.itemsize % _PAGE < _ALIGNMENT:
            # Rows a multiple of the page apart would share the same few lines of a cache that looks addresses up by
            # their low bits, and an adapter's rows are read side by side.
            stride += 5 * _ALIGNMENT // self._dtype.itemsize
        self.rows = _zeros((num_rows, stride), self._dtype, self._device)[:, : self._width]
        self.live = np.zeros((num_rows, len(self._pieces)), np.uint8)
        if is_grouped(self._dtype, self._device):
            self.live_on_device = torch.zeros(self.live.shape, dtype=torch.uint8, device=self._device)

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedRows:
        """Cut out what an adapter has here. For any thread: others get their turn now and then."""
        parts: list[tuple[slice, Tensor]] = []
        num_rows = max((len(weights.a) for weights in modules.values()), default=0)
        live = np.zeros((num_rows, len(self._pieces)), np.uint8)
        for name, weights in modules.items():
            index = self._modules[name]
            parts += zip(self._pieces[index], weights[:2], strict=True)
            live[: len(weights.a), index] = 1
        parts.sort(key=lambda part: part[0].start)
        spans = _joined([columns for columns, _ in parts], _ALIGNMENT // self._dtype.itemsize)
        data = torch.zeros(num_rows, sum(stop - start for start, stop in spans), dtype=self._dtype)
        remaining = iter(spans)
        start = stop = shift = end = 0
        for index, (columns, tensor) in enumerate(parts):
            if columns.start >= stop:  # the next span
                start, stop = next(remaining)
                shift, end = end - start, end + stop - start
            data[: len(tensor), columns.start + shift : columns.stop + shift] = tensor
            if index % PARTS_A_TURN == 0:
                give_way()
        return PackedRows(tuple(spans), data, live)

    def views(self, packed: PackedRows) -> dict[str, LoraWeights]:
        """The adapter's weights by module, as views of `packed`."""
        starts = np.array([start for start, _ in packed.spans])
        shifts = np.cumsum([0, *(stop - start for start, stop in packed.spans)])[:-1] - starts

        def view(columns: slice, rank: int) -> Tensor:
            shift = int(shifts[np.searchsorted(starts, columns.start, "right") - 1])
            return packed.data[:rank, columns.start + shift : columns.stop + shift]

        ranks = packed.live.sum(0)
        return {
            name: LoraWeights(*(view(columns, int(ranks[index])) for columns in self._pieces[index]))
            for name, index in self._modules.items()
            if ranks[index]
        }

    def write(self, allocation: Allocation, packed: PackedRows) -> None:
        """Fill an adapter's rows, and clear what a former owner left in them. For any thread, as long as nobody reads
        these rows; other threads get their turn after every span."""
        num_rows = len(packed.data)
        owned = allocation.index
        live = np.zeros((len(owned), len(self._pieces)), np.uint8)
        live[:num_rows] = packed.live
        stale = (self.live[owned] & ~live).any(0)
        for index in np.flatnonzero(stale):
            for columns in self._pieces[index]:
                self.rows[_where(owned), columns] = 0
        column = 0
        for start, stop in packed.spans:
            part = packed.data[:, column : column + stop - start]
            self.rows[_where(owned[:num_rows]), start:stop] = part.to(self._device, non_blocking=True)
            column += stop - start
            give_way()
        self.live[owned] = live
        if self.live_on_device is not None:
            self.live_on_device[_where(owned)] = torch.from_numpy(live).to(self._device)


def _where(index: NDArray[np.int32]) -> slice | Tensor:
    """Rows as an index: a slice where they are neighbours, which copies several times faster."""
    if len(index) and int(index[-1]) - int(index[0]) + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index.astype(np.int64))


def _joined(columns: Sequence[slice], gap: int) -> list[tuple[int, int]]:
    """Ascending columns as few spans; what is less than `gap` apart is one."""
    spans: list[tuple[int, int]] = []
    for part in columns:
        if spans and part.start - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], part.stop)
        else:
            spans.append((part.start, part.stop))
    return spans
