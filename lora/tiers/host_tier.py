"""The host tier: adapters in host memory, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ...platform.core.threads import run_later
from ..adapter import Adapter

_SLOW_TO_FREE = 16 << 20
"""Bytes in host memory from which another thread than the one that steps frees an adapter: the system takes some 20 ms
for 200 MB."""


class AdapterHostTier:
    """Adapters by digest. The caller chooses what to drop, and makes room before `put`."""

    def __init__(self, max_adapters: int, max_bytes: int | None = None) -> None:
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._adapters: OrderedDict[bytes, Adapter] = OrderedDict()
        self._largest = 0  # bytes of the largest adapter so far

    def __contains__(self, digest: object) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[bytes]:
        """Digests, least recently used first."""
        return iter(self._adapters)

    def get(self, digest: bytes | None) -> Adapter | None:
        """Return the adapter, which becomes the most recently used; None when it is not here."""
        adapter = self._adapters.get(digest) if digest is not None else None
        if adapter is not None:
            self._adapters.move_to_end(adapter.digest)
        return adapter

    def peek(self, digest: bytes) -> Adapter:
        """Return an adapter that is here, without a change of the order."""
        return self._adapters[digest]

    def put(self, adapter: Adapter) -> None:
        """Add an adapter as the most recently used."""
        self.drop(adapter.digest)
        self._adapters[adapter.digest] = adapter
        self.num_bytes += adapter.num_bytes
        self._largest = max(self._largest, adapter.num_bytes)

    def drop(self, digest: bytes) -> None:
        """Remove the adapter, if it is here."""
        if digest in self._adapters:
            held = [self._adapters.pop(digest)]
            num_bytes = held[0].num_bytes
            self.num_bytes -= num_bytes
            if num_bytes >= _SLOW_TO_FREE:
                run_later(held.clear)

    def has_room(self, num_reserved: int, num_bytes: int | None, num_kept_bytes: int) -> bool:
        """True if one more adapter fits, in addition to adapters that are still being read.

        Args:
            num_reserved: Number of adapters being read; each is expected to be as large as the largest so far.
            num_bytes: Size of the adapter; None when it has not been read, and the largest size so far is expected.
            num_kept_bytes: Size of the adapters that cannot be evicted. The adapter is not expected to take more than
            they leave, so that it fits once all others are evicted.
        """
        if len(self._adapters) + num_reserved >= self.max_adapters:
            return False
        if self.max_bytes is None:
            return True
        expected = min(self._largest if num_bytes is None else num_bytes, self.max_bytes - num_kept_bytes)
        return self.num_bytes + num_reserved * self._largest + expected <= self.max_bytes

    def check_integrity(self) -> None:
        """Counts agree."""
        assert self.num_bytes == sum(adapter.num_bytes for adapter in self._adapters.values())
        assert all(adapter.digest == digest for digest, adapter in self._adapters.items())
        assert len(self) <= self.max_adapters
