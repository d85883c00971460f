"""A draft loop in one graph: a pass over rows of known tokens, then passes of one token a row, each drawn from the
outputs of the one before.

    rows  --pass 0-->  outputs  --draw-->  token 0  --pass 1-->  outputs  --draw-->  token 1  ...

The host copies the rows, the block tables of all passes and the parameters of the draws, and launches the graph once.
A row that wants fewer tokens than the loop draws stays at its last position: its later passes write no keys, and what
they draw is not read. So a loop serves whatever fits into its shape.

R rows of a shape, B of them real, V tokens of the vocabulary, K tokens drawn for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.graphs import Captured
from ..kernels.noise import ROUND, Stream, row_salts, salted_row_keys
from ..kernels.paged_attention import RowArrays
from ..kernels.paged_attention.schedule import TILE_FIELDS, Capacity
from ..kernels.staging import staged
from .attention import ReplayablePlan
from .attention.tables import RowTables
from .batch import ForwardBatch, SequenceRows
from .pass_graphs import GraphedPass, PassInputs
from .pass_grid import LoopShape, bucket

MAX_PROBS_BYTES = 64 << 20
"""Most bytes of the distributions [K, R, V] that loops keep for rejection sampling; all share this memory. Larger loops
are launched pass by pass: graphs must fit into the memory that the KV cache leaves."""


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
    """True if the distributions are returned, as rejection sampling needs them."""


class Drawn(NamedTuple):
    """Tokens that were drawn, valid until the next pass."""

    tokens: Tensor
    """[K, R] int64. What a row did not want has no meaning."""
    probs: Tensor | None
    """[K, R, V] float32: the distributions, if they are kept."""


_POSITION, _LEFT, _SALT, _STEP, _TOP_K, _HEAT, _TOP_P, _LOG_MIN_P = range(8)
"""Rows of the array of a loop's numbers: int64, the last three with the bits of float64. `_STEP`: positions in the
noise between two tokens of the sequence (see `noise.ROUND`), 0 for greedy rows."""


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
        self._loops: dict[LoopShape, Captured] = {}
        loops = self._graphs.grid.loops if self._shapes else ()
        self._loop_shapes = [loop for loop in loops if self._can_hold(loop)]
        sizes = [loop.num_drafts * loop.first.rows for loop in self._loop_shapes if loop.sampled]
        self._probs = torch.empty(max(sizes, default=0) * vocab_size, dtype=torch.float32, device=device)

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
        last = np.array(rows.starts) + np.array(rows.query_lens) - 1
        left = np.maximum(np.array(draws.num_wanted) - 1, 0)
        if (last + left).max() >= self._graphs.limits.max_positions or self._shape(rows) is None:
            return None
        loop = self._loop_shape(rows, draws)
        # Rows of adapters that have weights here lie in another order, and there is memory for one order of them.
        if loop is None or any(prepare([*handles]) is not None for prepare in self._preparers):
            return None
        self._fill(loop.first, rows, states)
        self._fill_next(loop.first.rows, rows, last, left)
        self._fill_draws(rows, last, left, draws)
        tokens, probs = self._graphs.run(self._loops[loop])
        return Drawn(tokens, probs if draws.keeps_probs else None)

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """See `Capturable`."""
        yield from super().captures()
        for loop in self._loop_shapes:
            yield loop.first.tokens, partial(self._capture_loop, loop)

    def clear(self) -> None:
        """See `Capturable`."""
        super().clear()
        self._loops.clear()
        self._next_plans.clear()

    def _can_hold(self, loop: LoopShape) -> bool:
        """True when there is memory for the loop's inputs and outputs."""
        tokens = max(shape.tokens for shape in self._shapes)
        num_bytes = 4 * loop.num_drafts * loop.first.rows * self._vocab_size if loop.sampled else 0
        return (
            loop.first.tokens <= tokens
            and loop.first.queries <= self._attention.max_queries
            and num_bytes <= MAX_PROBS_BYTES
        )

    def _loop_shape(self, rows: SequenceRows, draws: Draws) -> LoopShape | None:
        """The cheapest loop that serves the rows, of those that are captured."""
        num_drafts, sampled = max(draws.num_wanted), bool(draws.seed_keys)
        for loop in self._loop_shapes:
            if (
                loop.num_drafts >= num_drafts
                and loop.sampled == sampled
                and loop.first.fits(rows.query_lens, self._attention.max_queries)
                and loop in self._loops
            ):
                return loop
        return None

    def _capture_loop(self, loop: LoopShape) -> None:
        """Capture a loop; without rows all tokens are padding."""
        empty = RowArrays(*[np.empty(0, dtype=np.int64)] * len(RowArrays._fields))
        rows = SequenceRows([], [], [], [], self._options.first_key)
        self._fill_padding(loop.first)
        self._next_plan(loop.first.rows).refill(empty)
        self._fill_draws(rows, np.empty(0), np.empty(0), Draws([]))
        self._graphs.capture(self._loops, loop, lambda: self._compute_loop(loop))

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
            numbers[_STEP, :count] = np.where([stream is Stream.DRAFT for stream in draws.streams], ROUND, noisy)
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

    def _compute_loop(self, loop: LoopShape) -> tuple[Tensor, ...]:
        """Compute the passes and draws over the inputs that were copied."""
        num_rows = loop.first.rows
        plan = self._next_plans[num_rows]
        first, left = self._draws[_POSITION, :num_rows], self._draws[_LEFT, :num_rows]
        tokens: list[Tensor] = []
        probs = self._probs[: loop.num_drafts * num_rows * self._vocab_size if loop.sampled else 0]
        probs = probs.view(loop.num_drafts if loop.sampled else 0, num_rows, self._vocab_size)
        outputs = self._work(loop.first, (None,) * len(self._preparers))
        apart = self._draws[_STEP, :num_rows]
        drawn_at = (first + 1) * apart if loop.sampled else first
        for step in range(loop.num_drafts):
            if step:
                positions = first.clone()
                plan.advance(first, left, positions, step)
                rotations = self._model.rope.rotations(positions, self._graphs.limits.max_positions)
                batch = ForwardBatch(tokens[-1].clone(), positions, rotations, plan, self._kv)
                states = outputs[0] if self._states is not None else None
                outputs = self._compute(batch, PassInputs(self._each[:num_rows], states, (None,)))
            token = outputs[2]
            if loop.sampled:
                noisy, filtered = self._draw(self._widen(outputs[1]), drawn_at + step)
                token = torch.where(apart > 0, noisy, token)
                torch.softmax(filtered, dim=-1, out=probs[step])
            tokens.append(token)
        return torch.stack(tokens), probs

    def _draw(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [R] at these positions in the noise by the rows' parameters, and the filtered logits [R, V]."""
        from ..kernels.noise.triton import gumbel_argmax
        from ..kernels.sampling.triton import launch_filter

        numbers = self._draws[:, : len(logits)]
        filtered = torch.empty_like(logits)
        parameters = [numbers[row].view(torch.float64) for row in (_HEAT, _TOP_P, _LOG_MIN_P)]
        launch_filter(logits, filtered, [parameters[0], numbers[_TOP_K], *parameters[1:]])
        scores = filtered - filtered.amax(dim=-1, keepdim=True)
        return gumbel_argmax(scores, salted_row_keys(numbers[_SALT], positions)), filtered
