"""Which adapters are in host memory and which on the device, and who makes way for whom.

    host tier                    ⊇    device rows
    parsed, max_cpu_loras             max_loras adapters, max_loras * max_lora_rank rows

Requests that wait are served in the order in which they began to: an adapter loaded for one is not pushed out for a
later one, and a request that has waited too long for rows stops newer requests from keeping others' rows in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..platform.core.config import LoRAConfig
from ..platform.core.errors import InvalidUserInputError
from ..platform.core.request import Request
from .adapter import Adapter, ModuleShape
from .layers import LoraSite
from .loader import HostTier
from .pool import RowPool
from .registry import AdapterRegistry, AdapterVersion

if TYPE_CHECKING:
    from ..models.layers.linear import Linear

# Seconds after which a request that waits for rows may have others' rows drained.
AGING_SECONDS = 2.0


class Residency:
    """The host tier, the row pool and the sites' rows, moved only together."""

    def __init__(
        self,
        linears: Sequence[Linear],
        config: LoRAConfig,
        registry: AdapterRegistry,
        dtype: torch.dtype,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        """Gives every linear its LoraSite. `registry` is read, never changed."""
        self.host = HostTier(config.max_cpu_loras)
        self.pool = RowPool(config.max_loras * config.max_lora_rank, config.max_loras)
        self.modules: dict[str, ModuleShape] = {}
        """The linear modules of the model, by their Hugging Face names."""
        self._config = config
        self._registry = registry
        self._clock = clock
        self._short: dict[AdapterVersion, None] = {}  # versions that were refused rows since they last had some
        self._sites: list[tuple[LoraSite, list[str]]] = []
        for linear in linears:
            sizes = [size for _, size in linear.slices]
            site = LoraSite(linear.in_features, sizes, self.pool.num_rows, dtype, device)
            linear.lora = site
            self._sites.append((site, [name for name, _ in linear.slices]))
            self.modules.update((name, ModuleShape(linear.in_features, size)) for name, size in linear.slices)

    def level(self, digest: bytes | None) -> str:
        """The highest tier that holds the content: "device", "host" or "disk"."""
        return "device" if digest in self.pool else "host" if digest in self.host else "disk"

    def drop(self, digest: bytes) -> None:
        """Forget a content that no request uses."""
        if digest in self.pool:
            self.pool.evict(digest)
        self.host.drop(digest)

    # --- host ---

    def make_room(self, version: AdapterVersion, num_reserved: int) -> bool:
        """Make sure that one more adapter fits the host tier, for `version`, beside `num_reserved` still to come.

        Adapters that nobody waits for go first, those on the device last, the least recently used of each first.
        One that requests have been waiting for longer than for `version` stays, or they would push each other out.
        """
        while len(self.host) + num_reserved >= self.host.max_adapters:
            own = version.waiting_since()
            wanted = {v.digest: since for v in self._registry if (since := v.waiting_since()) is not None}
            victims = [
                digest
                for digest in self.host.digests()
                if (digest not in self.pool or self.pool.is_evictable(digest))
                and (digest not in wanted or (own is not None and wanted[digest] > own))
            ]
            if not victims:
                return False
            self.drop(min(victims, key=lambda digest: (digest in wanted, digest in self.pool)))
        return True

    # --- device ---

    def place(self, version: AdapterVersion, adapter: Adapter) -> bool:
        """Make sure that the adapter has its rows on the device; False when there is no room for it now."""
        if adapter.digest not in self.pool:
            allocation = self.pool.allocate(adapter.digest, adapter.rows)
            if allocation is None:
                self._short[version] = None
                return False
            for site, names in self._sites:
                site.write(allocation, [adapter.modules.get(name) for name in names])
            self.update_pins()
        self._short.pop(version, None)
        return True

    def must_yield(self, request: Request, version: AdapterVersion) -> bool:
        """Whether the request must let its adapter's rows drain for one that has waited too long for any rows."""
        digest = version.digest
        if not self._short or digest is None or digest not in self.pool or self.pool.is_pinned(digest):
            return False
        starving: AdapterVersion | None = None
        oldest = min(self._clock() - AGING_SECONDS, version.waiting[request])
        for other in list(self._short):
            since = other.waiting_since()
            if since is None or other.digest in self.pool:
                del self._short[other]
            elif since < oldest:
                starving, oldest = other, since
        return starving is not None and digest in self._to_drain(starving.rows)

    def _to_drain(self, num_rows: int) -> list[bytes]:
        """The adapters that must go so that `num_rows` rows and an entry become free: those with the fewest users."""
        free, count, chosen = self.pool.num_free_rows, len(self.pool), []
        unpinned = [digest for digest in self.pool.digests() if not self.pool.is_pinned(digest)]
        for digest in sorted(unpinned, key=self.pool.num_users):
            if free >= num_rows and count < self.pool.max_entries:
                break
            chosen.append(digest)
            free += len(self.pool.allocation(digest).rows)
            count -= 1
        return chosen

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
        assert not any(users.values()), "a running request's adapter is not on the device"
