"""Work on rows of states alone in captured graphs, as heads without layers need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..kernels.graphs import Captured
from .batch import AdapterPreparer
from .pass_graphs import PassGraphs


class GraphedRows:
    """Work on rows, captured for the grid's numbers of rows. Not thread-safe, and one at a time."""

    def __init__(
        self,
        graphs: PassGraphs,
        states: Tensor,
        compute: Callable[[Tensor, Any, int], tuple[Tensor, ...]],
        prepare: AdapterPreparer,
        most: int,
    ) -> None:
        """Prepare work on up to as many rows as `states` has.

        Args:
            graphs: Holder of the graphs.
            states: [max rows, H]. The work reads its rows from the first of them.
            compute: The work, from states [rows, H], their adapters, and how many parts of it are wanted. It reads no
                host value that may differ the next time.
            prepare: Preparer of the rows' adapters.
            most: Most parts. All of them or half of them are computed.
        """
        self._graphs, self._states, self._compute, self._prepare = graphs, states, compute, prepare
        self._counts = sorted({-(-most // 2), most})
        self._rows = sorted({min(rows, len(states)) for rows in graphs.grid.rows})
        self._captured: dict[tuple[int, int, bool], Captured] = {}
        graphs.add(self)

    def run(self, states: Tensor, adapters: Sequence[Any], count: int) -> tuple[Tensor, ...] | None:
        """Do the work on `states` [B, H] of rows with these adapters, padded. None, and nothing is done, when it must
        run without a graph, which is counted.

        Returns:
            Results of `compute` of at least `count` parts, valid until the next call. Entries beyond the rows have no
            meaning.
        """
        found = self._run(states, [(adapter, 1) for adapter in adapters], count)
        self._graphs.num_single += found is None
        return found

    def captures(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """See `Capturable`."""
        for rows in self._rows:
            for count in self._counts:
                yield rows, partial(self._capture, rows, count)

    def clear(self) -> None:
        """See `Capturable`."""
        self._captured.clear()

    def _capture(self, rows: int, count: int) -> None:
        batch = self._prepare([(None, rows)], always=True)
        key = (rows, count, batch is not None)
        self._graphs.capture(self._captured, key, lambda: self._compute(self._states[:rows], batch, count))

    def _run(self, states: Tensor, handles: list[tuple[Any, int]], count: int) -> tuple[Tensor, ...] | None:
        for rows in (rows for rows in self._rows if rows >= len(states)):
            padding = rows - len(states)
            batch = self._prepare([*handles, (None, padding)] if padding else handles, always=True)
            if batch is not None and not batch.replayable:
                return None
            for parts in (parts for parts in self._counts if parts >= count):
                captured = self._captured.get((rows, parts, batch is not None))
                if captured is not None:
                    self._states[: len(states)].copy_(states)
                    return self._graphs.run(captured)
        return None
