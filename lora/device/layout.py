"""Columns of a rank row, and an adapter's weights packed for them. Needs no device memory, so any process can use it.

    row r   | A of site 0 | B of site 0 | A of site 1 | B of site 1 | ...

A packed adapter has only the columns of its own modules, contiguous, in rank order. So it is copied to the device in a
few large pieces.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.conversion import place
from ...kernels.memory import lazy_zeros
from ..step_yield import yield_to_steps

LM_HEAD = "lm_head"
"""Module of the output head."""
SCORE = "score"
"""Module of a classifier's score matrix."""
_LATENTS = ".kv_b_proj"
"""Suffix of the names of products of latents, which are never computed; see `models.layers.latent_products`."""
ALIGNMENT = 64
"""Bytes of a cache line. The columns of A and of B begin at a multiple of it."""
_HUGE_BYTES = 32 << 20
"""Bytes of packed rows from which they are on huge pages. The C allocator returns memory of this size to the system and
never uses it again, so each adapter would wait for 4 KiB pages: 84 MB took 0.3 s in a virtual machine."""
_ELEMENTS = 1 << 17
"""Numbers copied in one call of the kernel, or one matrix if it has more."""


class LoraWeights(NamedTuple):
    """Weights of one module, in the dtype of use."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[r, out]: PEFT's lora_B transposed, with the scale and the gain folded in."""
    gain: Tensor | None = None
    """[out] float32: factor of each row of the base weight (DoRA); None: all are 1."""


class OwnRows(NamedTuple):
    """An adapter's own rows of the embeddings, the head or the score matrix; see `own_rows`."""

    weight: Tensor
    """[n, H], in the dtype of use; a score matrix in float32."""
    tokens: Tensor | None
    """[n] int64, ascending: tokens of the rows; None: the tokens 0 to n - 1, and the adapter has no others."""
    vocab_size: int = 0
    """Number of the adapter's tokens; 0: that of the base model."""
    bias: Tensor | None = None
    """[n], of a head that has one; None: the base model's."""


class PackedRows(NamedTuple):
    """Rank rows of one adapter in one layout, with only its own columns. Immutable."""

    layout: RowLayout
    spans: tuple[tuple[int, int], ...]
    """Columns [start, stop) of the layout that it has."""
    data: Tensor
    """[n, sum of the spans' lengths]: these columns, contiguous."""
    live: NDArray[np.uint8]
    """[n, modules]: 1 if a row has weights of the module."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return self.data.nbytes + self.live.nbytes

    def has(self, name: str) -> bool:
        """Return whether the adapter has weights of this module."""
        index = self.layout.modules.get(name)
        return index is not None and bool(self.live[:, index].any())

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A [r, in] and B [r, out] of each module, as views of `data`."""
        ranks = self.live.sum(0).tolist()
        return {
            name: (self._view(a, ranks[index]), self._view(b, ranks[index]))
            for name, index in self.layout.modules.items()
            if ranks[index]
            for a, b in [self.layout.pieces[index]]
        }

    def _view(self, columns: slice, rank: int) -> Tensor:
        index = bisect.bisect_right(self.spans, columns.start, key=lambda span: span[0]) - 1
        start = sum(stop - start for start, stop in self.spans[:index]) + columns.start - self.spans[index][0]
        return self.data[:rank, start : start + columns.stop - columns.start]


class MatrixColumn(NamedTuple):
    """Position of one matrix in packed rows."""

    name: str
    """Module of the matrix."""
    which: int
    """0: A. 1: B."""
    column: int
    """First column of the matrix in the packed rows."""


class PackedShape(NamedTuple):
    """Spans and matrix positions of all adapters that have the same modules with the same ranks."""

    layout: RowLayout
    spans: tuple[tuple[int, int], ...]
    live: NDArray[np.uint8]
    matrices: list[MatrixColumn]
    """Ascending by column."""
    is_full: bool
    """True when the matrices fill the rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and columns of each."""
        return len(self.live), sum(stop - start for start, stop in self.spans)

    def empty(self) -> PackedRows:
        """Rows to which the matrices are still to be copied."""
        layout = self.layout
        if not layout.pinned and math.prod(self.shape) * layout.dtype.itemsize >= _HUGE_BYTES:
            data = lazy_zeros(self.shape, layout.dtype)
        else:
            make = torch.empty if self.is_full else torch.zeros
            data = make(self.shape, dtype=layout.dtype, pin_memory=layout.pinned and self.shape[0] > 0)
        return PackedRows(layout, self.spans, data, self.live)


class RowLayout:
    """Columns of each module in a rank row."""

    def __init__(self, dtype: torch.dtype, *, pinned: bool = False) -> None:
        """Make an empty layout. Reserve the columns of every site before the first use. `pinned`: packed rows are in
        pinned memory."""
        self.dtype = dtype
        self.pinned = pinned
        self.width = 0
        """Elements of a row."""
        self.sites: list[tuple[Sequence[str], int, Sequence[int]]] = []
        """Arguments of each `reserve`: the same calls make the same layout in another process."""
        self.modules: dict[str, int] = {}
        """Index of each module."""
        self.pieces: list[tuple[slice, slice]] = []
        """Columns of A and of B by the module's index. Those of one site are contiguous: A of all, then B of all."""

    def reserve(self, names: Sequence[str], in_features: int, sizes: Sequence[int]) -> None:
        """Reserve the columns of a site: modules of one input, with `sizes` outputs."""
        self.sites.append((names, in_features, sizes))
        a, b = self.width, self._aligned(self.width + len(names) * in_features)
        for name, size in zip(names, sizes, strict=True):
            self.modules[name] = len(self.pieces)
            self.pieces.append((slice(a, a + in_features), slice(b, b + size)))
            a, b = a + in_features, b + size
        self.width = self._aligned(b)

    def _aligned(self, column: int) -> int:
        unit = ALIGNMENT // self.dtype.itemsize
        return -(-column // unit) * unit

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedRows:
        """Copy an adapter's matrices to packed rows. Thread-safe; lets steps run between two pieces."""
        shape = self.packed_shape({name: len(weights.a) for name, weights in modules.items()})
        packed = shape.empty()
        parts: list[tuple[int, Tensor]] = []
        size = 0
        for matrix in shape.matrices:
            tensor = modules[matrix.name][:2][matrix.which].contiguous()
            parts.append((matrix.column, tensor))
            size += tensor.numel()
            if size >= _ELEMENTS or matrix is shape.matrices[-1]:
                place(packed.data, parts)
                parts, size = [], 0
                yield_to_steps()
        return packed

    def packed_shape(self, ranks: Mapping[str, int]) -> PackedShape:
        """Packed shape of adapters whose modules have these ranks."""
        num_rows = max(ranks.values(), default=0)
        live = np.zeros((num_rows, len(self.pieces)), np.uint8)
        found: list[tuple[slice, str, int]] = []
        for name, rank in ranks.items():
            index = self.modules[name]
            found += [(columns, name, which) for which, columns in enumerate(self.pieces[index])]
            live[:rank, index] = 1
        found.sort(key=lambda part: part[0].start)
        spans = _joined([columns for columns, _, _ in found], ALIGNMENT // self.dtype.itemsize)
        remaining = iter(spans)
        start = stop = shift = end = 0
        matrices: list[MatrixColumn] = []
        for columns, name, which in found:
            if columns.start >= stop:  # the next span
                start, stop = next(remaining)
                shift, end = end - start, end + stop - start
            matrices.append(MatrixColumn(name, which, columns.start + shift))
        num_placed = sum(ranks[name] * (columns.stop - columns.start) for columns, name, _ in found)
        return PackedShape(self, tuple(spans), live, matrices, num_placed == num_rows * end)


def _joined(columns: Sequence[slice], gap: int) -> list[tuple[int, int]]:
    """Join ascending columns to spans if they are less than `gap` apart."""
    spans: list[tuple[int, int]] = []
    for part in columns:
        if spans and part.start - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], part.stop)
        else:
            spans.append((part.start, part.stop))
    return spans


class PackedModules(NamedTuple):
    """All weights of one adapter in one model, ready to be copied to the device."""

    linears: PackedRows
    vocabulary: PackedRows
    gains: Mapping[str, Tensor] = MappingProxyType({})
    """By module; see `LoraWeights.gain`."""
    biases: Mapping[str, Tensor] = MappingProxyType({})
    """By module: vector [out] that is added to the module's output."""
    own_rows: Mapping[str, OwnRows] = MappingProxyType({})
    """By module, for the token embeddings, `LM_HEAD` and `SCORE`."""
    invocation: tuple[int, ...] = ()
    """Invocation tokens from which on the weights apply (activated LoRA); (): they apply to all tokens."""
    left_out: tuple[str, ...] = ()
    """Keys in the file of tensors that are not used: those of a vision tower."""

    @property
    def layout(self) -> ModelLayout:
        """Layout of the rows."""
        return ModelLayout(self.linears.layout, self.vocabulary.layout)

    @property
    def rank(self) -> int:
        """The largest rank of the modules; 0 when there are none."""
        return max(len(self.linears.data), len(self.vocabulary.data))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        # The same rows may serve a tied head.
        own = {id(rows.weight): rows.weight for rows in self.own_rows.values()}
        rest = sum(part.nbytes for part in (*self.gains.values(), *self.biases.values(), *own.values()))
        return self.linears.num_bytes + self.vocabulary.num_bytes + rest

    @property
    def bytes_outside_rows(self) -> int:
        """Bytes of device memory in addition to the rank rows of the linears. A tied head's rows are copied for it."""
        own = (rows.weight.nbytes for rows in self.own_rows.values())
        vectors = (part.nbytes for part in (*self.gains.values(), *self.biases.values()))
        return self.vocabulary.data.nbytes + sum(own) + sum(vectors)

    @property
    def vocab_size(self) -> int:
        """Number of the adapter's tokens if it has own rows, else 0."""
        return max((rows.vocab_size for rows in self.own_rows.values()), default=0)

    @property
    def is_plain(self) -> bool:
        """True when it has rank rows and nothing else."""
        return not self.gains and not self.biases and not self.own_rows

    def has(self, name: str) -> bool:
        """Return whether the adapter changes this module."""
        return self.linears.has(name) or self.vocabulary.has(name) or name in self.biases or name in self.own_rows

    def modules(self) -> dict[str, LoraWeights]:
        """Weights by module, as views."""
        matrices = self.linears.weights() | self.vocabulary.weights()
        return {name: LoraWeights(*pair, self.gains.get(name)) for name, pair in matrices.items()}


class ModelLayout(NamedTuple):
    """Layouts of one model. Vocabulary modules and experts have their own: they are as wide as the vocabulary, or very
    many, and few adapters have them."""

    linears: RowLayout
    vocabulary: RowLayout

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.linears.dtype

    def pack(self, modules: Mapping[str, LoraWeights]) -> PackedModules:
        """Copy an adapter's weights to packed rows. Thread-safe."""
        vocabulary = {name: weights for name, weights in modules.items() if name in self.vocabulary.modules}
        linears = {name: weights for name, weights in modules.items() if name not in vocabulary}
        gains = {name: weights.gain for name, weights in modules.items() if weights.gain is not None}
        return PackedModules(self.linears.pack(linears), self.vocabulary.pack(vocabulary), gains)


def latents_of(packed: PackedModules) -> list[str]:
    """Modules of an adapter that are products of latents."""
    modules = packed.linears.layout.modules
    return [name for name in modules if name.endswith(_LATENTS) and packed.has(name)]
