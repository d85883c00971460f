"""Rows of a step as arrays, which all backends plan with."""

from __future__ import annotations

from array import array

import numpy as np

from ...kernels.paged_attention import RowArrays, Window, first_seen
from ..batch import SequenceRows


class RowTables:
    """Shapes and block tables of the rows as arrays; every [B] array is int64."""

    def __init__(self, rows: SequenceRows, block_size: int) -> None:
        self.block_size = block_size
        self.first_key = rows.first_key
        self.query_lens = np.asarray(rows.query_lens, dtype=np.int64)
        self.starts = np.asarray(rows.starts, dtype=np.int64)
        self.lengths = self.starts + self.query_lens
        self.token_starts = np.cumsum(self.query_lens) - self.query_lens
        self.num_blocks = -(-self.lengths // block_size)
        self.table_starts = np.cumsum(self.num_blocks) - self.num_blocks
        used = [table[:count] for table, count in zip(rows.block_tables, self.num_blocks.tolist(), strict=True)]
        parts = [part if isinstance(part, array) else array("q", part) for part in used]
        self.table = np.frombuffer(b"".join(parts), dtype=np.int64)

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Cache slots [T] of all tokens."""
        block, offset = np.divmod(positions, self.block_size)
        return self.table[np.repeat(self.table_starts, self.query_lens) + block] * self.block_size + offset

    def arrays(self, positions: np.ndarray) -> RowArrays:
        """Arrays for kernels that read the cache in place; `positions` [T] are the tokens'."""
        return RowArrays(
            slots=self.slots(positions),
            query_lens=self.query_lens,
            starts=self.starts,
            token_starts=self.token_starts,
            table_starts=self.table_starts,
            blocks=self.table,
        )

    def blocks(self, rows: np.ndarray, first: np.ndarray, count: int) -> np.ndarray:
        """Blocks [len(rows), count] from each row's `first` on; past its end a row's last block is repeated."""
        wanted = np.minimum(first[:, None] + np.arange(count), self.num_blocks[rows, None] - 1)
        return self.table[self.table_starts[rows, None] + wanted]

    def hidden(self, positions: np.ndarray, keys: np.ndarray, window: Window) -> np.ndarray:
        """True where a query at one of the `positions` does not see the key at one of `keys`; the two broadcast."""
        found = keys > positions
        if self.first_key:
            found |= keys < self.first_key
        if window is not None:
            found |= keys < first_seen(positions, window)
        return found

    def first_blocks(self, rows: np.ndarray, window: Window) -> np.ndarray:
        """First block that any query of each row can see, [len(rows)]."""
        if window is None:
            return np.zeros(len(rows), dtype=np.int64)
        return np.maximum(first_seen(self.starts[rows], window), 0) // self.block_size
