"""Choice of a replica: one that has the adapter, then one that has seen a prefix of the text, then the shorter
queue of two random ones (power of two choices, Mitzenmacher 2001).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

PREFIX_CHARS = (256, 1024, 4096, 16384)
"""Lengths of prefixes of texts that are distinguished."""
SEEN_PREFIXES = 10_000
"""Prefixes that a router remembers of a replica."""
SLACK = 8
"""Requests that a replica may have more than the one with the fewest before its adapter or prefix counts for less."""


class RoutingKey(NamedTuple):
    """Properties of a request that replicas differ in."""

    adapter: str = ""
    """Name of the model or adapter; "" for a request that names none."""
    prefixes: tuple[str, ...] = ()
    """Digests of prefixes of the text, the longest last."""


def routing_key(body: bytes) -> RoutingKey:
    """Key of a request's JSON body; an empty one if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return RoutingKey()
    if not isinstance(value, dict) or not isinstance(value.get("model", ""), str):
        return RoutingKey()
    content: Any = next((value[name] for name in ("messages", "input", "prompt") if name in value), "")
    model, text = value.get("model", ""), "".join(_pieces(content))
    cuts = [count for count in PREFIX_CHARS if count <= len(text)]
    texts = [f"{model}\0{text[:cut]}".encode(errors="surrogatepass") for cut in cuts]
    return RoutingKey(model, tuple(hashlib.sha256(prefix).hexdigest() for prefix in texts))


def _pieces(content: Any) -> Iterator[str]:
    """Text of a prompt, or JSON of its messages, not much longer than the longest prefix."""
    length = 0
    for piece in content if isinstance(content, list) else [content]:
        if length > PREFIX_CHARS[-1]:
            return
        text = piece if isinstance(piece, str) else json.dumps(piece)
        length += len(text)
        yield text


class LruSet(OrderedDict[Hashable, None]):
    """The last `size` different keys, the most recent last."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def use(self, key: Hashable) -> None:
        """Add or renew a key; the oldest one goes if there are too many."""
        self[key] = None
        self.move_to_end(key)
        while len(self) > self.size:
            self.popitem(last=False)


class ReplicaView:
    """A replica as a router sees it."""

    def __init__(self, adapter_slots: int = 1, prefixes: int = SEEN_PREFIXES) -> None:
        self.ongoing = 0
        """Requests that it was given and has not answered."""
        self.ready = True
        """False while it answers no requests: asleep, paused, or its engine is being restarted."""
        self.adapters = LruSet(adapter_slots)
        """Adapters that it has, or was given requests for, as many as it has room for."""
        self.prefixes = LruSet(prefixes)
        self._given = LruSet(adapter_slots)  # adapters of requests since the last `observe`, that `adapters` may have

    def observe(self, adapters: Collection[str], slots: int) -> None:
        """Take over what the replica says: the adapters that it has, and how many may be. Those that it was given since
        the last time are kept, for it may not have loaded them when it said so, and nothing replaces them."""
        self.adapters.size = self._given.size = max(1, slots)
        for adapter in [*self.adapters]:
            if adapter not in adapters and adapter not in self._given:
                del self.adapters[adapter]
        self._given.clear()
        for adapter in adapters:
            if adapter not in self.adapters and len(self.adapters) < self.adapters.size:
                self.adapters.use(adapter)

    def give(self, key: RoutingKey) -> None:
        """Note a request that it was given."""
        if key.adapter:
            self.adapters.use(key.adapter)
            self._given.use(key.adapter)
        for prefix in key.prefixes:
            self.prefixes.use(prefix)


class AffinityRouter(Generic[K]):
    """Chooser among replicas by their views."""

    def __init__(self, slack: int = SLACK, seed: int | None = None) -> None:
        self._slack = slack
        self._source = random.Random(seed)

    def rank(self, views: Mapping[K, ReplicaView], key: RoutingKey) -> Sequence[K]:
        """All replicas, the best one first."""
        keys = [name for name, view in views.items() if view.ready] or list(views)
        if not keys:
            return []
        limit = min(views[name].ongoing for name in keys) + self._slack
        free = [name for name in keys if views[name].ongoing <= limit]
        near = [name for name in free if key.adapter in views[name].adapters]
        among = near or free
        reach = {name: sum(prefix in views[name].prefixes for prefix in key.prefixes) for name in among}
        most = max(reach.values())
        if most:
            among = [name for name in among if reach[name] == most]
        two = among if len(among) < 3 else self._source.sample(among, 2)
        best = min(two, key=lambda name: (views[name].ongoing, len(views[name].adapters), self._source.random()))
        rest = sorted((not views[name].ready, views[name].ongoing, at) for at, name in enumerate(views) if name != best)
        return [best, *([*views][at] for _, _, at in rest)]
