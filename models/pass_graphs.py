"""Forward passes that are replayed from captured graphs: decodes, verifications, and the passes of drafters.

    rows  --grid-->  PassShape  --inputs into tensors at fixed addresses-->  replay  -->  outputs

Rows may differ in length (drafts that were cut short, parts of prompts between decodes): the attention plan holds each
row's start, and all else sees tokens only. Padding tokens fill the shape. They have no slot in the cache and belong to
no row and no adapter, and nothing reads their outputs.

All shapes are captured before the first request (`PassGraphs.capture_ahead`), by the same code that a step runs without
graphs. Nothing is captured later: a pass that fits into no captured shape is launched kernel by kernel, and counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.graphs import Captured, GraphBackend
from ..kernels.paged_attention import RowArrays
from ..kernels.paged_attention.schedule import TILE_FIELDS, Capacity
from ..kernels.staging import staged
from .attention import ReplayableAttention, ReplayablePlan
from .attention.tables import RowTables
from .batch import AdapterPreparer, ForwardBatch, LayerKV, PagedModel, SequenceRows
from .pass_grid import Grid, PassLimits, PassShape, bucket, make_grid, spread

log = logging.getLogger(__name__)


class Capturable(Protocol):
    """Passes that are captured before the first request."""

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Return the number of tokens and a function that captures a pass, for each of the passes."""

    def clear(self) -> None:
        """Drop the captured passes and their memory."""


K = TypeVar("K")
C = TypeVar("C", bound=Capturable)


@dataclass(slots=True)
class PassGraphs:
    """Captured passes of an engine: their grid, their shared memory and their counts."""

    backend: GraphBackend
    limits: PassLimits
    num_captured: int = 0
    num_replayed: int = 0
    num_single: int = 0
    """Passes that were launched kernel by kernel, because no captured shape served them."""
    sealed: bool = False
    """True when nothing is captured any more: after `capture_ahead`, a failed capture, or as many graphs as may be."""
    grid: Grid = field(init=False)
    _owners: list[Capturable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grid = make_grid(self.limits)

    def of(
        self,
        model: PagedModel,
        kv: Sequence[LayerKV],
        compute: Compute,
        preparers: Sequence[AdapterPreparer],
        options: PassOptions | None = None,
    ) -> GraphedPass | None:
        """Passes of a model over its layers `kv`; None when its attention cannot be captured."""
        attention = model.attention
        if not isinstance(attention, ReplayableAttention):
            return None
        return self.add(GraphedPass(self, model, attention, kv, compute, preparers, options or PassOptions()))

    def add(self, owner: C) -> C:
        """Have `capture_ahead` capture these passes too; returns them."""
        self._owners.append(owner)
        return owner

    def captures(self, model: PagedModel) -> bool:
        """True when `of` gives passes for the model."""
        return isinstance(model.attention, ReplayableAttention)

    def row_logits(self, vocab_size: int, device: torch.device) -> Tensor:
        """Memory [rows of the largest shape, vocab_size] float32 for the logits of rows' last tokens, so that graphs
        share it. Call it before the KV cache is allocated, which gets the memory that is left."""
        return torch.empty(bucket(self.limits.max_rows), vocab_size, dtype=torch.float32, device=device)

    def token_logits(self, vocab_size: int, device: torch.device) -> Tensor:
        """Memory [tokens of the largest shape of decodes, vocab_size] float32 for logits of all tokens, shared by the
        graphs."""
        return torch.empty(self.grid.max_tokens, vocab_size, dtype=torch.float32, device=device)

    @torch.inference_mode()
    def capture_ahead(self, seconds: float = math.inf, clock: Callable[[], float] = time.perf_counter) -> None:
        """Capture all passes, the largest first, so that the others fit into its memory; after about `seconds` no
        further ones. Passes whose shape is not captured use the next larger one. Captures nothing afterwards."""
        ends = clock() + seconds
        work = [entry for owner in self._owners for entry in owner.captures()]
        for _, capture in spread(sorted(work, key=lambda entry: -entry[0])):
            if self.sealed:
                break
            if clock() >= ends:
                log.warning("%d of %d graphs were captured in %.0f s", self.num_captured, len(work), seconds)
                break
            capture()
        self.sealed = True

    def clear(self) -> None:
        """Drop all captured passes and their memory, and capture none any more."""
        self.sealed = True
        for owner in self._owners:
            owner.clear()
        self._owners.clear()

    def run(self, captured: Captured, begin: Callable[[], None] | None = None) -> tuple[Tensor, ...]:
        """Replay a graph; returns its outputs. `begin` is called first."""
        if begin is not None:
            begin()
        captured.replay()
        self.num_replayed += 1
        return captured.outputs

    def capture(self, kept: dict[K, Captured], key: K, work: Callable[[], tuple[Tensor, ...]]) -> None:
        """Capture `work` as the graph of `key` in `kept`. If that fails, or there are as many graphs as may be, a
        warning is logged and nothing is captured any more."""
        if self.sealed:
            return
        if self.num_captured >= self.limits.max_graphs:
            self.sealed = True
            log.warning(
                "%d graphs are captured, and no more may be: other passes are launched singly", self.num_captured
            )
            return
        try:
            kept[key] = self.backend.capture(work)
        except RuntimeError as error:  # of an OutOfMemoryError too
            self.sealed = True
            log.warning("a graph could not be captured, which costs speed: no more are tried (%s)", error)
            return
        self.num_captured += 1


class PassOptions(NamedTuple):
    """Differences between kinds of passes."""

    first_key: int = 0
    """First position that holds keys."""
    state_size: int = 0
    """Elements for each token of the states that the pass reads in addition to tokens; 0: none."""
    state_dtype: torch.dtype = torch.float32
    decodes: bool = True
    """True if decodes and verifications have shapes."""
    prompts: bool = True
    """True if passes with parts of prompts have shapes."""
    has_base: bool = False
    """True if passes without adapters have graphs of their own, in an engine with adapters. Those of a drafter share
    one: its kernels for adapters have nothing to do and end at once."""


class PassInputs(NamedTuple):
    """Inputs of `Compute` in addition to the batch, in tensors at fixed addresses."""

    last: Tensor
    """[rows] int64: last token of each row."""
    states: Tensor | None
    """[tokens, state_size]"""
    adapters: tuple[Any, ...]
    """Result of each of the preparers; the first is the batch's."""


Compute = Callable[[ForwardBatch, PassInputs], tuple[Tensor, ...]]
"""Function that computes the pass; its outputs are [tokens, ...] or [rows, ...] each. It reads no host value that may
differ the next time."""


class _Key(NamedTuple):
    """Key of passes that launch the same work."""

    shape: PassShape
    adapted: bool
    """True if the kernels of adapters are launched."""


class GraphedPass:
    """Passes of one model, captured for each shape of the grid. Not thread-safe, and one pass at a time."""

    def __init__(
        self,
        graphs: PassGraphs,
        model: PagedModel,
        attention: ReplayableAttention,
        kv: Sequence[LayerKV],
        compute: Compute,
        preparers: Sequence[AdapterPreparer],
        options: PassOptions,
    ) -> None:
        """See `PassGraphs.of`."""
        self._graphs, self._model, self._attention, self._kv = graphs, model, attention, kv
        self._compute, self._preparers, self._options = compute, preparers, options
        self._block_size = kv[0].k.shape[2]
        grid = graphs.grid
        shapes = [*grid.decodes * options.decodes, *grid.prompts * options.prompts]
        most = attention.max_queries
        self._shapes = [
            shape if shape.queries <= most else shape._replace(queries=most, has_long=True)
            for shape in sorted(shapes, key=lambda shape: (shape.tokens, shape.rows))
        ]
        max_rows = graphs.limits.max_rows
        max_tokens = max((shape.tokens for shape in shapes), default=0)
        self._blocks_per_row = -(-graphs.limits.max_positions // self._block_size)
        device = model.device
        self._numbers = torch.zeros(2 * max_tokens + max_rows, dtype=torch.int64, device=device)
        tiles = max_rows + 1 + attention.max_long_tiles(max_tokens)
        entries = tiles * TILE_FIELDS + max_rows * self._blocks_per_row + max_tokens
        self._storage = torch.zeros(entries, dtype=torch.int32, device=device)
        self._states: Tensor | None = None
        if options.state_size:
            self._states = torch.zeros(max_tokens, options.state_size, dtype=options.state_dtype, device=device)
        self._plans: dict[PassShape, ReplayablePlan] = {}
        self._captured: dict[_Key, Captured] = {}

    def run(
        self,
        rows: SequenceRows,
        handles: Sequence[tuple[Any, int]],
        states: Tensor | None = None,
        begin: Callable[[], None] | None = None,
        *,
        counts: bool = True,
    ) -> tuple[Tensor, ...] | None:
        """Run the pass over `rows`, padded. None when it must run without a graph.

        Args:
            handles: (adapter, number of tokens) of each row.
            states: [T, state_size], for passes that read states.
            begin: Called before the replay, if there is one.
            counts: Whether a pass without a graph is counted. False for callers that have another graph to try.

        Returns:
            Results of `Compute`, valid until the next pass. Entries beyond the rows and their tokens have no meaning.
        """
        found = self._find(rows, handles)
        if found is None:
            self._graphs.num_single += counts
            return None
        shape, captured = found
        self._fill(shape, rows, states)
        return self._graphs.run(captured, begin)

    def _find(self, rows: SequenceRows, handles: Sequence[tuple[Any, int]]) -> tuple[PassShape, Captured] | None:
        """The shape and the graph that serve the rows; the inputs of their adapters are filled in."""
        shape = self._shape(rows)
        if shape is None:
            return None
        padding = shape.tokens - len(rows.token_ids)
        padded = [*handles, (None, padding)] if padding else handles
        adapters, adapted = self._adapters(padded, always=_Key(shape, False) not in self._captured)
        captured = self._captured.get(_Key(shape, adapted))
        if captured is None or not all(batch is None or batch.replayable for batch in adapters):
            return None
        return shape, captured

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """See `Capturable`."""
        can_adapt = any(prepare([(None, 1)], always=True) is not None for prepare in self._preparers)
        for shape in self._shapes:
            if can_adapt:
                yield shape.tokens, partial(self._capture, shape, True)
            if self._options.has_base or not can_adapt:
                yield shape.tokens, partial(self._capture, shape, False)

    def clear(self) -> None:
        """See `Capturable`."""
        self._captured.clear()
        self._plans.clear()

    def _adapters(self, rows: Sequence[tuple[Any, int]], *, always: bool) -> tuple[tuple[Any, ...], bool]:
        """Results of the preparers, and whether kernels of adapters are launched. What the first one returns decides
        about the others: adapters that change logits change tokens too."""
        adapters = []
        for prepare in self._preparers:
            adapters.append(batch := prepare(rows, always=always))
            always |= batch is not None
        return tuple(adapters), any(batch is not None for batch in adapters)

    def _capture(self, shape: PassShape, adapted: bool) -> None:
        """Capture the pass of a shape; without rows all tokens are padding."""
        adapters, _ = self._adapters([(None, shape.tokens)], always=adapted)
        self._fill_padding(shape)
        self._graphs.capture(self._captured, _Key(shape, adapted), lambda: self._work(shape, adapters))

    def _fill_padding(self, shape: PassShape) -> None:
        """Have the graphs of this shape read padding tokens alone."""
        self._numbers.zero_()
        self._numbers[shape.tokens : 2 * shape.tokens] = self._options.first_key
        self._plan(shape).refill(RowArrays(*[np.empty(0, dtype=np.int64)] * len(RowArrays._fields)))

    def _shape(self, rows: SequenceRows) -> PassShape | None:
        """The smallest captured shape that the rows fit into."""
        if rows.first_key != self._options.first_key:
            return None
        if rows.long_prompts(self._model.rope.short_context):  # graphs know positions, not prompts
            return None
        if max(map(sum, zip(rows.starts, rows.query_lens, strict=True))) > self._graphs.limits.max_positions:
            return None
        most, captured = self._attention.max_queries, self._captured
        for shape in self._shapes:
            is_captured = _Key(shape, True) in captured or _Key(shape, False) in captured
            if is_captured and shape.fits(rows.query_lens, most):
                return shape
        return None

    def _fill(self, shape: PassShape, rows: SequenceRows, states: Tensor | None) -> None:
        """Copy the rows to the tensors that the graphs of this shape read, in two copies that nothing waits for."""
        num_tokens, tokens = len(rows.token_ids), shape.tokens
        tables = RowTables(rows, self._block_size)
        positions = np.arange(num_tokens) + np.repeat(tables.starts - tables.token_starts, tables.query_lens)
        numbers = np.zeros(2 * tokens + shape.rows, dtype=np.int64)
        numbers[:num_tokens] = rows.token_ids
        numbers[tokens:][:num_tokens] = positions
        numbers[tokens + num_tokens : 2 * tokens] = self._options.first_key  # any position there is
        numbers[2 * tokens :][: len(rows.query_lens)] = tables.token_starts + tables.query_lens - 1
        self._numbers[: len(numbers)].copy_(staged(numbers, self._numbers.device), non_blocking=True)
        for part in rows.device_tokens:
            part.fill(self._numbers)
        plan = self._plan(shape)
        plan.refill(tables.arrays(positions))
        if rows.overshoot is not None:
            plan.settle(rows.overshoot, self._numbers[tokens:][:num_tokens])
        if rows.unused is not None:
            self._numbers[2 * tokens :][: len(rows.query_lens)].sub_(rows.unused)
        if states is not None:
            assert self._states is not None
            self._states[:num_tokens].copy_(states)

    def _plan(self, shape: PassShape) -> ReplayablePlan:
        if shape not in self._plans:
            rows, queries, tokens, has_long = shape
            capacity = Capacity(rows, queries, tokens, rows * self._blocks_per_row, has_long)
            plan = self._attention.reserve(capacity, self._block_size, self._options.first_key, self._storage)
            # Without rows this does nothing, but compiles the kernel now instead of in the first step that is planned
            # too far.
            plan.settle(self._numbers.new_zeros(1), self._numbers)
            self._plans[shape] = plan
        return self._plans[shape]

    def _work(self, shape: PassShape, adapters: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Compute the pass over the inputs that `_fill` has copied."""
        ids, positions, last = self._numbers[: 2 * shape.tokens + shape.rows].split(
            [shape.tokens, shape.tokens, shape.rows]
        )
        # The tables reach to the last position at once: a graph must not hold tables that are replaced when they grow.
        rotations = self._model.rope.rotations(positions, self._graphs.limits.max_positions)
        batch = ForwardBatch(ids, positions, rotations, self._plans[shape], self._kv, adapters=adapters[0])
        states = None if self._states is None else self._states[: shape.tokens]
        return self._compute(batch, PassInputs(last, states, adapters))
