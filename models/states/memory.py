"""Memory of recurrent states, and the plan of a pass over it.

T tokens, B rows, K kernel of the convolution, C channels, S slots, W states that the pass writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.memory import lazy_zeros
from ...kernels.staging import to_device

if TYPE_CHECKING:
    from ..batch import SequenceRows

_TILE = 16
"""Tokens to a multiple of which short runs are padded, so that runs of about one length are computed together."""
CHUNK = 64
"""Tokens of a chunk of long runs, to a multiple of which they are padded."""


class StateSpec(NamedTuple):
    """State of one layer for a sequence."""

    conv: tuple[int, int]
    """[K - 1, C] last inputs of the convolution, in the model's dtype."""
    recurrent: tuple[int, int, int] | None
    """Shape of the recurrent state in float32; None: there is none."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a state."""
        return math.prod(self.conv) * dtype.itemsize + (4 * math.prod(self.recurrent) if self.recurrent else 0)


class LayerStates(NamedTuple):
    """Slots of one layer. Slot 0 is the state of length 0, and stays zero."""

    conv: Tensor
    """[S, K - 1, C]"""
    recurrent: Tensor | None
    """[S, heads, keys, values] float32"""


def allocate_states(
    specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[LayerStates]:
    """Memory of `num_slots` states for each layer, and of slot 0."""
    slots = 1 + num_slots
    return [
        LayerStates(
            lazy_zeros((slots, *spec.conv), dtype, device),
            None if spec.recurrent is None else lazy_zeros((slots, *spec.recurrent), torch.float32, device),
        )
        for spec in specs
    ]


class Run(NamedTuple):
    """Tokens of several rows between two states that are written, computed together."""

    rows: Tensor
    """[G] int64 rows of the pass."""
    tokens: Tensor
    """[G, L] int64 tokens; what `is_padding` marks has no meaning."""
    is_padding: Tensor | None
    """[G, L] True for padding, which follows a row's tokens; None: there is none."""


class Stage(NamedTuple):
    """Runs that start at the same number of writes of their rows, and the writes after them."""

    runs: Sequence[Run]
    written_rows: Tensor
    """[W] int64 rows whose states are written."""
    slots: Tensor
    """[W] int64 slots that they are written to."""


class StatePass:
    """Reads and writes of the states of a pass; the same for all layers."""

    def __init__(self, rows: SequenceRows, memory: Sequence[LayerStates]) -> None:
        """Plan `rows`, whose starts the host knows, over the layers' `memory`."""
        self.memory = memory
        self._device = memory[0].conv.device
        self._lens = rows.query_lens
        self._firsts = [0, *accumulate(rows.query_lens)]
        parts = list(zip(rows.states, rows.starts, rows.query_lens, strict=True))
        self.sources = self._tensor([states.source(start) for states, start, _ in parts])
        """[B] slots of the states that the rows start with."""
        self._writes = [
            [(length - start, slot) for length, slot in states.writes(start, start + count)]
            for states, start, count in parts
        ]
        self._before = memory[0].conv.shape[1]

    def _tensor(self, values: object) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), self._device)

    def _history(self, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Index of inputs among the B · (K - 1) of the rows' states and the T tokens after them; `offsets` from each
        row's first token, -(K - 1) or more."""
        firsts = np.asarray(self._firsts)[rows]
        num_rows = len(self._lens)
        in_state = rows * self._before + self._before + offsets
        return np.where(offsets < 0, in_state, num_rows * self._before + firsts + offsets)

    @cached_property
    def taps(self) -> Sequence[Tensor]:
        """K indices [T] of the inputs of each token's convolution, the oldest first, among those of the rows' states
        [B · (K - 1)] and the tokens [T]."""
        rows = np.repeat(np.arange(len(self._lens)), self._lens)
        offsets = np.arange(self._firsts[-1]) - np.asarray(self._firsts)[rows]
        return [self._tensor(self._history(rows, offsets - back)) for back in range(self._before, -1, -1)]

    @cached_property
    def conv_writes(self) -> tuple[Tensor, Tensor]:
        """Slots [W] that are written, and the index [W, K - 1] of their inputs, as in `taps`."""
        flat = [(row, offset, slot) for row, writes in enumerate(self._writes) for offset, slot in writes]
        rows, offsets, slots = (np.asarray(part) for part in zip(*flat, strict=True))
        index = self._history(rows[:, None], offsets[:, None] - self._before + np.arange(self._before))
        return self._tensor(slots), self._tensor(index)

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """Stages of the pass, in their order: the tokens of a row are divided where a state is written."""
        cuts = [sorted({offset for offset, _ in writes}) for writes in self._writes]
        return [self._stage(index, cuts) for index in range(max(map(len, cuts)))]

    def _stage(self, index: int, cuts: Sequence[Sequence[int]]) -> Stage:
        groups: dict[int, list[tuple[int, int, int]]] = {}
        written: list[tuple[int, int]] = []
        for row, ends in enumerate(cuts):
            if index < len(ends):
                begin, end = ends[index - 1] if index else 0, ends[index]
                count = end - begin
                tile = 1 if count == 1 else _TILE if count < CHUNK else CHUNK
                groups.setdefault(-(-count // tile) * tile, []).append((row, self._firsts[row] + begin, count))
                written += [(row, slot) for offset, slot in self._writes[row] if offset == end]
        runs = []
        for width, members in groups.items():
            rows, firsts, counts = (np.asarray(part) for part in zip(*members, strict=True))
            places = np.arange(width)
            is_padding = places >= counts[:, None]
            tokens = firsts[:, None] + np.minimum(places, counts[:, None] - 1)
            padding = to_device(is_padding, self._device) if is_padding.any() else None
            runs.append(Run(self._tensor(rows), self._tensor(tokens), padding))
        return Stage(runs, *(self._tensor(part) for part in zip(*written, strict=True)))
