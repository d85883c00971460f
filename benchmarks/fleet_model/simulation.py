"""A load on many replicas: arrivals, routing, failures, and the figures of a run."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from outrider.platform.replicas.routing import ReplicaView

from .costs import Costs, Limits
from .load import Request
from .replica import Job, Replica
from .routing import Router


@dataclass(frozen=True)
class Fleet:
    """Replicas and their router."""

    replicas: int
    limits: Limits
    prefixes: int
    """Prefixes whose KV a replica keeps."""
    lifetime: float = math.inf
    """Mean seconds from the start of a replica to its failure."""

    def view(self) -> ReplicaView:
        """The router's view of a replica that has nothing."""
        return ReplicaView(self.limits.slots, self.prefixes)

    def router(self, strategy: str, seed: int) -> Router:
        """A router of replicas that have nothing."""
        return Router(strategy, [self.view() for _ in range(self.replicas)], seed)


class Simulation:
    """One run of a load under one strategy."""

    def __init__(self, costs: Costs, fleet: Fleet, strategy: str, seed: int) -> None:
        self._costs, self._fleet = costs, fleet
        self._env = env = simpy.Environment()
        self._router = fleet.router(strategy, seed)
        self._replicas = [Replica(env, costs, fleet.limits, fleet.prefixes, self._end) for _ in self._router.views]
        self._ended: list[Job] = []
        self._lost: list[Job] = []
        self._num_failures = self._num_retries = 0
        self._left = 0
        self._done = env.event()
        source = random.Random(seed)
        if fleet.lifetime < math.inf:
            for index in range(fleet.replicas):
                env.process(self._fail(index, random.Random(source.random())))

    @property
    def ttft(self) -> list[float]:
        """Times to first token of the answered requests, in the order of their ends."""
        return [job.first - job.due for job in self._ended if job.first is not None]

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Serve all requests; returns the figures."""
        self._left = len(requests)
        self._env.process(self._arrive(requests))
        self._env.run(self._done)
        assert len(self._ended) + len(self._lost) == len(requests)
        return self._figures()

    def _arrive(self, requests: Sequence[Request]) -> Generator[simpy.Event, Any, None]:
        for request in requests:
            if request.at > self._env.now:
                yield self._env.timeout(request.at - self._env.now)
            self._send(Job(request, self._env.now))

    def _send(self, job: Job) -> None:
        chosen = self._router.send(job.request)
        if chosen is None:
            self._close(job, self._lost)
        else:
            job.replica = chosen
            self._env.timeout(self._costs.overhead).callbacks.append(lambda _: self._deliver(job))

    def _deliver(self, job: Job) -> None:
        if self._router.views[job.replica].ready:
            self._replicas[job.replica].add(job)
        else:  # it failed meanwhile
            self._num_retries += 1
            self._send(job)

    def _end(self, job: Job) -> None:
        self._router.views[job.replica].ongoing -= 1
        self._close(job, self._ended)

    def _close(self, job: Job, jobs: list[Job]) -> None:
        jobs.append(job)
        self._left -= 1
        if not self._left:
            self._done.succeed()

    def _fail(self, index: int, source: random.Random) -> Generator[simpy.Event, Any, None]:
        """A replica's failures. Requests without a token are sent to another one; the others are lost."""
        fleet, replica = self._fleet, self._replicas[index]
        while True:
            yield self._env.timeout(source.expovariate(1 / fleet.lifetime))
            self._num_failures += 1
            view = self._router.views[index] = fleet.view()
            view.ready = False
            for job in replica.fail():
                if job.num_tokens:
                    self._close(job, self._lost)
                else:
                    self._num_retries += 1
                    self._send(Job(job.request, job.due))
            yield self._env.timeout(self._costs.start)
            replica.start()
            view.ready = True

    def _figures(self) -> dict[str, Any]:
        ended = self._ended
        ttft = np.array(self.ttft)
        by_tenant = defaultdict(list)
        for job, seconds in zip(ended, ttft, strict=True):
            by_tenant[job.request.tenant].append(seconds)
        medians = [float(np.median(values)) for _, values in sorted(by_tenant.items())]
        now = self._env.now
        p50, p99 = np.quantile(ttft, (0.5, 0.99))
        return {
            "ended": len(ended),
            "lost": len(self._lost),
            "retried": self._num_retries,
            "failures": self._num_failures,
            "ttft_p50": round(float(p50), 5),
            "ttft_p99": round(float(p99), 5),
            "output_tokens_per_second": round(sum(job.num_tokens for job in ended) / now, 2),
            "adapter_loads": sum(replica.num_loads for replica in self._replicas),
            "adapter_hits": round(sum(job.adapter_hit for job in ended) / len(ended), 4),
            "prefix_hits": round(sum(job.prefix_hit for job in ended) / len(ended), 4),
            "busy": round(sum(replica.busy for replica in self._replicas) / now / len(self._replicas), 4),
            "fairness": round(sum(medians) ** 2 / (len(medians) * sum(m * m for m in medians)), 4),
            "tenant_p50": {"best": round(min(medians), 5), "worst": round(max(medians), 5)},
            "ttft_quantiles": [round(float(q), 5) for q in np.quantile(ttft, np.linspace(0, 1, 101))],
        }
