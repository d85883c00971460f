"""A router's side of KV events: it decodes vLLM's wire form and knows which prefixes an engine has."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event is a map whose key "type" has the name of the class."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    tenant: str = ""
    """Not in vLLM."""


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch is an array."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class CacheView:
    """The engine's cache as its events tell it. Applying an event that cannot be right is an AssertionError."""

    def __init__(self):
        self.held = {"GPU": {}, "CPU": {}}
        """By hash, the key of each block: what a router can look it up by."""
        self._hash_of = {}

    def apply(self, batch):
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    key = self.held[event.medium].pop(name)  # KeyError: it was not there
                    self._hash_of.pop((event.medium, key))
            else:
                self.__init__()

    def _store(self, event):
        size, parent, held = event.block_size, event.parent_block_hash, self.held[event.medium]
        assert event.medium == "CPU" or len(event.token_ids) == size * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            assert name not in held, "a block is stored twice"
            if event.medium == "CPU":
                key = name  # the device must have had it
            else:
                tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                key = (parent, tokens, event.lora_name, event.extra_keys[index], event.tenant)
            assert (event.medium, key) not in self._hash_of, "two blocks have one key"
            held[name] = key
            self._hash_of[event.medium, key] = parent = name

    def num_found(self, keys):
        """Leading blocks of a prompt that the device has. `keys`: of each block, but for its parent."""
        parent = None
        for count, key in enumerate(keys):
            parent = self._hash_of.get(("GPU", (parent, *key)))
            if parent is None:
                return count
        return len(keys)
