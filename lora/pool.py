"""The row allocator of the device pool. It sees keys and integers, no tensors.

    rows:  0 1 2 3 4 5 6 7 8 9 ...
           a a a a . . b b c c        row r of *every* projection's pool belongs to the same adapter

One unit is one rank row across all layers, so a rank-8 adapter takes half of what a rank-16 one takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """An adapter's rows for as long as they are its own; told apart by identity."""

    key: bytes
    rows: tuple[int, ...]
    """Ascending."""

    @property
    def mask(self) -> int:
        """Bit r: row r."""
        return row_mask(self.rows)


def row_mask(rows: Iterable[int]) -> int:
    """A set of rows as the bits of an integer: cheap to intersect, once a projection and step."""
    mask = 0
    for row in rows:
        mask |= 1 << row
    return mask


@dataclass(slots=True)
class _Entry:
    allocation: Allocation
    num_users: int = 0
    pinned: bool = False


class RowPool:
    """Rows for at most `max_entries` adapters, told apart by the digest of their content.

    Those that are neither pinned nor in use make way for others, the least recently used first.
    """

    def __init__(self, num_rows: int, max_entries: int) -> None:
        self.num_rows = num_rows
        self.max_entries = max_entries
        self._free = set(range(num_rows))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self) -> list[bytes]:
        """Adapters on the device, least recently used first."""
        return list(self._entries)

    def allocation(self, key: bytes) -> Allocation:
        """The rows of an adapter on the device; KeyError otherwise."""
        return self._entries[key].allocation

    def num_users(self, key: bytes) -> int:
        """Running requests that use the adapter's rows; 0 for one that is not here."""
        entry = self._entries.get(key)
        return entry.num_users if entry else 0

    def is_pinned(self, key: bytes) -> bool:
        """Whether the adapter is here to stay."""
        entry = self._entries.get(key)
        return bool(entry and entry.pinned)

    def is_evictable(self, key: bytes) -> bool:
        """Whether the adapter is here and could make way now."""
        entry = self._entries.get(key)
        return entry is not None and not entry.pinned and entry.num_users == 0

    def allocate(self, key: bytes, num_rows: int) -> Allocation | None:
        """Give `key` rows, evicting others as needed; None, with nothing changed, when that makes not enough room."""
        if key in self._entries:
            raise ValueError("the adapter has rows already")
        if num_rows < 1:
            raise ValueError("an adapter takes at least one row")
        free, count, victims = len(self._free), len(self._entries), []
        for other in self._entries:
            if free >= num_rows and count < self.max_entries:
                break
            if self.is_evictable(other):
                victims.append(other)
                free += len(self._entries[other].allocation.rows)
                count -= 1
        if free < num_rows or count >= self.max_entries:
            return None
        for victim in victims:
            self.evict(victim)
        allocation = Allocation(key, self._take(num_rows))
        self._entries[key] = _Entry(allocation)
        return allocation

    def _take(self, num_rows: int) -> tuple[int, ...]:
        """The smallest run of free rows that is long enough (a run is used as a slice), else the lowest rows."""
        free = sorted(self._free)
        best: tuple[int, int] | None = None  # length, first index into `free`
        first = 0
        for index in range(1, len(free) + 1):
            if index == len(free) or free[index] != free[index - 1] + 1:
                length = index - first
                if length >= num_rows and (best is None or length < best[0]):
                    best = (length, first)
                first = index
        start = best[1] if best else 0
        rows = tuple(free[start : start + num_rows])
        self._free.difference_update(rows)
        return rows

    def evict(self, key: bytes) -> None:
        """Free the rows of an adapter that nobody uses, pinned or not."""
        if self._entries[key].num_users:
            raise ValueError("running requests use the adapter")
        self._free.update(self._entries.pop(key).allocation.rows)

    def retain(self, key: bytes) -> None:
        """One more running request uses the adapter."""
        self._entries[key].num_users += 1
        self._entries.move_to_end(key)

    def release(self, key: bytes) -> None:
        """A running request no longer uses the adapter."""
        entry = self._entries[key]
        if entry.num_users < 1:
            raise ValueError("nobody uses the adapter")
        entry.num_users -= 1
        self._entries.move_to_end(key)

    def set_pinned(self, key: bytes, pinned: bool) -> None:
        """Keep the adapter on the device whatever else is wanted, or stop doing so."""
        self._entries[key].pinned = pinned

    def check_integrity(self) -> None:
        """Every row is free or belongs to exactly one adapter."""
        owned = [row for entry in self._entries.values() for row in entry.allocation.rows]
        assert len(owned) == len(set(owned)), "a row belongs to two adapters"
        assert not self._free.intersection(owned), "a row in use is free"
        assert sorted([*self._free, *owned]) == list(range(self.num_rows)), "a row is lost"
        assert len(self._entries) <= self.max_entries
        for key, entry in self._entries.items():
            assert entry.allocation.key == key
            assert entry.num_users >= 0
            assert list(entry.allocation.rows) == sorted(entry.allocation.rows)
