"""The host tier: adapters that have been read, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .row_writer import HostEntry


class HostTier:
    """Entries by digest. What may go is known to its owner, who makes room before anything is put here."""

    def __init__(self, max_adapters: int, max_bytes: int | None = None) -> None:
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, HostEntry] = OrderedDict()
        self._largest = 0  # size there has been

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        """Digests, least recently used first."""
        return iter(self._entries)

    def get(self, digest: bytes | None) -> HostEntry | None:
        """The entry, which becomes the most recently used; None when it is not here."""
        entry = self._entries.get(digest) if digest is not None else None
        if entry is not None:
            self._entries.move_to_end(entry.adapter.digest)
        return entry

    def put(self, entry: HostEntry) -> None:
        """Keep the entry as the most recently used."""
        self.drop(entry.adapter.digest)
        self._entries[entry.adapter.digest] = entry
        self.num_bytes += entry.num_bytes
        self._largest = max(self._largest, entry.num_bytes)

    def drop(self, digest: bytes) -> None:
        """Forget the adapter, if it is here."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def has_room(self, num_reserved: int, num_bytes: int | None, num_kept_bytes: int) -> bool:
        """Return whether one more adapter fits beside `num_reserved` still to come.

        Args:
            num_reserved: For each, and for one that has not been read yet (`num_bytes` None), the largest size so far
                is expected.
            num_kept_bytes: Of what is here to stay. An adapter is not expected to take more than that leaves, so that
                any fits once the rest is gone.
        """
        if len(self._entries) + num_reserved >= self.max_adapters:
            return False
        if self.max_bytes is None:
            return True
        expected = min(self._largest if num_bytes is None else num_bytes, self.max_bytes - num_kept_bytes)
        return self.num_bytes + num_reserved * self._largest + expected <= self.max_bytes

    def check_integrity(self) -> None:
        """Counts agree."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert all(entry.adapter.digest == digest for digest, entry in self._entries.items())
        assert len(self) <= self.max_adapters
