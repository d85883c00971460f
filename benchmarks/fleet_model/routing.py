"""Routers: the replica of each request, by what was sent there and has not ended."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count

from .load import Request

STRATEGIES = ("random", "round robin", "affinity")


class Recent(OrderedDict[Hashable, None]):
    """The last `size` different things, most recent last."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def use(self, key: Hashable) -> Hashable | None:
        """Add or renew a key; returns the one that had to go."""
        self[key] = None
        self.move_to_end(key)
        return self.popitem(last=False)[0] if len(self) > self._size else None


class View:
    """A replica as its router sees it."""

    def __init__(self, replica_id: str, slots: int, prefixes: int) -> None:
        self.replica_id = replica_id
        self.up = True
        self.queue_length = 0
        """Requests that run or wait there."""
        self.adapters, self.prefixes = Recent(slots), Recent(prefixes)


class Affinity:
    """Adapter resident, then prefix seen, then the shorter queue of two random replicas.

    A replica that is busier than the least busy one by more than `max_imbalance` requests is passed over.
    """

    def __init__(self, max_imbalance: int, source: random.Random) -> None:
        self._max_imbalance, self._source = max_imbalance, source

    def choose(self, request: Request, views: Sequence[View]) -> str:
        """Id of the replica for a request, of at least one."""
        bound = min(view.queue_length for view in views) + self._max_imbalance
        free = [view for view in views if view.queue_length <= bound]
        near = [view for view in free if request.adapter in view.adapters] or free
        among = [view for view in near if (request.adapter, request.prefix) in view.prefixes] or near
        two = among if len(among) < 3 else self._source.sample(among, 2)
        return min(two, key=lambda view: view.queue_length).replica_id


class Router:
    """Sender of requests to replicas, by one of the strategies."""

    def __init__(self, strategy: str, views: list[View], max_imbalance: int, seed: int) -> None:
        self.views = views
        source = random.Random(seed)
        turn = count()
        affinity = Affinity(max_imbalance, source)
        self._choose: Callable[[Request, Sequence[View]], str] = {
            "random": lambda request, up: source.choice(up).replica_id,
            "round robin": lambda request, up: up[next(turn) % len(up)].replica_id,
            "affinity": affinity.choose,
        }[strategy]

    def send(self, request: Request) -> int | None:
        """The number of the replica that gets the request; None where none is up."""
        up = [view for view in self.views if view.up]
        if not up:
            return None
        chosen = int(self._choose(request, up))
        view = self.views[chosen]
        view.queue_length += 1
        view.adapters.use(request.adapter)
        view.prefixes.use((request.adapter, request.prefix))
        return chosen
