"""A draft loop in one graph: a pass over rows of known tokens, then passes of one token a row, each drawn from the
outputs of the one before.

    rows  --pass 0-->  outputs  --draw-->  token 0  --pass 1-->  outputs  --draw-->  token 1  ...

The host copies the rows, the block tables of all passes and the parameters of the draws, and launches the graph once.
A row that wants fewer tokens than others stays at its last position: its later passes write no keys, and nobody reads
what is drawn.

R rows of a shape, B of them real, V tokens of the vocabulary, K tokens drawn for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.graphs import Captured
from ..kernels.noise import Stream, row_salts, salted_row_keys
from ..kernels.paged_attention import RowArrays
from ..kernels.paged_attention.schedule import TILE_FIELDS, Capacity
from ..kernels.staging import staged
from .attention import ReplayablePlan
from .attention.tables import RowTables
from .batch import ForwardBatch, SequenceRows
from .pass_graphs import GraphedPass, PassInputs, PassShape, bucket

MAX_PROBS_BYTES = 64 << 20
"""Most bytes of the distributions [K, R, V] that a graph keeps for rejection sampling. Larger loops are launched pass
by pass: graphs must fit into the memory that is left beside the KV cache."""


class Draws(NamedTuple):
    """Parameters of the draws of B rows, on the host."""

    num_wanted: Sequence[int]
    """[B] tokens to draw, at most K each. 0: the row's first pass is computed, and nothing else."""
    seed_keys: Sequence[int] = ()
    """[B] seed keys; empty: all rows are greedy."""
    streams: Sequence[Stream | None] = ()
    """[B] stream of each row's noise; None: the most likely token."""
    heat: Sequence[float] = ()
    top_k: Sequence[int] = ()
    top_p: Sequence[float] = ()
    min_p: Sequence[float] = ()
    keeps_probs: bool = False
    """Whether the distributions are returned, as rejection sampling needs them."""


class Drawn(NamedTuple):
    """Tokens that were drawn, valid until the next pass."""

    tokens: Tensor
    """[K, R] int64. What a row did not want has no meaning."""
    probs: Tensor | None
    """[K, R, V] float32: the distributions, if they are kept."""


class _Key(NamedTuple):
    """Key of loops that launch the same work."""

    shape: PassShape
    num_tokens: int
    """K"""
    sampled: bool
    keeps_probs: bool


_POSITION, _LEFT, _SALT, _NOISY, _TOP_K, _HEAT, _TOP_P, _LOG_MIN_P = range(8)
"""Rows of the array of a loop's numbers: int64, the last three with the bits of float64."""


class PassChain(GraphedPass):
    """Passes of a drafter, and loops of them. `Compute` returns (hidden [R, H] that the next pass reads as its states,
    logits [R, V'], the most likely tokens [R])."""

    def __init__(self, *args: Any, widen: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """See `GraphedPass`. `widen`: function from a pass's logits [R, V'] to those of the target's vocabulary [R, V];
        it runs in a graph. `vocab_size`: V."""
        super().__init__(*args)
        self._widen, self._vocab_size = widen, vocab_size
        # An even number: kernels are compiled for parameters that begin at multiples of 16 bytes.
        max_rows = -(-bucket(self._graphs.limits.max_rows) // 2) * 2
        device = self._model.device
        self._draws = torch.zeros(8, max_rows, dtype=torch.int64, device=device)
        entries = (max_rows + 1) * TILE_FIELDS + max_rows * (1 + self._blocks_per_row)
        self._next_storage = torch.zeros(entries, dtype=torch.int32, device=device)
        self._each = torch.arange(max_rows, device=device)
        self._next_plans: dict[int, ReplayablePlan] = {}
        self._loops: dict[_Key, Captured] = {}

    def loop(
        self,
        rows: SequenceRows,
        handles: Sequence[tuple[Any, int]],
        states: Tensor | None,
        draws: Draws,
    ) -> Drawn | None:
        """Run the pass over `rows`, then passes over the tokens drawn. None, and nothing is done, when the passes must
        be launched one by one.

        Args:
            rows: B rows, with KV blocks for all positions but that of the last token drawn.
            handles, states: see `run`.
        """
        shape, num_tokens = self._shape(rows), max(draws.num_wanted)
        if shape is None or shape.has_long:
            return None
        last = np.array(rows.starts) + np.array(rows.query_lens) - 1
        left = np.maximum(np.array(draws.num_wanted) - 1, 0)
        if (last + left).max() >= self._graphs.limits.max_positions:
            return None
        if draws.keeps_probs and num_tokens * shape.rows * self._vocab_size * 4 > MAX_PROBS_BYTES:
            return None
        if any(prepare([*handles]) is not None for prepare in self._preparers):
            return None  # the passes' tokens lie differently, and there is memory for one order of them
        self._fill(shape, rows, states)
        self._fill_next(shape.rows, rows, last, left)
        self._fill_draws(rows, last, left, draws)
        key = _Key(shape, num_tokens, bool(draws.seed_keys), draws.keeps_probs)
        found = self._graphs.run(self._loops, key, lambda: self._compute_loop(key))
        return None if found is None else Drawn(found[0], found[1] if draws.keeps_probs else None)

    def _fill_next(self, num_rows: int, rows: SequenceRows, last: np.ndarray, left: np.ndarray) -> None:
        """Copy the tables of the passes of one token, for which the host does not wait."""
        reach = SequenceRows([], (1 + left).tolist(), last.tolist(), rows.block_tables, rows.first_key)
        tables = RowTables(reach, self._block_size)
        count = len(last)
        self._next_plan(num_rows).refill(
            RowArrays(
                slots=np.full(count, -1),
                query_lens=np.ones(count, dtype=np.int64),
                starts=tables.starts,
                token_starts=np.arange(count),
                table_starts=tables.table_starts,
                blocks=tables.table,
            )
        )

    def _fill_draws(self, rows: SequenceRows, last: np.ndarray, left: np.ndarray, draws: Draws) -> None:
        """Copy the numbers of the loop, for which the host does not wait."""
        count = len(last)
        numbers = np.zeros(self._draws.shape, dtype=np.int64)
        numbers[_POSITION] = self._options.first_key  # any position there is
        numbers[_POSITION, :count], numbers[_LEFT, :count] = last, left
        floats = numbers.view(np.float64)
        floats[_HEAT:_LOG_MIN_P], floats[_LOG_MIN_P] = 1.0, -np.inf
        if draws.seed_keys:
            noisy = np.array([stream is not None for stream in draws.streams])
            numbers[_NOISY, :count] = noisy
            numbers[_SALT, :count] = row_salts(draws.seed_keys, [int(stream or 0) for stream in draws.streams])
            numbers[_TOP_K, :count] = np.where(noisy, np.maximum(draws.top_k, 0), 0)
            floats[_HEAT, :count] = np.where(noisy, draws.heat, 1.0)
            floats[_TOP_P, :count] = np.where(noisy, draws.top_p, 1.0)
            with np.errstate(divide="ignore"):
                floats[_LOG_MIN_P, :count] = np.log(np.where(noisy, draws.min_p, 0.0))
        self._draws.copy_(staged(numbers, self._draws.device), non_blocking=True)
        for early in (rows.overshoot, rows.unused):
            if early is not None:
                self._draws[_POSITION, :count].sub_(early)

    def _next_plan(self, num_rows: int) -> ReplayablePlan:
        if num_rows not in self._next_plans:
            capacity = Capacity(num_rows, 1, num_rows, num_rows * self._blocks_per_row)
            self._next_plans[num_rows] = self._attention.reserve(
                capacity, self._block_size, self._options.first_key, self._next_storage
            )
        return self._next_plans[num_rows]

    def _compute_loop(self, key: _Key) -> tuple[Tensor, ...]:
        """Compute the passes and draws over the inputs that were copied."""
        num_rows, plan = key.shape.rows, self._next_plans[key.shape.rows]
        first, left = self._draws[_POSITION, :num_rows], self._draws[_LEFT, :num_rows]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        outputs = self._work(key.shape, (None,) * len(self._preparers))
        for step in range(key.num_tokens):
            if step:
                positions = first.clone()
                plan.advance(first, left, positions, step)
                rotations = self._model.rope.rotations(positions, self._graphs.limits.max_positions)
                batch = ForwardBatch(tokens[-1].clone(), positions, rotations, plan, self._kv)
                states = outputs[0] if self._states is not None else None
                outputs = self._compute(batch, PassInputs(self._each[:num_rows], states, (None,)))
            token = outputs[2]
            if key.sampled:
                noisy, filtered = self._draw(self._widen(outputs[1]), first + (1 + step))
                token = torch.where(self._draws[_NOISY, :num_rows] > 0, noisy, token)
                if key.keeps_probs:
                    probs.append(filtered.softmax(dim=-1))
            tokens.append(token)
        return torch.stack(tokens), *([torch.stack(probs)] if probs else [])

    def _draw(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [R] at these positions by the rows' parameters, and the filtered logits [R, V]."""
        from ..kernels.noise.triton import gumbel_argmax
        from ..kernels.sampling.triton import launch_filter

        numbers = self._draws[:, : len(logits)]
        filtered = torch.empty_like(logits)
        parameters = [numbers[row].view(torch.float64) for row in (_HEAT, _TOP_P, _LOG_MIN_P)]
        launch_filter(logits, filtered, [parameters[0], numbers[_TOP_K], *parameters[1:]])
        scores = filtered - filtered.amax(dim=-1, keepdim=True)
        return gumbel_argmax(scores, salted_row_keys(numbers[_SALT], positions)), filtered
