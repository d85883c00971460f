"""Real replicas on this machine: their step, prompt and load times, and a load that the simulation must foretell.

Each replica is an `outrider serve` with one core and one thread. All are measured at once, over HTTP and by the client
that sends the load later, so that times include memory that they share, the API process and the client.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import uvloop
from serving import OUTRIDER, port_of

from outrider.models.checkpoint.json_files import read_model_config
from outrider.models.config import config_from_hf
from outrider.platform.cli.bench.random_adapters import AdapterWriter
from outrider.platform.cli.bench.request_figures import RequestRecord
from outrider.platform.cli.bench.serving.datasets import Sample
from outrider.platform.cli.bench.serving.http_client import HttpClient
from outrider.platform.cli.bench.serving.request_load import offer
from outrider.platform.cli.bench.serving.streaming import Asker

from .costs import Costs, Limits
from .load import Request
from .routing import Router
from .simulation import Fleet

ROWS = (1, 2, 4, 8)
"""Numbers of running requests whose steps are measured, with one adapter and with one each."""
PROMPTS = (1, 32, 64, 128, 256)
"""Numbers of prompt tokens that are measured, beside running requests."""
RUNNING = 4
"""Running requests beside which prompts and loads are measured."""
CONTEXT = 128
"""Prompt tokens of a request whose steps are measured, as many as those of the load have: attention takes its share."""
QUIET = 0.03
"""Seconds after a request for which steps may still be longer: the API ends its answer."""
OUTPUT, REPEATS = 40, 8
"""Output tokens of a request whose steps are measured, and requests that give one prompt or load time."""


class Replicas:
    """Servers of one model, each on a core of its own, and a client of each."""

    def __init__(self, model: str, folder: Path, count: int, num_adapters: int, limits: Limits) -> None:
        """Write the adapters and start the servers; raises SystemExit when one does not start."""
        self._config = config_from_hf(read_model_config(model), torch.bfloat16)
        writer = AdapterWriter(folder, self._config, seed=0)
        self.adapters = [writer.write(f"adapter-{index}", limits.rank).name for index in range(num_adapters)]
        options = {
            "lora-dir": folder,
            "max-loras": limits.slots,
            "max-cpu-loras": limits.slots,
            "max-lora-rank": limits.rank,
            "max-num-seqs": limits.rows,
            "max-num-batched-tokens": limits.step_tokens,
            "max-model-len": 1024,
            "port": 0,
            "log-level": "error",
        }
        command = [*OUTRIDER, "serve", model, "--no-speculation", "--no-prompt-pacing", "--dtype", "bfloat16"]
        command += [f"--{name}={value}" for name, value in options.items()]
        started = time.perf_counter()
        self._servers = [_start(command, core) for core in sorted(os.sched_getaffinity(0))[:count]]
        try:
            ports = [port_of(server) for server in self._servers]
        except SystemExit:
            self._stop()
            raise
        self.start_seconds = time.perf_counter() - started
        self._clients = [HttpClient(f"http://127.0.0.1:{port}") for port in ports]
        common = {"temperature": 0.0, "ignore_eos": True}
        self.askers = [Asker(client, "/v1/completions", "", common, None) for client in self._clients]
        self.random = random.Random(0)
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()
        self.runner.close()
        self._stop()

    def _stop(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait()

    def sample(self, adapter: int, prompt: Sequence[int] | int, output: int) -> Sample:
        """A request for an adapter; `prompt`: token ids, or the number of random ones."""
        ids = self.tokens(prompt, self.random) if isinstance(prompt, int) else list(prompt)
        return Sample(ids, len(ids), output, self.adapters[adapter])

    async def num_loads(self) -> int:
        """Number of adapters that the servers have read so far."""
        pages = [(await client.get("/metrics")).body.decode() for client in self._clients]
        found = [re.search(r"^outrider:lora_load_seconds_count (\S+)", page, re.MULTILINE) for page in pages]
        return sum(int(float(match[1])) for match in found if match)

    def tokens(self, count: int, source: random.Random) -> list[int]:
        """Random token ids."""
        return [source.randrange(100, self._config.vocab_size - 100) for _ in range(count)]


def _start(command: list[str], core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


# --- Times ---


def measure(replicas: Replicas) -> Costs:
    """Measure the tables on all replicas at once; a time is the mean over the replicas."""
    return replicas.runner.run(_measure(replicas))


async def _measure(replicas: Replicas) -> Costs:
    async def every(work: Callable[[Asker], Awaitable[Any]]) -> Any:
        return np.mean(await asyncio.gather(*map(work, replicas.askers)), axis=0)

    def step(rows: int, adapters: int) -> Awaitable[float]:
        return every(lambda asker: _step_seconds(replicas, asker, rows, adapters))

    def ttft(adapters: Sequence[int]) -> Awaitable[float]:
        return every(lambda asker: _ttft(replicas, asker, adapters))

    def beside(adapters: Sequence[int], tokens: int) -> Awaitable[Any]:
        return every(lambda asker: _beside(replicas, asker, adapters, tokens))

    cold = range(len(replicas.adapters))  # more than there are slots, so each has gone when its turn comes
    await ttft(cold)
    await step(max(ROWS), max(ROWS))
    one = {rows: await step(rows, 1) for rows in ROWS}
    own = {rows: await step(rows, rows) for rows in ROWS}
    alone = await ttft(cold) - await ttft([cold[-1]] * REPEATS)
    found = {tokens: await beside([RUNNING] * REPEATS, tokens) for tokens in PROMPTS}
    lost, waited, _ = await beside(cold[RUNNING + 1 :][: 2 * REPEATS], 1) - found[1]
    prompt = {tokens: float(more) for tokens, (more, _, _) in found.items()}
    # A request that comes at any moment of a step waits for the half of it, and then takes part in one. One that loads
    # an adapter waits for the half of a step more when it has been read, and for one in which it is written.
    overhead = np.mean([wait - more - 1.5 * step for more, wait, step in found.values()])
    load = waited - 1.5 * np.mean([step for _, _, step in found.values()])
    times = map(float, (overhead, alone, load, lost, replicas.start_seconds))
    return Costs(one, own, {0: 0.0} | prompt, *times)


async def _ask(asker: Asker, samples: Sequence[Sample], at_once: int | None = None) -> list[RequestRecord]:
    load = await offer(samples, [0.0] * len(samples), asker.ask, at_once)
    for record in load.records:
        if record.error is not None:
            raise SystemExit(f"a request failed: {record.error}")
    return load.records


async def _step_seconds(replicas: Replicas, asker: Asker, rows: int, adapters: int) -> float:
    """Mean seconds of a step while all the rows run."""
    records = await _ask(asker, [replicas.sample(row % adapters, CONTEXT, OUTPUT) for row in range(rows)])
    first, last = max(r.arrivals[0] for r in records), min(r.arrivals[-1] for r in records)
    gaps = [b - a for record in records for a, b in pairwise(record.arrivals) if first <= a and b <= last]
    return statistics.mean(gaps)


async def _ttft(replicas: Replicas, asker: Asker, adapters: Sequence[int]) -> float:
    """Median time to first token of one request after the other."""
    records = await _ask(asker, [replicas.sample(adapter, 16, 1) for adapter in adapters], 1)
    return statistics.median(record.ttft for record in records if record.ttft is not None)


async def _beside(replicas: Replicas, asker: Asker, adapters: Sequence[int], tokens: int) -> tuple[float, float, float]:
    """Seconds that running requests lose to each of these requests, which come one after the other at any moment of a
    step; their mean time to first token; and a step of the running requests alone, of those between."""
    running = [replicas.sample(row, CONTEXT, 6 * OUTPUT) for row in range(RUNNING)]
    streaming = asyncio.create_task(_ask(asker, running))
    await asyncio.sleep(0.8)
    records = []
    began = time.perf_counter()
    for adapter in adapters:
        await asyncio.sleep(replicas.random.uniform(0.05, 0.1))
        records.append(RequestRecord(0))
        await asker.ask(replicas.sample(adapter, tokens, 1), records[-1])
    ended = time.perf_counter()
    arrivals = [[at for at in stream.arrivals if began <= at < ended] for stream in await streaming]
    asked = [(record.started, record.ended + QUIET) for record in records]
    alone = [b - a for times in arrivals for a, b in pairwise(times) if not any(s < b and a < e for s, e in asked)]
    step, inside = statistics.mean(alone), statistics.mean(map(len, arrivals))
    lost = (ended - began - inside * step) / len(records)
    return lost, statistics.mean(record.arrivals[0] - record.started for record in records), step


# --- A load ---


def serve(
    replicas: Replicas, router: Router, fleet: Fleet, requests: Sequence[Request], name: str
) -> tuple[list[float], dict[str, Any]]:
    """Send a load to the replicas, which have none of its adapters loaded and none of its prefixes; returns the times
    to first token, and figures. Every load has a name of its own."""
    return replicas.runner.run(_serve(replicas, router, fleet, requests, name))


async def _serve(
    replicas: Replicas, router: Router, fleet: Fleet, requests: Sequence[Request], name: str
) -> tuple[list[float], dict[str, Any]]:
    for asker in replicas.askers:
        others = range(len(replicas.adapters) - fleet.limits.slots, len(replicas.adapters))
        await _ask(asker, [replicas.sample(adapter, 16, 1) for adapter in others], 1)
    samples = []
    for r in requests:
        words = random.Random(f"{name} {r.adapter} {r.prefix}")
        ids = replicas.tokens(r.prefix_tokens, words) + replicas.tokens(r.prompt_tokens, random.Random(r.number))
        samples.append(replicas.sample(r.adapter, ids, r.output_tokens))

    async def ask(sample: Sample, record: RequestRecord) -> None:
        index = router.send(requests[record.index])
        assert index is not None
        await replicas.askers[index].ask(sample, record)
        router.views[index].ongoing -= 1

    before = await replicas.num_loads()
    times = [0.0 if fleet.users else request.at for request in requests]
    load = await offer(samples, times, ask, fleet.users)
    ttft = [record.ttft for record in load.records if record.error is None and record.ttft is not None]
    tokens = sum(record.num_output_tokens for record in load.records)
    figures = {
        "output_tokens_per_second": tokens / load.duration,
        "adapter_loads": await replicas.num_loads() - before,
        "client": load.client,
    }
    return ttft, figures
