"""Residency: the adapters in host memory and on the device, and the order in which they are evicted.

    host tier                         ⊇    device rows
    max_cpu_loras adapters, or bytes       as many as their ranks allow; max_loras of them run

Waiting requests go in the scheduling policy's order: an adapter that one waits for is not evicted for a less urgent
one. `starvation.Aging` bounds the time that a request waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...platform.core.config import LoRAConfig
from ...platform.core.errors import InvalidUserInputError
from ...platform.core.sizes import format_bytes
from ..adapter import Adapter
from ..device.pool import Allocation, RowPool
from ..files.errors import adapter_error
from ..registry.adapter_stats import AdapterCounts
from ..registry.registry import AdapterRegistry
from ..registry.versions import AdapterVersion, Order
from .host_tier import AdapterHostTier

LEAST_URGENT: Order = (math.inf, math.inf)
MOST_URGENT: Order = (-math.inf, -math.inf)


class Residency:
    """The host tier and the row pool, changed only together."""

    def __init__(
        self,
        config: LoRAConfig,
        registry: AdapterRegistry,
        pool: RowPool,
        write: Callable[[Allocation, Adapter], None],
    ) -> None:
        """`registry` is only read. `write` starts to write an adapter's rows; call `written` when that has ended."""
        self.host = AdapterHostTier(config.max_cpu_loras, config.max_cpu_bytes)
        self.pool = pool
        self._max_rank = config.max_lora_rank
        self._registry = registry
        self._write = write
        self.num_host_evictions = self.num_device_evictions = 0
        self.counts = AdapterCounts()
        # Requests refused since the last change: a less urgent one that needs no less is refused at once.
        self._no_memory: tuple[Order, float] | None = None
        self._no_rows: dict[int, Order] = {}

    def level(self, digest: bytes | None) -> str:
        """Return the highest tier that holds a content: "device", "host" or "disk"."""
        return "device" if self.pool.is_ready(digest) else "host" if digest in self.host else "disk"

    def is_moving(self, version: AdapterVersion) -> bool:
        """True if a version is being read or written, and so has room already."""
        return version.loading or (version.digest in self.pool and not self.pool.is_ready(version.digest))

    def changed(self) -> None:
        """Record that room may have become free."""
        self._no_memory = None
        self._no_rows.clear()

    def drop(self, digest: bytes) -> None:
        """Remove a content that no running request uses from both tiers."""
        if digest in self.pool:
            self.pool.evict(digest)
        self.host.drop(digest)

    def check_fits(self, name: str, adapter: Adapter) -> None:
        """Refuse (AdapterError) an adapter that is larger than a tier."""
        size, num_rows = self._size(adapter), self.pool.num_rows
        if size > num_rows:
            raise adapter_error(
                f"adapter '{name}' takes {_shown(adapter, size)}, and the device has {num_rows}; raise lora_memory"
            )
        limit = self.host.max_bytes
        if limit is not None and adapter.num_bytes > limit:
            raise adapter_error(
                f"adapter '{name}' takes {format_bytes(adapter.num_bytes)} of host memory, and there are "
                f"{format_bytes(limit)} (max_cpu_lora_memory)"
            )

    def check_room_without_pins(self, name: str, adapter: Adapter) -> None:
        """Refuse (AdapterError) an adapter for which the pinned ones leave no room."""
        size, left = self._size(adapter), self.pool.num_rows - self.pool.num_pinned_rows
        if size > left and adapter.digest not in self.pool:
            raise adapter_error(
                f"adapter '{name}' takes {_shown(adapter, size)}, and the pinned adapters leave {left}; unpin one, or "
                "raise lora_memory"
            )

    def _size(self, adapter: Adapter | AdapterVersion) -> int:
        """Return the rank rows that an adapter counts as on the device."""
        return self.pool.size(adapter.rows, adapter.bytes_outside_rows)

    # --- host ---

    def make_room(self, order: Order, num_reserved: int, num_bytes: int | None = None) -> bool:
        """Evict adapters until one more fits the host tier; False when there is no room.

        Adapters without waiting requests go first, then those of the least urgent requests; those on the device last,
        the least recently used of each first. An adapter that a more urgent request waits for stays, otherwise two
        adapters would evict each other. So does one of a preempted request: its files may have changed.

        Args:
            order: Order of the most urgent request that needs the room.
            num_reserved: Number of adapters being read, which need room, too.
            num_bytes: Size of the adapter, when it is known.
        """
        size = math.inf if num_bytes is None else num_bytes
        kept = sum(version.num_bytes for version in self._registry.pinned())
        while not self.host.has_room(num_reserved, num_bytes, kept):
            if self._no_memory is not None and order >= self._no_memory[0] and size >= self._no_memory[1]:
                return False
            victim = self._host_victim(order)
            if victim is None:
                self._no_memory = (order, size)
                return False
            self._count_eviction(victim, "host")
            self.drop(victim)
            self.num_host_evictions += 1
        return True

    def _host_victim(self, order: Order) -> bytes | None:
        """Return the adapter to evict from host memory for a request of this order; see `make_room`."""
        found: tuple[Order, bool] = (MOST_URGENT, False)
        victim: bytes | None = None
        for digest in self.host:
            on_device = digest in self.pool
            if (on_device and not self.pool.is_evictable(digest)) or self._registry.is_held(digest):
                continue
            candidate = (self._registry.first_order(digest) or LEAST_URGENT, not on_device)
            if victim is None or candidate > found:
                found, victim = candidate, digest
            if found == (LEAST_URGENT, True):  # none of the thousands of others can come before this one
                break
        return None if found[0] <= order and found[0] != LEAST_URGENT else victim

    # --- device ---

    def place(self, adapter: Adapter, order: Order) -> bool:
        """Give an adapter rows on the device and start to write them, for a request of this order; False when there is
        no room now. No effect if it has rows."""
        digest, size = adapter.digest, self._size(adapter)
        if digest in self.pool:
            return True
        if any(size >= rows and order >= refused for rows, refused in self._no_rows.items()):
            return False
        before, victims = len(self.pool), self._device_victims(order)
        allocation = self.pool.allocate(
            digest,
            adapter.rows,
            victims,
            num_bytes=adapter.bytes_outside_rows,
            num_draft_rows=adapter.draft_rows,
        )
        if allocation is None:
            self._no_rows[size] = min(order, self._no_rows.get(size, LEAST_URGENT))
            return False
        self.num_device_evictions += before + 1 - len(self.pool)
        for victim in victims:
            if victim not in self.pool:
                self._count_eviction(victim, "device")
        self.pool.begin_write(allocation)
        self._write(allocation, adapter)
        return True

    def _device_victims(self, order: Order) -> list[bytes]:
        """Return the adapters that may be evicted from the device: those without waiting requests, the least recently
        used first, then those of less urgent requests, the least urgent first."""
        evictable = [
            (self._registry.first_order(d) or LEAST_URGENT, d) for d in self.pool.digests() if self.pool.is_evictable(d)
        ]
        evictable.sort(key=lambda item: item[0], reverse=True)  # stable
        return [digest for first, digest in evictable if first > order or first == LEAST_URGENT]

    def written(self, allocation: Allocation, *, failed: bool) -> None:
        """Record the end of a write of these rows. If it failed, they are free again."""
        digest = allocation.key
        if failed and digest in self.pool and self.pool.allocation(digest) is allocation:
            self.pool.evict(digest)
        if not failed:
            for label in self._labels(digest):
                self.counts.loaded(label, "device")
        self.pool.end_write(allocation)

    def _labels(self, digest: bytes) -> set[str]:
        return {version.label for version in self._registry.with_content(digest)}

    def _count_eviction(self, digest: bytes, level: str) -> None:
        for label in self._labels(digest):
            self.counts.evicted(label, level)

    # --- pins ---

    def pin(self, name: str, adapter: Adapter, num_reserved: int) -> None:
        """Load an adapter that is about to be pinned onto the device.

        Raises:
            InvalidUserInputError: too many are pinned, or there is no room for it now; nothing has changed.
        """
        digest = adapter.digest
        self._check_pinnable(name, adapter)
        replaced = self._registry.find(name)
        is_new = digest not in self.host
        if not is_new or self.make_room(LEAST_URGENT, num_reserved, adapter.num_bytes):
            if is_new:
                self.host.put(adapter)
            if replaced is not None and replaced.digest is not None and replaced.digest in self.pool:
                self.pool.set_pinned(replaced.digest, False)
            self.changed()
            if self.place(adapter, MOST_URGENT):
                self.pool.set_pinned(digest, True)
                return
            self.update_pins()
            if is_new:
                self.host.drop(digest)
        raise InvalidUserInputError(
            f"cannot pin '{name}' now: running requests leave no room for it; try again, or load it without pinning",
            param="pinned",
        )

    def _check_pinnable(self, name: str, adapter: Adapter) -> None:
        """Refuse (InvalidUserInputError) a pin that would leave too little room for any other adapter."""
        others = {v.digest: v for v in self._registry.pinned() if v.name != name and v.digest != adapter.digest}
        rows_left = self.pool.num_rows - sum(map(self._size, others.values())) - self._size(adapter)
        problem = None
        if rows_left < self._max_rank:
            problem = (
                f"the pinned adapters would leave {max(0, rows_left)} of {self.pool.num_rows} rank rows, less than "
                f"another adapter of rank {self._max_rank} (max_lora_rank) needs; raise lora_memory or max_loras"
            )
        elif len(others) + 1 >= self.host.max_adapters:
            problem = f"another adapter must find room in host memory (max_cpu_loras={self.host.max_adapters})"
        elif self.host.max_bytes is not None:
            num_bytes = sum(v.num_bytes for v in others.values()) + adapter.num_bytes
            if 2 * num_bytes > self.host.max_bytes:
                problem = (
                    f"the pinned adapters would take {format_bytes(num_bytes)} of host memory, more than half of "
                    f"{format_bytes(self.host.max_bytes)} (max_cpu_lora_memory)"
                )
        if problem is not None:
            raise InvalidUserInputError(f"cannot pin '{name}': {problem}", param="pinned")

    def update_pins(self) -> None:
        """Pin the contents of pinned current versions on the device, and no others."""
        wanted = {version.digest for version in self._registry.pinned() if version.digest is not None}
        for digest in self.pool.pinned() - wanted:
            self.pool.set_pinned(digest, False)
        for digest in wanted:
            self.pool.set_pinned(digest, True)

    def check_integrity(self) -> None:
        """Check that tiers, rows and running requests agree."""
        self.pool.check_integrity()
        self.host.check_integrity()
        users: dict[bytes | None, int] = {}
        for version in self._registry.in_use():
            users[version.digest] = users.get(version.digest, 0) + len(version.running)
            assert not version.started or version.digest in self.host, "what a request began with is gone"
        for digest in self.pool.digests():
            assert digest in self.host, "an adapter on the device is not in host memory"
            assert self.pool.num_users(digest) == users.pop(digest, 0)
        assert not any(users.values()), "a running request's adapter is not on the device"
        for version in self._registry.pinned():
            assert version.digest is not None
            assert self.pool.is_pinned(version.digest)


def _shown(adapter: Adapter, size: int) -> str:
    """Return the rank rows that an adapter counts as, for a message."""
    if size == adapter.rows:
        return f"{size} rank rows"
    return (
        f"memory of {size} rank rows ({adapter.rows}, and {format_bytes(adapter.bytes_outside_rows)} for embeddings "
        "and other weights of its own)"
    )
