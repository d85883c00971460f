"""Events of the prefix cache, as plain data in vLLM's form: blocks stored and removed, and all of them cleared.

A consumer that applies them in their order knows the blocks that a new sequence could find:

    BlockStored    on the device (GPU) with its tokens; on the host (CPU) with its hash alone: the device had it before
    BlockRemoved   from one of the two
    AllBlocksCleared

Hashes are cut to 64 bits, which is what consumers expect. They are names: only the engine compares whole ones, and only
it decides about sharing. `extra_keys` of a block has what vLLM's has: the adapter's name, and in the first block the
salt. The tenant, which vLLM does not know, has a field of its own. Blocks that all tenants share have no tenant.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ...core.adapter_names import MARK, public_text
from ...core.request import Request

DEVICE, HOST = "GPU", "CPU"
"""Values of `medium`, on a CPU too: the fast memory that steps read, and that of `swap_space`."""

Event = dict[str, Any]


def event_hash(digest: bytes) -> int:
    """The hash of a block as events have it."""
    return int.from_bytes(digest[-8:])


class CacheEvents:
    """Records events in their order until `take`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []

    def stored(self, request: Request, indices: Sequence[int]) -> None:
        """Record that blocks of a request, of these ascending indices, can be found on the device."""
        # Of one event: blocks that follow each other, with one adapter and one tenant.
        cuts = {request.num_base_tokens // self._block_size, request.num_shared_tokens // self._block_size}
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1 or indices[at] in cuts:
                self._stored(request, indices[start], indices[at - 1] + 1)
                start = at

    def _stored(self, request: Request, first: int, end: int) -> None:
        adapter, salt = self._adapter(request, first), request.cache_salt
        extra_keys = [[adapter] if adapter else None] * (end - first)
        if first == 0 and salt:
            extra_keys[0] = [adapter, salt] if adapter else [salt]
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [event_hash(digest) for digest in request.block_hashes[first:end]],
            "parent_block_hash": event_hash(request.block_hashes[first - 1]) if first else None,
            "token_ids": array("q", request.tokens[first * self._block_size : end * self._block_size]).tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": DEVICE,
            "lora_name": adapter,
            "extra_keys": extra_keys,
        }
        if tenant := self._tenant(request, first, adapter):
            event["tenant"] = tenant
        self._events.append(event)

    def _adapter(self, request: Request, index: int) -> str | None:
        """Name, as clients know it, of the adapter that a block was computed with; None: the base model."""
        is_base = index < request.num_base_tokens // self._block_size  # before an adapter that is activated later
        return None if request.lora is None or is_base else public_text(request.lora.name)

    def _tenant(self, request: Request, index: int, adapter: str | None) -> str:
        """Tenant whose requests alone find a block; "" for a block that all share. Its own adapters are no other's."""
        is_own = adapter is not None and request.lora is not None and MARK in request.lora.name
        return "" if index < request.num_shared_tokens // self._block_size and not is_own else request.tenant

    def stored_on_host(self, digest: bytes) -> None:
        """Record that the host has the content of a block. Its tokens are not known here any more."""
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [event_hash(digest)],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": self._block_size,
                "lora_id": None,
                "medium": HOST,
                "lora_name": None,
            }
        )

    def removed(self, digest: bytes, medium: str) -> None:
        """Record that a block is not in this memory any more."""
        last = self._events[-1] if self._events else {}
        if last.get("type") != "BlockRemoved" or last["medium"] != medium:
            last = {"type": "BlockRemoved", "block_hashes": [], "medium": medium}
            self._events.append(last)
        last["block_hashes"].append(event_hash(digest))

    def cleared(self) -> None:
        """Record that nothing is cached any more; what was recorded before says no more than that."""
        self._events = [{"type": "AllBlocksCleared"}]

    def take(self) -> list[Event]:
        """Return the events since the last call, and forget them."""
        events, self._events = self._events, []
        return events
