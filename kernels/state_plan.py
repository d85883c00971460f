"""Plan of a pass over recurrent states: which slots its rows read and write, and which tokens are computed together.

T tokens, B rows, K kernel of a convolution, W states that the pass writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .staging import to_device

_TILE = 16
"""Tokens to a multiple of which short runs are padded, so that runs of about one length are computed together."""
CHUNK = 64
"""Tokens of a chunk of long runs, to a multiple of which they are padded."""
MAX_TOKENS = 32
"""Longest row of a pass that GPUs compute token by token, and not in chunks as products of matrices, which have 64 rows
whatever a chunk has. The bound has not been measured on a GPU."""


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


class StatePlan:
    """Reads and writes of the states of a pass; the same for all layers."""

    def __init__(
        self,
        lens: Sequence[int],
        sources: Sequence[int],
        writes: Sequence[Sequence[tuple[int, int]]],
        history: int,
        device: torch.device,
    ) -> None:
        """Plan B rows.

        Args:
            lens: Tokens of each row.
            sources: Slot of the state that each row starts with.
            writes: (tokens of the row before the state, slot) of the states that each row writes, in ascending order.
            history: K - 1, inputs of a convolution that a state holds.
            device: Device of the states.
        """
        self._lens, self._writes, self._before, self._device = lens, writes, history, device
        self._sources = sources
        self._firsts = [0, *accumulate(lens)]

    def _tensor(self, values: object) -> Tensor:
        return to_device(np.asarray(values, dtype=np.int64), self._device)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self._lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._firsts[-1]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self._lens)

    @cached_property
    def sources(self) -> Tensor:
        """[B] slots of the states that the rows start with."""
        return self._tensor(self._sources)

    @cached_property
    def table(self) -> Tensor:
        """The plan as kernels read it, one int64 array: the first token of each row and T [B + 1]; the slot of its
        start [B]; the index of its first write and W [B + 1]; the tokens before each write [W], and its slot [W]."""
        write_firsts = [0, *accumulate(map(len, self._writes))]
        offsets, slots = ([write[part] for row in self._writes for write in row] for part in (0, 1))
        return self._tensor([*self._firsts, *self._sources, *write_firsts, *offsets, *slots])

    @cached_property
    def _chunk_counts(self) -> Sequence[Sequence[int]]:
        """Tokens of each row's chunks: at most CHUNK, and none continues after a state that is written."""
        counts = []
        for length, writes in zip(self._lens, self._writes, strict=True):
            ends = sorted({*range(0, length, CHUNK), length, *(offset for offset, _ in writes)})
            counts.append([end - begin for begin, end in pairwise(ends)])
        return counts

    @property
    def num_chunks(self) -> int:
        """C, chunks of all rows."""
        return sum(map(len, self._chunk_counts))

    @cached_property
    def chunks(self) -> Tensor:
        """Chunks of all rows as kernels read them, one int64 array: the first token of each [C], its tokens [C]; the
        index of each row's first chunk, and C [B + 1]."""
        counts = [count for row in self._chunk_counts for count in row]
        firsts = accumulate(counts[:-1], initial=0)
        return self._tensor([*firsts, *counts, 0, *accumulate(map(len, self._chunk_counts))])

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

    def compute(
        self, memory: Tensor, out: Tensor, compute_run: Callable[[Run, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Compute all runs in their order, and write the states of `memory` [S, ...].

        Args:
            memory: States in their slots.
            out: [T, ...] filled with the results and returned.
            compute_run: Function from a run and the states [G, ...] before it to the results [G, L, ...] and the states
                after it.
        """
        running = memory.index_select(0, self.sources)
        for stage in self.stages:
            for run in stage.runs:
                result, after = compute_run(run, running.index_select(0, run.rows))
                if run.is_padding is None:
                    out[run.tokens] = result
                else:
                    out[run.tokens[~run.is_padding]] = result[~run.is_padding]
                running.index_copy_(0, run.rows, after)
            memory[stage.slots] = running.index_select(0, stage.written_rows)
        return out

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
