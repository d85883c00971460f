"""Part two: latencies of running requests while requests for unread (cold) adapters arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ....core.lora_request import LoRARequest
from ....core.messages import EngineRequest
from ..engine_runs import Run
from .budget import Budget
from .engines import Engines
from .figures import ColdRun, cold_figures

QUIET, LOADED, COLD = KINDS = ("no stream", "loaded adapters stream in", "cold adapters stream in")
WARM_TOKENS = 1024
"""Most output tokens of a warm request. Warm requests should outlast the stream: their own prompts are steps too."""
STREAM_INPUT, STREAM_OUTPUT = 16, 4
"""Tokens of the stream's requests: few, because the loading is measured."""
STREAM_SEATS = 16
"""Number of the stream's requests that may run at once."""
_LEAD_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPlan:
    """Sizes of the measurement."""

    cold: Sequence[LoRARequest]
    """Adapters that are not registered."""
    warm: Sequence[LoRARequest]
    """Registered adapters, for the warm requests in turn."""
    num_warm: int
    """Number of warm requests at once."""
    warm_tokens: int
    rate: float
    """Arrivals of the stream's requests, per second."""


class ColdMeasurement:
    """Measurement of every kind of stream, round by round."""

    def __init__(self, engines: Engines, plan: ColdPlan) -> None:
        self.plan = plan
        self._engines = engines
        self.runs: dict[str, list[ColdRun]] = {kind: [] for kind in KINDS}

    def measure(self, rounds: int, budget: Budget, progress: Any, after_round: Callable[[], None]) -> None:
        """Measure every kind once in each round; each round begins with another kind.

        Raises:
            BudgetSpent: the time is up; what has been measured is in `runs`.
        """
        for number in range(rounds):
            for index in range(len(KINDS)):
                kind = KINDS[(index + number) % len(KINDS)]
                self.runs[kind].append(self._run(kind, number, budget))
                progress.update()
            after_round()

    def report(self) -> dict[str, Any] | None:
        """Figures so far; None without any."""
        plan = self.plan
        found = cold_figures(self.runs, cold=COLD, loaded=LOADED, quiet=QUIET)
        return found and {
            "warm_requests": plan.num_warm,
            "warm_adapters": len(plan.warm),
            "cold_adapters": len(plan.cold),
            "cold_rate": plan.rate,
            **found,
        }

    def _run(self, kind: str, number: int, budget: Budget) -> ColdRun:
        plan, workload = self.plan, self._engines.workload
        self._engines.take_load_seconds()  # those of before
        run = Run(self._engines.serving, f"bench lora: {kind}")
        adapters = {QUIET: [], LOADED: _repeated(plan.warm, len(plan.cold)), COLD: plan.cold}[kind]
        stream = [
            workload.request(f"stream {i}", workload.prompt("stream", number, i)[:STREAM_INPUT], STREAM_OUTPUT, lora)
            for i, lora in enumerate(adapters)
        ]
        warm = _WarmRequests(self._engines, plan, number)
        try:
            warm.start(run)
            seconds, window = self._stream(run, warm, stream, budget)
        finally:
            run.abort()
            if kind == COLD:
                self._engines.unregister(plan.cold)
        loads = self._engines.take_load_seconds()
        times = {name: request for name, request in run.times.items() if request.arrivals}
        gaps = [
            gap for name, request in times.items() if name in warm.ids for gap in gaps_within(request.arrivals, window)
        ]
        ttft = [request.ttft for name, request in times.items() if name not in warm.ids]
        return ColdRun(seconds, np.array(gaps), np.array(ttft), np.array(loads))

    def _stream(
        self, run: Run, warm: _WarmRequests, stream: Sequence[EngineRequest], budget: Budget
    ) -> tuple[float, tuple[float, float]]:
        """Run steps until the stream has passed and its time of arrival is over; returns (seconds, (start, end))."""
        waiting = deque(stream)
        shortest = len(self.plan.cold) / self.plan.rate
        began = now = time.perf_counter()
        while waiting or run.live - warm.ids or now - began < shortest:
            budget.check()
            while waiting and now >= (arrived := began + (len(stream) - len(waiting)) / self.plan.rate):
                run.add(waiting.popleft(), arrived)
            warm.keep_full(run)
            run.step()
            now = time.perf_counter()
        return now - began, (began, now)


class _WarmRequests:
    """Warm requests, always the planned number at once: when one ends, the next begins."""

    def __init__(self, engines: Engines, plan: ColdPlan, number: int) -> None:
        self.ids: set[str] = set()
        self._engines, self._plan, self._number = engines, plan, number

    def start(self, run: Run) -> None:
        """Start all, and run steps until each has a token, and a few more."""
        self.keep_full(run)
        while not all(run.times[name].arrivals for name in self.ids):
            run.step()
        for _ in range(_LEAD_STEPS):
            self.keep_full(run)
            run.step()

    def keep_full(self, run: Run) -> None:
        """Start requests up to the planned number."""
        plan, workload = self._plan, self._engines.workload
        for _ in range(plan.num_warm - len(run.live & self.ids)):
            index = len(self.ids)
            name, prompt = f"warm {index}", workload.prompt("warm", self._number, index)
            self.ids.add(name)
            run.add(workload.request(name, prompt, plan.warm_tokens, plan.warm[index % len(plan.warm)]))


def gaps_within(arrivals: Sequence[float], window: tuple[float, float]) -> list[float]:
    """Gaps between arrivals that began and ended within a window of time."""
    first, last = window
    inside = [arrival for arrival in arrivals if first <= arrival <= last]
    return [later - earlier for earlier, later in pairwise(inside)]


def _repeated(items: Sequence[LoRARequest], count: int) -> list[LoRARequest]:
    return [items[index % len(items)] for index in range(count)]
