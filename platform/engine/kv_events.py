"""KV events of an engine, which are published if the options ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError
from ..core.kv_events import KVEventSource, parse_kv_events
from .memory.cache_events import CacheEvents

if TYPE_CHECKING:
    from .kv_publisher import KVEventPublisher
    from .memory.prefix_cache import PrefixCache


class KVEvents:
    """Events of an engine's prefix cache. Without `kv_events_config` nothing is recorded."""

    def __init__(self, args: EngineArgs) -> None:
        """Open the sockets.

        Raises:
            InvalidRequestError: the configuration is wrong, an address cannot be used, or a package is missing.
        """
        self._publisher = _open_publisher(args)

    def record(self, cache: PrefixCache) -> None:
        """Record what happens in `cache` from now on."""
        if self._publisher is not None:
            cache.record(self._publisher.events)

    def flush(self) -> None:
        """Publish what was recorded since the last call."""
        if self._publisher is not None:
            self._publisher.flush()

    def close(self) -> None:
        """Publish the rest and close the sockets."""
        if self._publisher is not None:
            self._publisher.close()

    def sources(self) -> list[KVEventSource]:
        """Addresses at which events are published."""
        return [] if self._publisher is None else [self._publisher.source]

    @property
    def num_batches(self) -> int:
        """Number of batches so far."""
        return 0 if self._publisher is None else self._publisher.num_batches

    @property
    def num_dropped(self) -> int:
        """Number of batches that found the queue full."""
        return 0 if self._publisher is None else self._publisher.num_dropped


def _open_publisher(args: EngineArgs) -> KVEventPublisher | None:
    config = parse_kv_events(args.kv_events_config, args.data_parallel_rank)
    if config is None:
        return None
    try:
        from .kv_publisher import KVEventPublisher
    except ImportError as error:
        raise InvalidRequestError(
            f"kv_events_config needs pyzmq and msgspec, and {error.name} is missing: pip install '.[serve]'",
            param="kv_events_config",
        ) from error
    return KVEventPublisher(config, args.data_parallel_rank, CacheEvents(args.block_size), args.block_size)
