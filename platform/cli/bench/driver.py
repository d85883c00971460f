"""Runs requests through an engine in this process, and notes when each token came."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....models.decoder import Decoder
from ....spec_decode.drafters.base import Proposer
from ...core.config import EngineArgs
from ...core.errors import OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import EngineRequest, SpeculationCounts
from ...engine.engine_core import EngineCore
from .modes import Mode
from .observer import StepObserver, StepTimes


@dataclass(slots=True)
class RequestTimes:
    """One request; times in seconds of one clock."""

    started: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """When a step brought tokens, one entry a step."""
    speculation: SpeculationCounts | None = None

    @property
    def ttft(self) -> float:
        """To the first token."""
        return self.arrivals[0] - self.started

    @property
    def e2el(self) -> float:
        """To the last token."""
        return self.arrivals[-1] - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def tpot(self) -> float:
        """Seconds a token after the first one; only for more than one token."""
        return self.decode_seconds / (len(self.token_ids) - 1)

    @property
    def itl(self) -> list[float]:
        """Between one arrival and the next, however many tokens it brings (as in vLLM)."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(slots=True)
class Round:
    """One run of all requests of a task, or some of them."""

    seconds: float
    requests: list[RequestTimes]
    steps: list[StepTimes]
    cpu_seconds: float | None = None
    """Those that the thread of the steps was running; None where another processor computes them."""

    @classmethod
    def of(cls, turns: Sequence[Round]) -> Round:
        """One of several turns."""
        cpu = [turn.cpu_seconds for turn in turns if turn.cpu_seconds is not None]
        return cls(
            sum(turn.seconds for turn in turns),
            [request for turn in turns for request in turn.requests],
            [step for turn in turns for step in turn.steps],
            sum(cpu) if len(cpu) == len(turns) else None,
        )

    @property
    def output_tokens(self) -> int:
        """Generated, over all requests."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def tpot(self) -> float:
        """Seconds a token after the first ones, over all requests; 0 when there are none."""
        tokens = sum(len(request.token_ids) - 1 for request in self.requests)
        return sum(request.decode_seconds for request in self.requests) / tokens if tokens else 0.0


class Run:
    """Requests that go through an engine, and their times."""

    def __init__(self, core: EngineCore, name: str) -> None:
        """`name`: of the run, for messages."""
        self.times: dict[str, RequestTimes] = {}
        """By request id, in the order of arrival."""
        self.live: set[str] = set()
        """Ids of those that have not ended."""
        self._core = core
        self._name = name

    def add(self, request: EngineRequest, arrived: float | None = None) -> None:
        """A request arrives now, or arrived a moment ago, while a step ran."""
        self.times[request.request_id] = RequestTimes(time.perf_counter() if arrived is None else arrived)
        self._core.add_request(request)
        self.live.add(request.request_id)

    def step(self) -> float:
        """One step of the engine; returns its seconds.

        Raises:
            OutriderError: a request failed.
        """
        before = time.perf_counter()
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
        return now - before

    def abort(self) -> None:
        """End what has not ended."""
        self._core.abort(self.live)
        self.live.clear()

    def complete(
        self, requests: Sequence[EngineRequest], concurrency: int, after_step: Callable[[float], None] | None = None
    ) -> float:
        """Generate, with never more than `concurrency` requests at once: the next starts when one ends.

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
            seconds = self.step()
            if after_step is not None:
                after_step(seconds)
        return time.perf_counter() - started


def settle() -> None:
    """What is there now stays, as in a server: else a collection that looked at it would hold up a step for a tenth of
    a second."""
    gc.collect()
    gc.freeze()


class BenchEngine:
    """One mode's engine."""

    def __init__(self, mode: Mode, args: EngineArgs, twin_of: Decoder | None = None) -> None:
        """Load it; see `EngineCore` for the errors, and for `twin_of`."""
        self.mode = mode
        observers: list[StepObserver] = []

        def observe(proposer: Proposer) -> Proposer:
            observers.append(StepObserver(proposer))
            return observers[0]

        self.core = EngineCore(args, observe=observe, twin_of=twin_of)
        self._observer = observers[0]
        self._drafting: set[str] = set()

    def load_adapter(self, lora: LoRARequest) -> None:
        """Register an adapter; see `EngineCore.load_adapter` for the errors."""
        if self.core.load_adapter(lora).draft == "loaded":
            self._drafting.add(lora.name)

    def drafts_for(self, lora: LoRARequest) -> bool:
        """Whether the drafter uses draft weights of this adapter."""
        return lora.name in self._drafting

    def run(self, requests: Sequence[EngineRequest], concurrency: int) -> Round:
        """Generate, with never more than `concurrency` requests at once: the next starts when one ends.

        Raises:
            OutriderError: a request failed.
        """
        run = Run(self.core, f"mode {self.mode.name}")
        self._observer.take()
        running = time.thread_time()
        seconds = run.complete(requests, concurrency, self._observer.end_step)
        cpu_seconds = time.thread_time() - running if self.core.info.device == "cpu" else None
        return Round(seconds, list(run.times.values()), self._observer.take(), cpu_seconds)
