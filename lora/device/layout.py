"""Where an adapter's weights are in a rank row, and adapters cut out in that form: known in any process, without rows.

    row r   | A of site 0 | B of site 0 | A of site 1 | B of site 1 | ...

A parsed adapter is kept in the form in which it is copied to its rows: the columns that it has, side by side.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.conversion import place
from ..files.serving_form import LoraWeights
from ..files.tensor_keys import EMBEDDING, LM_HEAD
from ..tiers.step_signal import give_way

ALIGNMENT = 64
"""Bytes: a cache line."""
_ELEMENTS = 1 << 17
"""Numbers that are copied at once, or one matrix."""


class Place(NamedTuple):
    """Where a site's modules are in a row, in elements: `S` of A one after another, then the slices of B."""

    a: int
    b: int
    first: int
    """Index of its first module."""


class SiteShape(NamedTuple):
    """Modules `names` of one input, with `sizes` outputs."""

    names: tuple[str, ...]
    in_features: int
    sizes: tuple[int, ...]


class PackedRows(NamedTuple):
    """Columns that an adapter has in a layout, ready to be copied. Never changed."""

    spans: tuple[tuple[int, int], ...]
    """Columns of a row [start, stop) that it has."""
    data: Tensor
    """Columns side by side, [n, sum of their lengths]."""
    live: NDArray[np.uint8]
    """[n, modules]: 1 where a row belongs to the module's weights."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.data.nbytes + self.live.nbytes


class CutPart(NamedTuple):
    """One matrix of an adapter."""

    name: str
    """Shape of its module."""
    which: int
    """0: A. 1: B."""
    column: int
    """Its first one, among those that the adapter has."""


class Cut(NamedTuple):
    """Columns that adapters of one shape have in a layout; see `PackedRows`."""

    spans: tuple[tuple[int, int], ...]
    live: NDArray[np.uint8]
    parts: list[CutPart]
    """From the first column to the last."""
    is_full: bool
    """True when matrices fill the rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Bytes of the rows."""
        return len(self.live), sum(stop - start for start, stop in self.spans)

    def empty(self, dtype: torch.dtype) -> PackedRows:
        """Rows of which the matrices are still to be placed."""
        return PackedRows(
            self.spans, (torch.empty if self.is_full else torch.zeros)(self.shape, dtype=dtype), self.live
        )


class RowLayout:
    """See the module's docstring. Pieces that belong to no adapter's weights are zero."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Reserve every site's place before the first use."""
        self.dtype = dtype
        self.width = 0
        """Width of a row, in elements."""
        self.sites: list[SiteShape] = []
        """In the order in which they were reserved: what it takes to make the same layout elsewhere."""
        self.pieces: list[tuple[slice, slice]] = []
        """Columns of A and columns of B for each module."""
        self._modules: dict[str, int] = {}

    def reserve(self, names: Sequence[str], in_features: int, sizes: Sequence[int]) -> Place:
        """Columns for a site; see `SiteShape`."""
        self.sites.append(SiteShape(tuple(names), in_features, tuple(sizes)))
        place = Place(self.width, self._aligned(self.width + len(names) * in_features), len(self.pieces))
        b = place.b
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            a = place.a + index * in_features
            self._modules[name] = len(self.pieces)
            self.pieces.append((slice(a, a + in_features), slice(b, b + size)))
            b += size
        self.width = self._aligned(b)
        return place

    def _aligned(self, column: int) -> int:
        unit = ALIGNMENT // self.dtype.itemsize
        return -(-column // unit) * unit

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedRows:
        """Cut out what an adapter has here. For any thread: others get their turn now and then."""
        cut = self.cut({name: len(weights.a) for name, weights in modules.items()})
        packed = cut.empty(self.dtype)
        placed: list[tuple[int, Tensor]] = []
        size = 0
        for part in cut.parts:
            tensor = modules[part.name][:2][part.which].contiguous()
            placed.append((part.column, tensor))
            size += tensor.numel()
            if size >= _ELEMENTS or part is cut.parts[-1]:
                place(packed.data, placed)
                placed, size = [], 0
                give_way()
        return packed

    def cut(self, ranks: Mapping[str, int]) -> Cut:
        """Where an adapter with modules of these ranks has what."""
        num_rows = max(ranks.values(), default=0)
        live = np.zeros((num_rows, len(self.pieces)), np.uint8)
        found: list[tuple[slice, str, int]] = []
        for name, rank in ranks.items():
            module = self._modules[name]
            found += [(columns, name, which) for which, columns in enumerate(self.pieces[module])]
            live[:rank, module] = 1
        found.sort(key=lambda part: part[0].start)
        spans = _joined([columns for columns, _, _ in found], ALIGNMENT // self.dtype.itemsize)
        remaining = iter(spans)
        start = stop = shift = end = 0
        parts: list[CutPart] = []
        for columns, name, which in found:
            if columns.start >= stop:  # the next span
                start, stop = next(remaining)
                shift, end = end - start, end + stop - start
            parts.append(CutPart(name, which, columns.start + shift))
        num_placed = sum(ranks[name] * (columns.stop - columns.start) for columns, name, _ in found)
        return Cut(tuple(spans), live, parts, num_placed == num_rows * end)

    def __contains__(self, name: object) -> bool:
        """Return whether a module has its place here."""
        return name in self._modules

    def names(self, packed: PackedRows) -> list[str]:
        """The modules that an adapter has here."""
        if not len(packed.live):
            return []
        # A module's weights begin in the first row.
        return [name for name, live in zip(self._modules, packed.live[0].tolist(), strict=True) if live]

    def view(self, packed: PackedRows, name: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [r, out] of a module that an adapter has here."""
        index = self._modules[name]
        rank = int(packed.live[:, index].sum())
        a, b = (
            packed.data[:rank, start : start + columns.stop - columns.start]
            for columns in self.pieces[index]
            for start in [_place(packed.spans, columns.start)]
        )
        return a, b


def _place(spans: Sequence[tuple[int, int]], column: int) -> int:
    """Where a column of a row is among those of `spans`, side by side."""
    index = bisect.bisect_right(spans, column, key=lambda span: span[0]) - 1
    return sum(stop - start for start, stop in spans[:index]) + column - spans[index][0]


def _joined(columns: Sequence[slice], gap: int) -> list[tuple[int, int]]:
    """Ascending columns as few spans; what is less than `gap` apart is one."""
    spans: list[tuple[int, int]] = []
    for part in columns:
        if spans and part.start - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], part.stop)
        else:
            spans.append((part.start, part.stop))
    return spans


class PackedModules(NamedTuple):
    """An adapter's rows in one model, ready to be copied."""

    linears: PackedRows
    vocabulary: PackedRows
    gains: Mapping[str, Tensor]
    """By module; see `LoraWeights.gain`."""

    @property
    def rank(self) -> int:
        """The largest of the modules."""
        return max(len(self.linears.data), len(self.vocabulary.data))

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.linears.num_bytes + self.vocabulary.num_bytes + sum(gain.nbytes for gain in self.gains.values())


class ModelLayout(NamedTuple):
    """The layouts of one model. The vocabulary's modules have one of their own: they are as wide as the vocabulary, and
    few adapters have them."""

    linears: RowLayout
    vocabulary: RowLayout

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedModules:
        """An adapter's weights in the form in which they are copied. For any thread."""
        if isinstance(modules, PackedWeights) and modules.layout is self:
            return modules.packed
        vocabulary = {name: weights for name, weights in modules.items() if name in (EMBEDDING, LM_HEAD)}
        linears = {name: weights for name, weights in modules.items() if name not in vocabulary}
        gains = {name: weights.gain for name, weights in modules.items() if weights.gain is not None}
        return PackedModules(self.linears.pack(linears), self.vocabulary.pack(vocabulary), gains)


class PackedWeights(Mapping[str, LoraWeights]):
    """An adapter's weights by module, as views of what was packed. A view is made when it is asked for, which few are:
    they are hundreds."""

    def __init__(self, layout: ModelLayout, packed: PackedModules) -> None:
        self.layout, self.packed = layout, packed
        self._owners: dict[str, tuple[RowLayout, PackedRows]] = {}
        for rows, part in ((layout.linears, packed.linears), (layout.vocabulary, packed.vocabulary)):
            self._owners |= dict.fromkeys(rows.names(part), (rows, part))

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def __getitem__(self, name: str) -> LoraWeights:
        rows, part = self._owners[name]
        return LoraWeights(*rows.view(part, name), self.packed.gains.get(name))
