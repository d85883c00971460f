"""Routers: the replica of each request, by what was sent there and has not ended."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable

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

    def __init__(self, slots: int, prefixes: int) -> None:
        self.up = True
        self.ongoing = 0
        self.adapters, self.prefixes = Recent(slots), Recent(prefixes)


class Router:
    """Chooser of replicas for requests."""

    def __init__(self, strategy: str, views: list[View], room: int, seed: int) -> None:
        """`room`: requests of a replica above which affinity looks elsewhere."""
        self.views = views
        self._choose = {"random": self._random, "round robin": self._in_turn, "affinity": self._affine}[strategy]
        self._room = room
        self._source = random.Random(seed)
        self._turn = -1

    def send(self, request: Request) -> int | None:
        """The number of the replica that gets the request; None where none is up."""
        up = [index for index, view in enumerate(self.views) if view.up]
        if not up:
            return None
        chosen = self._choose(request, up)
        view = self.views[chosen]
        view.ongoing += 1
        view.adapters.use(request.adapter)
        view.prefixes.use((request.adapter, request.prefix))
        return chosen

    def _random(self, request: Request, up: list[int]) -> int:
        return self._source.choice(up)

    def _in_turn(self, request: Request, up: list[int]) -> int:
        self._turn += 1
        return up[self._turn % len(up)]

    def _affine(self, request: Request, up: list[int]) -> int:
        """Adapter resident, then prefix seen, then the shorter queue of two random ones."""
        views = self.views
        near = [i for i in up if request.adapter in views[i].adapters and views[i].ongoing < self._room]
        seen = [i for i in near or up if (request.adapter, request.prefix) in views[i].prefixes]
        among = [i for i in seen if views[i].ongoing < self._room] or near or up
        two = among if len(among) < 3 else self._source.sample(among, 2)
        return min(two, key=lambda i: views[i].ongoing)
