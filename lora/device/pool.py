"""Allocator of rank rows on the device. It sees keys and integers, no tensors.

    rows:  0 1 2 3 4 5 6 7 8 9 ...
           a a a a . . b b c c        row r of *every* projection's pool belongs to the same adapter

One unit is one rank row across all layers, so a rank-8 adapter takes half of what a rank-16 one takes. Other memory of
an adapter, such as its own embeddings, counts as rank rows, which are then left unused.

    free --allocate, begin_write--> being written --end_write--> ready --evict--> free
                                    being written --evict--> no owner --end_write--> free
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...platform.core.config import LoRAConfig
from ...platform.core.errors import InvalidRequestError
from ...platform.core.sizes import format_bytes


def count_rows(config: LoRAConfig, bytes_per_row: int, num_parts: int = 1) -> int:
    """Return the number of rank rows: as many as fit into `lora_memory`, else `max_loras` adapters of the largest rank.

    `bytes_per_row` is without the vocabulary's rows. These are far wider, and count only for adapters that have some.
    `num_parts`: 2 if an adapter's draft weights have rows of their own.

    Raises:
        InvalidRequestError: that is less than one adapter of the largest rank.
    """
    if config.memory_bytes is None:
        return config.max_loras * config.max_lora_rank * num_parts
    num_rows = config.memory_bytes // max(1, bytes_per_row)
    if num_rows < config.max_lora_rank:
        least = config.max_lora_rank * bytes_per_row
        raise InvalidRequestError(
            f"lora_memory of {format_bytes(config.memory_bytes)} has room for {num_rows} rank rows; one adapter of "
            f"rank {config.max_lora_rank} (max_lora_rank) takes {format_bytes(least)}",
            param="lora_memory",
        )
    return num_rows


class Allocation:
    """Rank rows that an adapter owns on the device. Compared by identity. Immutable."""

    __slots__ = ("__weakref__", "draft", "index", "key", "rows", "size")

    def __init__(
        self, key: bytes, rows: tuple[int, ...], num_reserved: int = 0, draft: Allocation | None = None
    ) -> None:
        self.key = key
        self.rows = rows
        """Ascending."""
        self.size = len(rows) + num_reserved
        """Rank rows that it counts as: its own, and those equivalent to its other memory."""
        self.draft = draft
        """Rows of its draft weights, if these have rows of their own; they are among the rows that it counts as."""
        self.index: NDArray[np.int32] = np.array(rows, np.int32)
        """`rows` as an array, [n]."""


@dataclass(slots=True)
class _Entry:
    allocation: Allocation
    num_users: int = 0
    pinned: bool = False


class RowPool:
    """Rank rows by adapter. The key is the digest of its content. At most `max_running` adapters have users.

    Adapters that are neither pinned, in use nor being written are evicted for others, the least recently used first.
    Rows that are being written get no new owner until that ends, even if their owner is evicted.
    """

    def __init__(
        self,
        num_rows: int,
        max_running: int,
        *,
        row_bytes: int = 0,
        on_free: Callable[[Allocation], None] = lambda allocation: None,
    ) -> None:
        """Make a pool.

        Args:
            num_rows: Number of rank rows.
            max_running: Number of adapters that may have users.
            row_bytes: Bytes of a rank row; 0: other memory is not counted.
            on_free: Called with rows that are neither owned nor being written any more.
        """
        self.num_rows = num_rows
        self.max_running = max_running
        self.num_free = num_rows
        """Rows that are not counted by any adapter."""
        self._row_bytes = row_bytes
        self._on_free = on_free
        self.num_running = 0
        """Adapters with users."""
        self.num_pinned_rows = 0
        self._is_free = np.ones(num_rows, np.bool_)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._pinned: set[bytes] = set()
        self._writing: set[Allocation] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self) -> list[bytes]:
        """Return the adapters with rows, least recently used first."""
        return list(self._entries)

    def allocation(self, key: bytes) -> Allocation:
        """Return the rows of an adapter on the device; KeyError when it has none."""
        return self._entries[key].allocation

    def num_users(self, key: bytes | None) -> int:
        """Return the number of running requests that use the adapter's rows; 0 when it has none."""
        entry = self._entries.get(key) if key is not None else None
        return entry.num_users if entry else 0

    def is_pinned(self, key: bytes) -> bool:
        """Return whether the adapter is pinned."""
        return key in self._pinned

    def is_ready(self, key: bytes | None) -> bool:
        """Return whether the adapter's rows are written."""
        return self.ready_allocation(key) is not None

    def ready_allocation(self, key: bytes | None) -> Allocation | None:
        """Return the rows of an adapter on the device, in one look-up; None unless they are written."""
        entry = self._entries.get(key) if key is not None else None
        return None if entry is None or entry.allocation in self._writing else entry.allocation

    def is_evictable(self, key: bytes) -> bool:
        """True if the adapter's rows could be given to another one now."""
        entry = self._entries.get(key)
        return entry is not None and not entry.pinned and entry.num_users == 0 and entry.allocation not in self._writing

    def size(self, num_rows: int, num_bytes: int) -> int:
        """Return the rows that an adapter with `num_rows` rank rows and `num_bytes` of other memory counts as."""
        return num_rows + (-(-num_bytes // self._row_bytes) if self._row_bytes else 0)

    def allocate(
        self,
        key: bytes,
        num_rows: int,
        victims: Iterable[bytes] | None = None,
        *,
        num_bytes: int = 0,
        num_draft_rows: int = 0,
    ) -> Allocation | None:
        """Give `key` rows, and evict others for them; None, without a change, if there are not enough.

        Args:
            key: Key of the adapter.
            num_rows: Number of its rank rows.
            victims: Adapters that may be evicted, in this order; by default all, the least recently used first.
            num_bytes: Memory that it takes in addition to its rank rows.
            num_draft_rows: How many of its rank rows are for its draft weights alone.
        """
        if key in self._entries:
            raise ValueError("the adapter has rows already")
        if num_rows < 1:
            raise ValueError("an adapter takes at least one row")
        size = self.size(num_rows, num_bytes)
        free, going = self.num_free, []
        for other in self._entries if victims is None else victims:
            if free >= size:
                break
            if self.is_evictable(other):
                going.append(other)
                free += self._entries[other].allocation.size
        if free < size:
            return None
        for victim in going:
            self.evict(victim)
        rows, first = self._take(num_rows), num_rows - num_draft_rows
        draft = Allocation(key, rows[first:]) if num_draft_rows else None
        allocation = Allocation(key, rows[:first], size - first, draft)
        self.num_free -= size
        self._entries[key] = _Entry(allocation)
        return allocation

    def _take(self, num_rows: int) -> tuple[int, ...]:
        """Take the smallest run of free rows that is long enough (a run is used as a slice), else the lowest rows."""
        free = np.flatnonzero(self._is_free)
        firsts = np.flatnonzero(np.diff(free, prepend=-2) > 1)  # of each run, as index into `free`
        lengths = np.diff(firsts, append=len(free))
        fitting = np.where(lengths >= num_rows, lengths, self.num_rows + 1)
        best = int(np.argmin(fitting))
        start = firsts[best] if lengths[best] >= num_rows else 0
        rows = free[start : start + num_rows]
        self._is_free[rows] = False
        return tuple(rows.tolist())

    def _give_back(self, allocation: Allocation) -> None:
        self._is_free[allocation.index] = True
        if allocation.draft is not None:
            self._is_free[allocation.draft.index] = True
        self.num_free += allocation.size
        self._on_free(allocation)

    def begin_write(self, allocation: Allocation) -> None:
        """Record the start of a write of these rows."""
        assert self._entries[allocation.key].allocation is allocation
        self._writing.add(allocation)

    def end_write(self, allocation: Allocation) -> None:
        """Record the end of a write of these rows. They are free if their owner was evicted meanwhile."""
        self._writing.remove(allocation)
        entry = self._entries.get(allocation.key)
        if entry is None or entry.allocation is not allocation:
            self._give_back(allocation)

    def evict(self, key: bytes) -> None:
        """Take the rows from an adapter without users, pinned or not."""
        if self._entries[key].num_users:
            raise ValueError("running requests use the adapter")
        self.set_pinned(key, False)
        allocation = self._entries.pop(key).allocation
        if allocation not in self._writing:
            self._give_back(allocation)

    def can_run(self, key: bytes) -> bool:
        """Return whether one more running request may use the adapter: it runs, or fewer than `max_running` do."""
        return self.num_users(key) > 0 or self.num_running < self.max_running

    def retain(self, key: bytes) -> None:
        """Count one more running request that uses the adapter."""
        entry = self._entries[key]
        if entry.allocation in self._writing:
            raise ValueError("the adapter's rows are not written yet")
        if not self.can_run(key):
            raise ValueError(f"{self.num_running} adapters run already")
        self.num_running += entry.num_users == 0
        entry.num_users += 1
        self._entries.move_to_end(key)

    def release(self, key: bytes) -> None:
        """Count one running request less that uses the adapter."""
        entry = self._entries[key]
        if entry.num_users < 1:
            raise ValueError("no request uses the adapter")
        entry.num_users -= 1
        self.num_running -= entry.num_users == 0
        self._entries.move_to_end(key)

    def set_pinned(self, key: bytes, pinned: bool) -> None:
        """Keep the adapter on the device, or allow its eviction again."""
        entry = self._entries[key]
        if entry.pinned != pinned:
            entry.pinned = pinned
            self.num_pinned_rows += entry.allocation.size * (1 if pinned else -1)
            (self._pinned.add if pinned else self._pinned.discard)(key)

    def pinned(self) -> set[bytes]:
        """Return the pinned adapters."""
        return set(self._pinned)

    def check_integrity(self) -> None:
        """Check that every row is free, or belongs to one adapter, or is still being written for an evicted one."""
        allocations = {entry.allocation for entry in self._entries.values()} | self._writing
        parts = [part for whole in allocations for part in (whole, whole.draft) if part is not None]
        owned = [row for part in parts for row in part.rows]
        free = np.flatnonzero(self._is_free).tolist()
        assert len(owned) == len(set(owned)), "a row belongs to two adapters"
        assert not set(free).intersection(owned), "a row in use is free"
        assert sorted([*free, *owned]) == list(range(self.num_rows)), "a row is lost"
        assert self.num_free == self.num_rows - sum(allocation.size for allocation in allocations) >= 0
        assert self.num_running == sum(entry.num_users > 0 for entry in self._entries.values()) <= self.max_running
        assert self._pinned == {key for key, entry in self._entries.items() if entry.pinned}
        assert self.num_pinned_rows == sum(self._entries[key].allocation.size for key in self._pinned)
        for key, entry in self._entries.items():
            assert entry.allocation.key == key
            assert entry.num_users >= 0
            assert not entry.num_users or entry.allocation not in self._writing, "used before it was written"
            assert list(entry.allocation.rows) == sorted(entry.allocation.rows)
            assert entry.allocation.index.tolist() == list(entry.allocation.rows)
