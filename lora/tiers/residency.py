"""Which adapters are in host memory and which on the device, and who makes way for whom.

    host tier                         ⊇    device rows
    max_cpu_loras adapters, or bytes       as many as their ranks allow; max_loras of them run

Requests that wait are served in the scheduling policy's order: what one waits for is not pushed out for a less urgent
one. `aging` sees to it that nobody waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...platform.core.config import LoRAConfig
from ...platform.core.errors import InvalidUserInputError
from ...platform.core.sizes import shown_bytes
from ..device.pool import Allocation, RowPool
from ..files.peft_config import adapter_error
from ..registry.registry import AdapterRegistry
from ..registry.versions import AdapterVersion, Order
from .host_tier import HostTier
from .row_writer import HostEntry

LEAST_URGENT: Order = (math.inf, math.inf)
MOST_URGENT: Order = (-math.inf, -math.inf)


class Residency:
    """The host tier and the row pool, changed only together."""

    def __init__(
        self,
        config: LoRAConfig,
        registry: AdapterRegistry,
        pool: RowPool,
        write: Callable[[Allocation, HostEntry], None],
    ) -> None:
        """`registry` is read, never changed. `write` starts to write an adapter's rows; `written` is to be called when
        that has ended."""
        self.host = HostTier(config.max_cpu_loras, config.max_cpu_bytes)
        self.pool = pool
        self._max_rank = config.max_lora_rank
        self._registry = registry
        self._write = write
        self.num_host_evictions = self.num_device_evictions = 0
        # Claims refused since the last change, with what they were for: less urgent ones for no less need no look.
        self._no_memory: tuple[Order, float] | None = None
        self._no_rows: dict[int, Order] = {}

    def level(self, digest: bytes | None) -> str:
        """The highest tier that holds the content: "device", "host" or "disk"."""
        return "device" if self.pool.is_ready(digest) else "host" if digest in self.host else "disk"

    def is_moving(self, version: AdapterVersion) -> bool:
        """Return whether the version is being read or written: it has the room that it needs for that."""
        return version.loading or (version.digest in self.pool and not self.pool.is_ready(version.digest))

    def changed(self) -> None:
        """Room may have come free."""
        self._no_memory = None
        self._no_rows.clear()

    def drop(self, digest: bytes) -> None:
        """Forget a content that no running request uses."""
        if digest in self.pool:
            self.pool.evict(digest)
        self.host.drop(digest)

    def check_fits(self, name: str, entry: HostEntry) -> None:
        """Refuse (AdapterError) an adapter that there can be no room for, with both figures."""
        rows, num_rows = entry.adapter.rows, self.pool.num_rows
        if rows > num_rows:
            raise adapter_error(
                f"adapter '{name}' takes {rows} rank rows, and the device has {num_rows}; raise lora_memory"
            )
        limit = self.host.max_bytes
        if limit is not None and entry.num_bytes > limit:
            raise adapter_error(
                f"adapter '{name}' takes {shown_bytes(entry.num_bytes)} of host memory, and there are "
                f"{shown_bytes(limit)} (max_cpu_lora_memory)"
            )

    def check_room_beside_pins(self, name: str, entry: HostEntry) -> None:
        """Refuse (AdapterError) one for which the pinned adapters leave no room, however long it waits."""
        rows, left = entry.adapter.rows, self.pool.num_rows - self.pool.num_pinned_rows
        if rows > left and entry.adapter.digest not in self.pool:
            raise adapter_error(
                f"adapter '{name}' takes {rows} rank rows, and the pinned adapters leave {left}; unpin one, or raise "
                "lora_memory"
            )

    # --- host ---

    def make_room(self, claim: Order, num_reserved: int, num_bytes: int | None = None) -> bool:
        """Make sure that one more adapter fits the host tier, for requests as urgent as `claim`, beside `num_reserved`
        still to come. `num_bytes`: its size, when it is known.

        Adapters that nobody waits for go first, then those of the least urgent; those on the device last, the least
        recently used of each first. What more urgent ones wait for stays, or they would push each other out; so does
        what a request has begun with, as the files may have changed.
        """
        size = math.inf if num_bytes is None else num_bytes
        kept = sum(version.num_bytes for version in self._registry.pinned())
        while not self.host.has_room(num_reserved, num_bytes, kept):
            if self._no_memory is not None and claim >= self._no_memory[0] and size >= self._no_memory[1]:
                return False
            victim = self._host_victim(claim)
            if victim is None:
                self._no_memory = (claim, size)
                return False
            self.drop(victim)
            self.num_host_evictions += 1
        return True

    def _host_victim(self, claim: Order) -> bytes | None:
        """Who makes way in host memory for requests as urgent as `claim`; see `make_room`."""
        found: tuple[Order, bool] = (MOST_URGENT, False)
        victim: bytes | None = None
        for digest in self.host:
            on_device = digest in self.pool
            if (on_device and not self.pool.is_evictable(digest)) or self._registry.is_held(digest):
                continue
            order = self._registry.claim(digest) or LEAST_URGENT
            if victim is None or (order, not on_device) > found:
                found, victim = (order, not on_device), digest
            if found == (LEAST_URGENT, True):  # none comes before the first of these: not all thousands are looked at
                break
        return None if found[0] <= claim and found[0] != LEAST_URGENT else victim

    # --- device ---

    def place(self, entry: HostEntry, claim: Order) -> bool:
        """Make sure that the adapter has rows on the device, and that they are being written, for requests as urgent
        as `claim`; False when there is no room for it now."""
        digest, num_rows = entry.adapter.digest, entry.adapter.rows
        if digest in self.pool:
            return True
        if any(num_rows >= rows and claim >= order for rows, order in self._no_rows.items()):
            return False
        before = len(self.pool)
        allocation = self.pool.allocate(digest, num_rows, self._victims(claim))
        if allocation is None:
            self._no_rows[num_rows] = min(claim, self._no_rows.get(num_rows, LEAST_URGENT))
            return False
        self.num_device_evictions += before + 1 - len(self.pool)
        self.pool.begin_write(allocation)
        self._write(allocation, entry)
        return True

    def _victims(self, claim: Order) -> list[bytes]:
        """Who may make way on the device: those that nobody waits for, the least recently used first, then those that
        less urgent requests wait for, the least urgent first."""
        claims = [
            (self._registry.claim(d) or LEAST_URGENT, d) for d in self.pool.digests() if self.pool.is_evictable(d)
        ]
        claims.sort(key=lambda item: item[0], reverse=True)  # stable
        return [digest for order, digest in claims if order > claim or order == LEAST_URGENT]

    def written(self, allocation: Allocation, *, failed: bool) -> None:
        """The writing of these rows has ended. When it failed, they are free again."""
        digest = allocation.key
        if failed and digest in self.pool and self.pool.allocation(digest) is allocation:
            self.pool.evict(digest)
        self.pool.end_write(allocation)

    # --- pins ---

    def pin(self, name: str, entry: HostEntry, num_reserved: int) -> None:
        """Bring an adapter that is about to be registered as pinned, or pinned where it is, onto the device.

        Raises:
            InvalidUserInputError: too many are pinned, or there is no room for it now; nothing has changed.
        """
        digest = entry.adapter.digest
        self._check_pinnable(name, entry)
        replaced = self._registry.find(name)
        is_new = digest not in self.host
        if not is_new or self.make_room(LEAST_URGENT, num_reserved, entry.num_bytes):
            if is_new:
                self.host.put(entry)
            if replaced is not None and replaced.digest is not None and replaced.digest in self.pool:
                self.pool.set_pinned(replaced.digest, False)
            self.changed()
            if self.place(entry, MOST_URGENT):
                self.pool.set_pinned(digest, True)
                return
            self.update_pins()
            if is_new:
                self.host.drop(digest)
        raise InvalidUserInputError(
            f"cannot pin '{name}' now: running requests leave no room for it; try again, or load it without pinning",
            param="pinned",
        )

    def _check_pinnable(self, name: str, entry: HostEntry) -> None:
        """Refuse (InvalidUserInputError) to pin what would leave too little room for any other adapter."""
        others = {v.digest: v for v in self._registry.pinned() if v.name != name and v.digest != entry.adapter.digest}
        rows_left = self.pool.num_rows - sum(v.rows for v in others.values()) - entry.adapter.rows
        problem = None
        if rows_left < self._max_rank:
            problem = (
                f"the pinned adapters would leave {max(0, rows_left)} of {self.pool.num_rows} rank rows, less than "
                f"another adapter of rank {self._max_rank} (max_lora_rank) needs; raise lora_memory or max_loras"
            )
        elif len(others) + 1 >= self.host.max_adapters:
            problem = f"another adapter must find room in host memory (max_cpu_loras={self.host.max_adapters})"
        elif self.host.max_bytes is not None:
            num_bytes = sum(v.num_bytes for v in others.values()) + entry.num_bytes
            if 2 * num_bytes > self.host.max_bytes:
                problem = (
                    f"the pinned adapters would take {shown_bytes(num_bytes)} of host memory, more than half of "
                    f"{shown_bytes(self.host.max_bytes)} (max_cpu_lora_memory)"
                )
        if problem is not None:
            raise InvalidUserInputError(f"cannot pin '{name}': {problem}", param="pinned")

    def update_pins(self) -> None:
        """Pin on the device what a current version pins, and nothing else."""
        wanted = {version.digest for version in self._registry.pinned() if version.digest is not None}
        for digest in self.pool.pinned() - wanted:
            self.pool.set_pinned(digest, False)
        for digest in wanted:
            self.pool.set_pinned(digest, True)

    def check_integrity(self) -> None:
        """Tiers, rows and the requests that run agree."""
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
