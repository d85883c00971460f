"""Which adapters are in host memory and which on the device, and who makes way for whom.

    host tier                    ⊇    device rows
    parsed, max_cpu_loras             max_loras adapters, max_loras * max_lora_rank rows

Requests that wait are served in the scheduling policy's order: an adapter loaded for one is not pushed out for a less
urgent one, and a request that has waited too long stops less urgent ones from keeping what it needs in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..platform.core.config import LoRAConfig
from ..platform.core.errors import InvalidUserInputError
from ..platform.core.request import Request
from .adapter import Adapter
from .loader import HostTier
from .pool import RowPool
from .registry import AdapterRegistry, AdapterVersion, Order
from .sites import AdapterSites

# Seconds after which a request that waits for room may have others' adapters drained.
AGING_SECONDS = 2.0
# Seconds after which to look again who has waited that long, when nothing else has changed.
LOOK_SECONDS = 0.05

LEAST_URGENT: Order = (math.inf, math.inf)


class Residency:
    """The host tier, the row pool and the sites' rows, moved only together."""

    def __init__(
        self,
        config: LoRAConfig,
        registry: AdapterRegistry,
        pool: RowPool,
        sites: Sequence[AdapterSites],
        clock: Callable[[], float],
    ) -> None:
        """`sites`: the target's, and the drafter's; with `pool`, they change through this object alone. `registry` is
        read, never changed."""
        self.host = HostTier(config.max_cpu_loras)
        self.pool = pool
        self._sites = sites
        self._config = config
        self._registry = registry
        self._clock = clock
        self._short: dict[AdapterVersion, None] = {}  # refused room, in host memory or on the device, since they had it
        self._starving: AdapterVersion | None = None  # as of the last look
        self._next_look = -math.inf
        self._full_for: Order | None = None  # the most urgent claim to host memory refused since the last change

    def level(self, digest: bytes | None) -> str:
        """The highest tier that holds the content: "device", "host" or "disk"."""
        return "device" if digest in self.pool else "host" if digest in self.host else "disk"

    def drop(self, digest: bytes) -> None:
        """Forget a content that no request uses."""
        if digest in self.pool:
            self.pool.evict(digest)
        self.host.drop(digest)

    # --- host ---

    def make_room(self, claim: Order, num_reserved: int) -> bool:
        """Make sure that one more adapter fits the host tier, for requests as urgent as `claim`, beside `num_reserved`
        still to come.

        Adapters that nobody waits for go first, then those of the least urgent; those on the device last, the least
        recently used of each first. What more urgent ones wait for stays, or they would push each other out; so does
        what a request has begun with, as the files may have changed.
        """
        while len(self.host) + num_reserved >= self.host.max_adapters:
            if self._full_for is not None and claim >= self._full_for:
                return False
            claims, held = self._claims()
            victims = [
                digest
                for digest in self.host.digests()
                if (digest not in self.pool or self.pool.is_evictable(digest))
                and digest not in held
                and (digest not in claims or claims[digest] > claim)
            ]
            if not victims:
                self._full_for = claim
                return False
            self.drop(max(victims, key=lambda digest: (claims.get(digest, LEAST_URGENT), digest not in self.pool)))
        return True

    def _claims(self) -> tuple[dict[bytes, Order], set[bytes]]:
        """For what is in host memory: the most urgent request that waits for it; and what preempted ones began with."""
        claims: dict[bytes, Order] = {}
        held: set[bytes] = set()
        for version in self._registry:
            if version.digest is None or version.digest not in self.host:
                continue
            first = version.first_waiting()
            if first is not None:
                claims[version.digest] = min(first.order, claims.get(version.digest, LEAST_URGENT))
            if len(version.started) > len(version.running):
                held.add(version.digest)
        return claims, held

    # --- device ---

    def place(self, adapter: Adapter) -> bool:
        """Make sure that the adapter has its rows on the device; False when there is no room for it now."""
        if adapter.digest in self.pool:
            return True
        allocation = self.pool.allocate(adapter.digest, adapter.rows)
        if allocation is None:
            return False
        for sites, modules in zip(self._sites, (adapter.modules, adapter.draft_modules), strict=True):
            sites.write(allocation, modules)
        return True

    # --- aging ---

    @property
    def any_short(self) -> bool:
        """Whether any version was refused room and has not had it since."""
        return bool(self._short)

    def set_short(self, version: AdapterVersion) -> None:
        """The version was refused room: its requests may starve from now on."""
        if version not in self._short:
            self._short[version] = None
            self._next_look = -math.inf

    def clear_short(self, version: AdapterVersion) -> bool:
        """The version has what it was refused; whether it had been."""
        if version not in self._short:
            return False
        del self._short[version]
        self._next_look = -math.inf
        return True

    def changed(self) -> None:
        """Room may have come free, or requests may have gone."""
        self._full_for = None
        self._next_look = -math.inf

    def must_yield(self, request: Request, version: AdapterVersion) -> bool:
        """Whether the request must wait so that a more urgent one, which has waited too long, gets the room it needs.

        The version's content is in host memory. It yields the rows that it would have to take, and those that it has
        when they are among those to be drained.
        """
        starving = self._find_starving()
        if starving is None or version.digest is None or version.digest == starving.digest:
            return False
        first = starving.first_waiting()
        if first is None or first.order >= request.order or self.pool.is_pinned(version.digest):
            return False
        held: set[bytes] = set()
        if starving.digest is None or starving.digest not in self.host:
            _, held = self._claims()
        elif version.digest not in self.pool:
            return True
        return version.digest == self._to_drain(first.order, held)

    def _find_starving(self) -> AdapterVersion | None:
        """The version with the most urgent request among those that have waited too long for room."""
        if not self._short or (now := self._clock()) < self._next_look:
            return self._starving if self._short else None
        self._starving, self._next_look = None, now + LOOK_SECONDS
        least = LEAST_URGENT
        for version in list(self._short):
            first = version.first_waiting()
            if first is None or version.digest in self.pool:
                del self._short[version]
            elif first.order < least and version.waiting[first] < now - AGING_SECONDS:
                self._starving, least = version, first.order
        return self._starving

    def _to_drain(self, order: Order, held: set[bytes]) -> bytes | None:
        """The adapter on the device that must go; one is enough, as the pool has room for `max_loras` of any rank.

        Preferably one without requests more urgent than `order`, as these do not yield, and of these the one with the
        fewest users. `held` ones do not help: what preempted requests began with stays in host memory, so if they
        yielded to one that waits to get there, both would wait for ever.
        """
        urgent = {
            version.digest
            for version in self._registry
            if version.digest in self.pool
            and any(request.order < order for request in (*version.running, version.first_waiting()) if request)
        }
        able = [digest for digest in self.pool.digests() if not self.pool.is_pinned(digest) and digest not in held]
        return min(able, key=lambda digest: (digest in urgent, self.pool.num_users(digest)), default=None)

    # --- pins ---

    def pin(self, name: str, adapter: Adapter, num_reserved: int) -> None:
        """Bring an adapter that is about to be registered as pinned onto the device.

        Raises:
            InvalidUserInputError: too many are pinned, or there is no room for it now; nothing has changed.
        """
        self.check_pinnable(name, adapter)
        replaced = self._registry.find(name)
        is_new = adapter.digest not in self.host
        if not is_new or self.make_room(LEAST_URGENT, num_reserved):
            self.host.put(adapter)
            if replaced is not None and replaced.digest is not None and replaced.digest in self.pool:
                self.pool.set_pinned(replaced.digest, False)
            if self.place(adapter):
                return
            self.update_pins()
            if is_new:
                self.host.drop(adapter.digest)
        raise InvalidUserInputError(
            f"cannot pin '{name}' now: running requests leave no room for it; try again, or load it without pinning",
            param="pinned",
        )

    def check_pinnable(self, name: str, adapter: Adapter) -> None:
        """Refuse (InvalidUserInputError) to pin what would leave too little room for any other adapter."""
        pinned = {v.digest: v.rows for v in self._registry.current() if v.pinned and v.name != name}
        pinned[adapter.digest] = adapter.rows
        rows_left = self.pool.num_rows - sum(pinned.values())
        if len(pinned) >= self.pool.max_entries or rows_left < self._config.max_lora_rank:
            raise InvalidUserInputError(
                f"cannot pin '{name}': beside the pinned adapters another one of rank "
                f"{self._config.max_lora_rank} (max_lora_rank) must find room (max_loras={self._config.max_loras})",
                param="pinned",
            )

    def update_pins(self) -> None:
        """Pin on the device what a current version pins, and nothing else."""
        pinned = {version.digest for version in self._registry.current() if version.pinned}
        for digest in self.pool.digests():
            self.pool.set_pinned(digest, digest in pinned)

    def check_integrity(self) -> None:
        """Tiers, rows and the requests that run agree."""
        self.pool.check_integrity()
        assert len(self.host) <= self.host.max_adapters
        users: dict[bytes | None, int] = {}
        for version in self._registry:
            users[version.digest] = users.get(version.digest, 0) + len(version.running)
        for digest in self.pool.digests():
            assert digest in self.host, "an adapter on the device is not in host memory"
            assert self.pool.num_users(digest) == users.pop(digest, 0)
        for version in self._registry:
            assert not version.started or version.digest in self.host, "what a request began with is gone"
            assert not (version.pinned and version.current) or self.pool.is_pinned(version.digest or b"")
        assert not any(users.values()), "a running request's adapter is not on the device"
