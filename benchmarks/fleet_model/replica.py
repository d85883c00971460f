"""One replica: a queue, rows that step together, and slots of adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from outrider.platform.replicas.routing import LruSet

from .costs import Costs, Limits, StepTimes
from .load import Request

LONGEST_PAUSE = 0.05
"""Seconds for which a load pauses for one step with prompts alongside running requests, at most
(`lora/step_yield.py`)."""


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way."""

    request: Request
    due: float
    """Time from which its time to first token counts."""
    replica: int = -1
    prompt_left: int = 0
    num_tokens: int = 0
    """Tokens of its answer."""
    first: float | None = None
    """Time of its first token."""
    adapter_hit: bool = False
    prefix_hit: bool = False


class Replica:
    """A replica in the environment of a simulation."""

    def __init__(
        self, env: simpy.Environment, costs: Costs, limits: Limits, prefixes: int, on_end: Callable[[Job], None]
    ) -> None:
        """`prefixes`: number of prefixes whose KV it keeps."""
        self._env, self._costs, self._limits, self._on_end = env, costs, limits, on_end
        self._step_seconds = StepTimes(costs, limits)
        self._prefixes_kept = prefixes
        self.num_loads = 0
        self.busy = 0.0
        """Seconds of steps."""
        self._clear()
        self._process = env.process(self._run())

    def _clear(self) -> None:
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._slots: LruSet = LruSet(self._limits.slots + 1)  # _load makes room itself
        self._holds: Counter[int] = Counter()
        self._loading: int | None = None
        self._pause = 0.0  # seconds for which the load in flight still has to pause
        self._unwritten: set[int] = set()  # adapters that were read since the last step began
        self._prefixes = LruSet(self._prefixes_kept)
        self._wake = self._env.event()
        self._life = object()

    def add(self, job: Job) -> None:
        """Queue a request."""
        job.adapter_hit = job.request.adapter in self._slots
        self._waiting.append(job)
        self._ring()

    def fail(self) -> list[Job]:
        """Lose everything; returns the requests that were here."""
        jobs = self._running + self._waiting
        self._process.interrupt()
        self._clear()
        return jobs

    def start(self) -> None:
        """Serve again, with nothing loaded."""
        self._process = self._env.process(self._run())

    # --- Adapters ---

    def _load_next(self) -> None:
        """Begin to load the adapter of the first request that lacks one, if a slot is or can be made free."""
        if self._loading is not None:
            return
        wanted = next((job.request.adapter for job in self._waiting if job.request.adapter not in self._slots), None)
        if wanted is None:
            return
        if len(self._slots) >= self._limits.slots:
            kept = {job.request.adapter for job in self._waiting}
            unused = next((name for name in self._slots if not self._holds[name] and name not in kept), None)
            if unused is None:
                return
            del self._slots[unused]
        self._loading = wanted
        self._env.process(self._load(wanted, self._life))

    def _load(self, adapter: int, life: object) -> Generator[simpy.Event, Any, None]:
        left = self._costs.load_beside if self._running else self._costs.load
        while left:
            yield self._env.timeout(left)
            if life is not self._life:
                return
            left, self._pause = self._pause, 0.0
        self._loading = None
        self.num_loads += 1
        self._slots.use(adapter)
        self._unwritten.add(adapter)
        self._load_next()
        self._ring()

    # --- Steps ---

    def _ring(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _admit(self) -> None:
        """Give rows to waiting requests whose adapters are loaded, in order of arrival."""
        room = self._limits.rows - len(self._running)
        usable = self._slots.keys() - self._unwritten
        ready = [job for job in self._waiting if job.request.adapter in usable][:room] if room else []
        for job in ready:
            request = job.request
            self._waiting.remove(job)
            self._running.append(job)
            self._slots.use(request.adapter)
            self._holds[request.adapter] += 1
            job.prefix_hit = (request.adapter, request.prefix) in self._prefixes
            job.prompt_left = request.prompt_tokens + (0 if job.prefix_hit else request.prefix_tokens)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        try:
            while True:
                self._load_next()
                self._admit()
                if self._unwritten:  # they are written along the step that begins now, or before it if it has no rows
                    self._unwritten.clear()
                    if not self._running:
                        self._admit()
                if not self._running:
                    self._wake = self._env.event()
                    yield self._wake
                    continue
                yield from self._step()
        except simpy.Interrupt:
            return

    def _step(self) -> Generator[simpy.Event, Any, None]:
        decoding = [job for job in self._running if not job.prompt_left]
        budget = self._limits.step_tokens - len(decoding)
        chunks = []
        for job in self._running:
            if job.prompt_left and budget:
                chunks.append((job, min(job.prompt_left, budget)))
                budget -= chunks[-1][1]
        adapters = len({job.request.adapter for job in decoding})
        seconds = self._step_seconds(len(decoding), adapters, sum(tokens for _, tokens in chunks))
        if self._loading is not None and decoding:
            if chunks:
                self._pause += min(seconds, LONGEST_PAUSE)
            else:
                seconds *= 1 + self._costs.load_steps / self._costs.load_beside
        yield self._env.timeout(seconds)
        self.busy += seconds
        for job, tokens in chunks:
            job.prompt_left -= tokens
            if not job.prompt_left:
                job.first = self._env.now
                self._prefixes.use((job.request.adapter, job.request.prefix))
                decoding.append(job)
        for job in decoding:
            job.num_tokens += 1
            if job.num_tokens == job.request.output_tokens:
                self._running.remove(job)
                self._holds[job.request.adapter] -= 1
                self._on_end(job)
