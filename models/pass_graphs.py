"""Forward passes that are replayed from captured graphs: decodes, verifications, and the passes of drafters.

    rows  --bucket-->  PassShape  --inputs into tensors at fixed addresses-->  replay  -->  outputs


A pass is a graph when it has few tokens. Rows may differ in length (drafts that were cut short, parts of prompts
between decodes): the attention plan holds each row's start, and all else sees tokens only. Padding tokens fill the
shape. They have no slot in the cache and belong to no row and no adapter, and nothing reads their outputs.

A shape is captured at its first use, by the same code that a step runs without graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.graphs import Captured, GraphBackend
from ..kernels.paged_attention.schedule import TILE_FIELDS, Capacity
from ..kernels.staging import staged
from .attention import ReplayableAttention, ReplayablePlan
from .attention.tables import RowTables
from .batch import ForwardBatch, LayerKV, PagedModel, SequenceRows

log = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Most tokens of a captured pass. With more tokens the device has so much to do that the host keeps ahead of it."""
MAX_GRAPHS = 128
"""Most graphs of all passes: each takes some megabytes of the driver's memory."""
PADDED_TOKENS = 128
"""Most tokens of a pass that is padded in every row: so few take no longer than half of them, and shapes are fewer."""
_LEAST_PROMPT = 32
"""Fewest tokens of a pass with long rows."""
OFTEN = 3
"""Uses after which a shape gets one of the last quarter of the graphs: rare shapes, as ragged numbers of drafts and
adapters bring, leave room for common ones."""

Preparer = Callable[[Sequence[tuple[Any, int]]], Any]
"""Function from each row's (adapter handle, number of tokens) to the input of the adapters' layers, whose `replayable`
is True when captured launches serve it."""


class PassShape(NamedTuple):
    """Shape to which a pass is padded."""

    rows: int
    queries: int
    """Most queries in a short row."""
    tokens: int
    """Tokens of all rows together."""
    has_long: bool = False
    """Whether there are rows of more queries, as parts of prompts are."""


def bucket(count: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def shape_of(
    query_lens: Sequence[int], max_queries: int, max_rows: int, max_tokens: int = MAX_TOKENS
) -> PassShape | None:
    """Shape for these rows, of which those with more than `max_queries` are long; None when they are too many. Few
    shapes serve all rows: of short ones a shape is their number, and their most and (where padding would cost much)
    average tokens; where there are long ones all is rounded up further."""
    short = [count for count in query_lens if count <= max_queries]
    queries = min(bucket(max(short, default=1)), max_queries)
    if len(short) < len(query_lens):
        tokens = max(_LEAST_PROMPT, 1 << (sum(query_lens) - 1).bit_length())
        rows = 1
        while rows < len(query_lens):
            rows *= 4
        return PassShape(min(rows, bucket(max_rows)), queries, tokens, True) if tokens <= max_tokens else None
    rows = bucket(len(query_lens))
    tokens = rows * queries
    if tokens > min(PADDED_TOKENS, max_tokens):
        tokens = rows * -(-sum(query_lens) // rows)
    return PassShape(rows, queries, tokens) if tokens <= max_tokens else None


class PassLimits(NamedTuple):
    """Limits that captured passes are sized for."""

    max_rows: int
    max_positions: int
    """Most positions of a sequence."""
    max_tokens: int = MAX_TOKENS
    max_graphs: int = MAX_GRAPHS
    max_verified: int = MAX_TOKENS
    """Most tokens of a pass that gives logits of all of them."""


K = TypeVar("K")


@dataclass(slots=True)
class PassGraphs:
    """Captured passes of an engine: their shared memory and the use of their shapes."""

    backend: GraphBackend
    limits: PassLimits
    num_captured: int = 0
    num_replayed: int = 0
    capture_seconds: float = 0.0
    """Seconds spent on capturing so far."""
    disabled: bool = field(default=False)
    """True after a failed capture, or when there are enough graphs: captured ones serve on, and none is added."""
    _come: dict[tuple[int, Any], int] = field(default_factory=dict)
    """Uses of shapes that are not captured yet."""

    def of(
        self,
        model: PagedModel,
        kv: Sequence[LayerKV],
        compute: Compute,
        preparers: Sequence[Preparer],
        options: PassOptions | None = None,
    ) -> GraphedPass | None:
        """Passes of a model over its layers `kv`; None when its attention cannot be captured."""
        attention = model.attention
        if not isinstance(attention, ReplayableAttention):
            return None
        return GraphedPass(self, model, attention, kv, compute, preparers, options or PassOptions())

    def captures(self, model: PagedModel) -> bool:
        """True when `of` gives passes for the model."""
        return isinstance(model.attention, ReplayableAttention)

    def row_logits(self, vocab_size: int, device: torch.device) -> Tensor:
        """Memory [rows of the largest shape, vocab_size] float32 for the logits of rows' last tokens, so that graphs
        share it. Call it before the KV cache is allocated, which gets the memory that is left."""
        return torch.empty(bucket(self.limits.max_rows), vocab_size, dtype=torch.float32, device=device)

    def token_logits(self, vocab_size: int, device: torch.device) -> Tensor:
        """Memory [tokens of the largest shape, vocab_size] float32 for logits of all tokens, shared by the graphs."""
        size = min(self.limits.max_tokens, self.limits.max_verified)
        return torch.empty(size, vocab_size, dtype=torch.float32, device=device)

    def _capture(self, work: Callable[[], tuple[Tensor, ...]]) -> Captured | None:
        """Capture `work`; None when it cannot be captured, which is logged once."""
        started = time.perf_counter()
        try:
            captured = self.backend.capture(work)
        except RuntimeError as error:  # of an OutOfMemoryError too
            self.disabled = True
            log.warning("a graph could not be captured, which costs speed: no more are tried (%s)", error)
            return None
        self.num_captured += 1
        self.capture_seconds += time.perf_counter() - started
        return captured

    def _has_room(self) -> bool:
        """False when there are enough graphs, which is logged once, or one could not be captured."""
        if self.disabled:
            return False
        if self.num_captured >= self.limits.max_graphs:
            self.disabled = True
            log.warning(
                "%d graphs are captured, which is all that may be: steps of further shapes (numbers of requests and of "
                "drafts, with adapters or without) are launched piece by piece",
                self.num_captured,
            )
            return False
        return True

    def _comes_often(self, owner: int, key: Any) -> bool:
        """Count a use of a shape; True when the shape is worth one of the graphs that are left."""
        if 4 * self.num_captured < 3 * self.limits.max_graphs or self.disabled:
            return True
        self._come[owner, key] = times = self._come.get((owner, key), 0) + 1
        if times < OFTEN:
            return False
        del self._come[owner, key]
        return True

    def run(
        self,
        kept: dict[K, Captured],
        key: K,
        work: Callable[[], tuple[Tensor, ...]],
        begin: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Outputs of the graph of `key` in `kept`, which is captured from `work` at first; None when it cannot be.
        `begin` is called before that, or before the replay."""
        captured = kept.get(key)
        if captured is None and not (self._comes_often(id(kept), key) and self._has_room()):
            return None
        if begin is not None:
            begin()
        if captured is None:
            captured = self._capture(work)
            if captured is None:
                return None
            kept[key] = captured
        captured.replay()
        self.num_replayed += 1
        return captured.outputs


class PassOptions(NamedTuple):
    """Differences between a decoder's passes and those of a drafter's head."""

    first_key: int = 0
    """First position that holds keys."""
    state_size: int = 0
    """Elements for each token of the states that the pass reads beside tokens; 0: none."""
    state_dtype: torch.dtype = torch.float32
    verifies: bool = False
    """Whether it gives logits of all tokens; such passes have at most `PassLimits.max_verified` tokens."""


class PassInputs(NamedTuple):
    """Inputs of `Compute` beside the batch, in tensors at fixed addresses."""

    last: Tensor
    """[rows] int64: last token of each row."""
    states: Tensor | None
    """[tokens, state_size]"""
    adapters: tuple[Any, ...]
    """Result of each of the preparers; the first is the batch's."""


Compute = Callable[[ForwardBatch, PassInputs], tuple[Tensor, ...]]
"""Function that computes the pass; its outputs are [tokens, ...] or [rows, ...] each. It reads no host value that may
differ the next time."""


class GraphedRows:
    """Work on rows of states alone, captured for each number of rows at its first use, as heads without layers need it.
    Not thread-safe, and one at a time."""

    def __init__(
        self,
        graphs: PassGraphs,
        states: Tensor,
        compute: Callable[[Tensor, Any, int], tuple[Tensor, ...]],
        prepare: Preparer,
    ) -> None:
        """Prepare work on up to as many rows as `states` has.

        Args:
            states: [max rows, H], where the work finds its rows: the first of them.
            compute: The work, from states [rows, H], their adapters, and how many parts of it are wanted. It reads no
                host value that may differ the next time.
            prepare: Preparer of the rows' adapters.
        """
        self._graphs, self._states, self._compute, self._prepare = graphs, states, compute, prepare
        self._captured: dict[tuple[int, int, bool], Captured] = {}

    def run(self, states: Tensor, adapters: Sequence[Any], count: int) -> tuple[Tensor, ...] | None:
        """Do the work on `states` [B, H] of rows with these adapters, padded. None, and nothing is done, when it must
        run without a graph.

        Returns:
            Results of `compute`, valid until the next call. Entries beyond the rows have no meaning.
        """
        num_rows, rows = len(states), bucket(len(states))
        if rows > len(self._states):
            return None
        batch = self._prepare([*((adapter, 1) for adapter in adapters), *[(None, 1)] * (rows - num_rows)])
        if batch is not None and not batch.replayable:
            return None
        self._states[:num_rows].copy_(states)
        key = (rows, count, batch is not None)
        return self._graphs.run(self._captured, key, lambda: self._compute(self._states[:rows], batch, count))


class _Key(NamedTuple):
    """Key of passes that launch the same work."""

    shape: PassShape
    adapted: tuple[bool, ...]
    """True for each of the preparers that gave a result."""


class GraphedPass:
    """Passes of one model, each captured at the first use of its shape. Not thread-safe, and one pass at a time."""

    def __init__(
        self,
        graphs: PassGraphs,
        model: PagedModel,
        attention: ReplayableAttention,
        kv: Sequence[LayerKV],
        compute: Compute,
        preparers: Sequence[Preparer],
        options: PassOptions,
    ) -> None:
        """See `PassGraphs.of`."""
        self._graphs, self._model, self._attention, self._kv = graphs, model, attention, kv
        self._compute, self._preparers, self._options = compute, preparers, options
        self._block_size = kv[0].k.shape[2]
        max_rows = bucket(graphs.limits.max_rows)
        self._max_tokens = graphs.limits.max_tokens
        if options.verifies:
            self._max_tokens = min(self._max_tokens, graphs.limits.max_verified)
        self._blocks_per_row = -(-graphs.limits.max_positions // self._block_size)
        device = model.device
        self._numbers = torch.zeros(2 * self._max_tokens + max_rows, dtype=torch.int64, device=device)
        tiles = max_rows + 1 + attention.max_long_tiles(self._max_tokens)
        entries = tiles * TILE_FIELDS + max_rows * self._blocks_per_row + self._max_tokens
        self._storage = torch.zeros(entries, dtype=torch.int32, device=device)
        self._states: Tensor | None = None
        if options.state_size:
            self._states = torch.zeros(self._max_tokens, options.state_size, dtype=options.state_dtype, device=device)
        self._plans: dict[PassShape, ReplayablePlan] = {}
        self._captured: dict[_Key, Captured] = {}

    def run(
        self,
        rows: SequenceRows,
        handles: Sequence[tuple[Any, int]],
        states: Tensor | None = None,
        begin: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Run the pass over `rows`, padded. None when it must run without a graph.

        Args:
            handles: (adapter, number of tokens) of each row.
            states: [T, state_size], for passes that read states.
            begin: Called before a graph is captured or replayed; capturing it may still fail.

        Returns:
            Results of `Compute`, valid until the next pass. Entries beyond the rows and their tokens have no meaning.
        """
        shape = self._shape(rows)
        if shape is None:
            return None
        padding = shape.tokens - len(rows.token_ids)
        padded = [*handles, (None, padding)] if padding else handles
        adapters = tuple(prepare(padded) for prepare in self._preparers)
        if not all(batch is None or batch.replayable for batch in adapters):
            return None
        self._fill(shape, rows, states)
        key = _Key(shape, tuple(batch is not None for batch in adapters))
        return self._graphs.run(self._captured, key, lambda: self._work(shape, adapters), begin)

    def _shape(self, rows: SequenceRows) -> PassShape | None:
        limits = self._graphs.limits
        if len(rows.query_lens) > limits.max_rows or rows.first_key != self._options.first_key:
            return None
        if rows.long_prompts(self._model.rope.short_context):  # graphs know positions, not prompts
            return None
        if max(map(sum, zip(rows.starts, rows.query_lens, strict=True))) > limits.max_positions:
            return None
        return shape_of(rows.query_lens, self._attention.max_queries, limits.max_rows, self._max_tokens)

    def _fill(self, shape: PassShape, rows: SequenceRows, states: Tensor | None) -> None:
        """Copy the rows to where the graphs of this shape read them, in two copies for which the host does not wait."""
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
        batch = ForwardBatch(ids, positions, rotations, self._plans[shape], self._kv, adapters[0])
        states = None if self._states is None else self._states[: shape.tokens]
        return self._compute(batch, PassInputs(last, states, adapters))
