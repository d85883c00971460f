"""Routers: the replica of each request, by what was sent there and has not ended. Affinity is the rule of
`outrider deploy`."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

from outrider.platform.replicas.routing import AffinityRouter, ReplicaView, RoutingKey

from .load import Request

STRATEGIES = ("random", "round robin", "affinity")


class Router:
    """Sender of requests to replicas, by one of the strategies. Replicas that are not ready get none."""

    def __init__(self, strategy: str, views: list[ReplicaView], seed: int) -> None:
        self.views = views
        source, turn, affinity = random.Random(seed), count(), AffinityRouter[int](seed=seed)
        self._choose: Callable[[RoutingKey, dict[int, ReplicaView]], int] = {
            "random": lambda key, ready: source.choice([*ready]),
            "round robin": lambda key, ready: [*ready][next(turn) % len(ready)],
            "affinity": lambda key, ready: affinity.rank(ready, key)[0],
        }[strategy]

    def send(self, request: Request) -> int | None:
        """The number of the replica that gets the request; None if none is ready."""
        ready = {index: view for index, view in enumerate(self.views) if view.ready}
        if not ready:
            return None
        key = RoutingKey(str(request.adapter), (f"{request.adapter}/{request.prefix}",))
        chosen = self._choose(key, ready)
        self.views[chosen].ongoing += 1
        self.views[chosen].give(key)
        return chosen
