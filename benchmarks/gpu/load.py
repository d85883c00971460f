"""Load on an engine: requests, and the times of their steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.cli.bench.engine_runs import Run
from outrider.platform.cli.bench.prompts import random_ids
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

_WAIT_SECONDS = 120.0
_PROMPT_STEPS = 128
"""Steps that the prompts of all requests may take, while the first of them already write."""
_SPECIAL = range(3)


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    """Random token ids."""
    return random_ids(random.Random(seed), length, vocab, _SPECIAL)


def greedy(max_tokens: int) -> SamplingParams:
    """Parameters of greedy requests of full length."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def make_requests(
    prompts: Sequence[Sequence[int]], params: SamplingParams, loras: Sequence[LoRARequest | None] = ()
) -> list[EngineRequest]:
    """Make requests, with adapters in turn."""
    now = time.monotonic_ns()
    return [
        EngineRequest(f"{now}-{index}", list(prompt), params, lora=loras[index % len(loras)] if loras else None)
        for index, prompt in enumerate(prompts)
    ]


def start(engine: EngineCore, requests: Sequence[EngineRequest]) -> Run:
    """Run steps until all prompts are computed and every adapter is loaded.

    Raises:
        RuntimeError: the requests do not all run together.
    """
    run, ends = Run(engine, "load"), time.monotonic() + _WAIT_SECONDS
    for request in requests:
        run.add(request)
    while not all(record.num_output_tokens for record in run.records.values()):
        if time.monotonic() > ends:
            raise RuntimeError("not all requests were running in the end")
        run.step()
    if len(run.live) < len(requests):
        raise RuntimeError("a request ended before the others had begun")
    return run


def decode(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    steps: int,
    loras: Sequence[LoRARequest | None] = (),
) -> float:
    """Seconds of a step of these requests together, after their prompts and a few steps; then they are aborted."""
    warm = 4
    if loras:  # load first: a request would end while the adapter of another is still being loaded
        generate(engine, prompts, greedy(1), loras)
    run = start(engine, make_requests(prompts, greedy(warm + steps + _PROMPT_STEPS), loras))
    for _ in range(warm):
        run.step()
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        run.step()
    synchronize()
    seconds = time.perf_counter() - started
    run.abort()
    return seconds / steps


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    loras: Sequence[LoRARequest | None] = (),
) -> list[list[int]]:
    """Generate all tokens of all requests, in their order."""
    done = Run(engine, "load").complete(make_requests(prompts, params, loras), len(prompts))
    return [record.token_ids for record in done.requests]


def device_seconds(engine: EngineCore, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
    """(seconds of a step, seconds of it in which the device computes); the difference is the host's gap.

    The first is measured without the profiler, the second with it.
    """
    seconds = decode(engine, prompts, steps)
    run = start(engine, make_requests(prompts, greedy(steps + 8)))
    run.step()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run.step()
        synchronize()
    run.abort()
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return seconds, busy / steps


def captured(engine: Any) -> int:
    """Number of captured graphs."""
    graphs = engine._runner._graphs
    return 0 if graphs is None else int(graphs.num_captured)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
