"""Shapes of an engine's captured passes: a fixed grid, known before the first request.

    decodes    R rows x c tokens a row, for a few R and for c in 1, 2, 4, 8, ..., 1 + k:   R * c tokens
    prompts    parts of prompts alongside decodes and verifications:                       128, 256, 512, 1024 tokens
    loops      R rows x (1 + k) tokens and then n drafts of each, for R in 1, 2, 4, 8, ... and n in k, k / 2

k is the most drafts of a row. Rows of a pass lie one after the other, and padding tokens follow the last row. So what
counts is the number of rows and their tokens together: rows that have more drafts than others need no shape of their
own. A pass takes the smallest shape that it fits into.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MAX_TOKENS = 1024
"""Most tokens of a captured pass, as many as the adapters' kernels have room for in captured passes."""
MAX_GRAPHS = 60
"""Most graphs of all passes: each takes some megabytes of the driver's memory, and about 0.1 s to capture."""
MAX_DECODE_TOKENS = 320
"""Most tokens of a shape of decodes with drafts, as 64 rows of 5 have: each has a row of logits, 4 bytes for each token
of the vocabulary. Steps with more take a shape of prompts, and their logits are launched singly."""
MAX_LOOP_ROWS = 32
"""Most rows of a draft loop in one graph: passes of more rows take long enough to be launched ahead one by one."""
_PROMPT_TOKENS = (128, 256, 512, 1024)
"""Tokens of the shapes of prompts. Launches of longer passes are ahead of the device: 2,048 tokens take an 8B model 50
ms on an H100, and launching that model's kernels singly takes less."""
_WEIGHT_TOKENS = 256
"""Tokens that take as long as reading the weights: an 8B model decodes 1 row in 6.2 ms on an H100, and 256 in 11.3."""
_DECODE_SHARE = 2.5
"""Worth of a shape without drafts compared with one with drafts: it serves what does not draft, which pays for its
padding and gains nothing."""


class PassLimits(NamedTuple):
    """Limits that captured passes are sized for."""

    max_rows: int
    max_positions: int
    """Most positions of a sequence."""
    max_tokens: int = MAX_TOKENS
    max_graphs: int = MAX_GRAPHS
    max_drafts: int = 0
    """Most drafts of a row that a drafter makes."""
    graphs_per_shape: int = 1
    """Graphs of a shape: with and without adapters, and of the drafter."""
    has_loops: bool = False
    """True if the drafter makes drafts one after the other."""


class PassShape(NamedTuple):
    """Shape to which a pass is padded."""

    rows: int
    queries: int
    """Most queries in a short row."""
    tokens: int
    """Tokens of all rows together."""
    has_long: bool = False
    """True if there are rows of more queries, as parts of prompts are."""

    def fits(self, query_lens: Sequence[int], max_queries: int) -> bool:
        """True when these rows, of which those with more than `max_queries` are long, fit into the shape."""
        if len(query_lens) > self.rows or sum(query_lens) > self.tokens:
            return False
        if not self.has_long:
            return max(query_lens) <= self.queries
        # A short row of more queries is computed as several.
        return sum(-(-count // self.queries) for count in query_lens if count <= max_queries) <= self.rows

    def holds(self, other: PassShape) -> bool:
        """True when whatever fits into the other shape fits into this one."""
        return (
            self.rows >= other.rows
            and self.tokens >= other.tokens
            and self.queries >= other.queries
            and self.has_long >= other.has_long
        )


class LoopShape(NamedTuple):
    """Shape of a draft loop."""

    first: PassShape
    """Shape of the pass over tokens that are known."""
    num_drafts: int
    """Drafts of a row."""
    sampled: bool
    """True if rows may be sampled; greedy ones cost less."""


class Grid(NamedTuple):
    """Shapes in ascending order of their tokens and rows."""

    decodes: tuple[PassShape, ...]
    prompts: tuple[PassShape, ...]
    loops: tuple[LoopShape, ...] = ()

    @property
    def max_tokens(self) -> int:
        """Most tokens of a shape of decodes; 0 without shapes."""
        return max((shape.tokens for shape in self.decodes), default=0)

    @property
    def rows(self) -> list[int]:
        """Numbers of rows of passes with one token a row, ascending."""
        return [shape.rows for shape in self.decodes if shape.queries == 1]

    def padded(self, rows: int, drafts: float) -> float:
        """Number of drafts that `rows` rows have room for in the shape of a step with `drafts` drafts together;
        `drafts` itself if no shape fits, or if it is 0."""
        tokens = rows + math.ceil(drafts)
        for shape in (*self.decodes, *self.prompts) if drafts > 0 else ():
            if shape.rows >= rows and shape.tokens >= tokens and shape.queries > 1:
                return shape.tokens - rows
        return drafts


def bucket(count: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def make_grid(limits: PassLimits) -> Grid:
    """The finest grid of as many shapes as the limits allow."""
    max_rows, max_tokens = limits.max_rows, limits.max_tokens
    loops = _make_loops(limits)
    max_shapes = (limits.max_graphs - len(loops)) // limits.graphs_per_shape
    most = min(max_tokens, max(MAX_DECODE_TOKENS, max_rows))
    sizes = (bucket(count) if count <= 64 else -(-count // 32) * 32 for count in range(1, max_rows + 1))
    numbers = sorted({min(size, max_rows) for size in sizes})
    columns = _columns(limits.max_drafts)
    shapes = [
        PassShape(rows, 1 if column == 1 else columns[-1], rows * column)
        for column in columns
        for rows in numbers
        if rows * column <= most
    ]
    shapes += [
        PassShape(min(max_rows, tokens), columns[-1], tokens, True) for tokens in _PROMPT_TOKENS if tokens <= max_tokens
    ]
    while len(shapes) > max_shapes:
        shapes.remove(min(shapes, key=lambda shape: _loss(shape, shapes)))
    shapes.sort(key=lambda shape: (shape.tokens, shape.rows))
    decodes = tuple(shape for shape in shapes if not shape.has_long)
    return Grid(decodes, tuple(shape for shape in shapes if shape.has_long), loops)


def _make_loops(limits: PassLimits) -> tuple[LoopShape, ...]:
    """Draft loops, the cheapest first. Their first pass has room for all drafts, as padding tokens are almost free."""
    most, queries = limits.max_drafts, 1 + limits.max_drafts
    if not limits.has_loops or not most:
        return ()
    room = min(limits.max_rows, MAX_LOOP_ROWS, limits.max_tokens // queries)
    numbers = sorted({min(1 << power, room) for power in range(room.bit_length() + 1)}) if room else []
    return tuple(
        LoopShape(PassShape(rows, queries, rows * queries), num_drafts, sampled)
        for rows in numbers
        for num_drafts in sorted({-(-most // 2), most})
        for sampled in (False, True)
    )


def _columns(max_drafts: int) -> list[int]:
    """Tokens a row: powers of two, and 1 + k as the last; the power just below it is left out."""
    last = 1 + max_drafts
    powers = [1 << at for at in range(last.bit_length())]
    return [power for power in powers if 3 * power <= 2 * last and power < last] + [last]


def _loss(shape: PassShape, shapes: Sequence[PassShape]) -> float:
    """Largest loss of time, as a share, of passes that the best other shape serves instead; infinite if nothing else
    serves them, or if a single request needs the shape."""
    larger = [
        _work(other)
        for other in shapes
        if other is not shape and other.holds(shape) and (shape.queries > 1 or not other.has_long)
    ]
    if not larger or (shape.rows == 1 and shape.tokens in (1, shape.queries)):
        return math.inf
    smaller = [_work(other) for other in shapes if other is not shape and shape.holds(other)]
    loss = min(larger) / max(smaller, default=_WEIGHT_TOKENS) - 1.0
    return loss * (_DECODE_SHARE if shape.queries == 1 else 1.0)


def _work(shape: PassShape) -> float:
    return _WEIGHT_TOKENS + shape.tokens + shape.rows / 2


def spread(items: Sequence[T]) -> list[T]:
    """The items in another order: the first, the last, and then the middle of each gap, so that the first few of them
    are spread over all."""
    order = dict.fromkeys([0, len(items) - 1] if items else [])
    gaps = deque([(0, len(items) - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order[middle] = None
            gaps += [(low, middle), (middle, high)]
    return [items[index] for index in order]
