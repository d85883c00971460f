"""Requests through an engine in this process, and the times at which their tokens come."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import OutriderError
from ...core.messages import EngineRequest, SpeculationCounts
from ...engine.engine_core import EngineCore


@dataclass(slots=True)
class RequestTimes:
    """One request; times in seconds of one clock."""

    started: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Time of each step that brought tokens."""
    speculation: SpeculationCounts | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.started

    @property
    def e2el(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1] - self.started

    @property
    def tpot(self) -> float:
        """Seconds a token after the first one; needs more than one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.token_ids) - 1)

    @property
    def itl(self) -> list[float]:
        """Times between one arrival and the next, however many tokens it brings (as in vLLM)."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(slots=True)
class Round:
    """One run of all requests of a task, or of one batch of them."""

    seconds: float
    requests: list[RequestTimes]
    cpu_seconds: float = 0.0
    """Processor time of the thread that computes; 0 where a GPU does."""

    @classmethod
    def joined(cls, batches: Sequence[Round]) -> Round:
        """The round that consists of these batches, one after the other."""
        requests = [request for batch in batches for request in batch.requests]
        return cls(sum(batch.seconds for batch in batches), requests, sum(batch.cpu_seconds for batch in batches))

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens, over all requests."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def speed(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


class Run:
    """Requests that go through an engine, and their times."""

    def __init__(self, core: EngineCore, name: str) -> None:
        """`name` stands before the messages of errors."""
        self.times: dict[str, RequestTimes] = {}
        """By request id, in the order of arrival."""
        self.live: set[str] = set()
        """Ids of the requests that have not ended."""
        self._core = core
        self._name = name

    def add(self, request: EngineRequest, arrived: float | None = None) -> None:
        """Add a request that arrives now, or that arrived a moment ago, while a step ran."""
        self.times[request.request_id] = RequestTimes(time.perf_counter() if arrived is None else arrived)
        self._core.add_request(request)
        self.live.add(request.request_id)

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            OutriderError: a request failed.
        """
        deltas = self._core.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.error is not None:
                raise OutriderError(f"{self._name}: a request failed: {delta.error.message}")
            got = self.times[delta.request_id]
            if delta.token_ids:
                got.token_ids += delta.token_ids
                got.arrivals.append(now)
            got.speculation = delta.speculation or got.speculation
            if delta.finish_reason is not None:
                self.live.remove(delta.request_id)

    def abort(self) -> None:
        """Abort the requests that have not ended."""
        self._core.abort(self.live)
        self.live.clear()

    def complete(self, requests: Sequence[EngineRequest], concurrency: int) -> float:
        """Generate, with at most `concurrency` requests at once: the next starts when one ends.

        Returns:
            The seconds that it took.

        Raises:
            OutriderError: a request failed.
        """
        waiting = deque(requests)
        started = time.perf_counter()
        while waiting or self.live:
            while waiting and len(self.live) < concurrency:
                self.add(waiting.popleft())
            self.step()
        return time.perf_counter() - started


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection: a collection of them would delay a step by a tenth of a
    second. A server does the same after its start."""
    gc.collect()
    gc.freeze()
