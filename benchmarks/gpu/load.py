"""Load on an engine: requests, and the times of their steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

_WAIT_SECONDS = 120.0


class Decoded(NamedTuple):
    """Steps of a batch whose prompts are computed."""

    seconds: float
    steps: int
    tokens: int

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.seconds / self.steps


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(3, vocab) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    """Parameters of greedy requests of full length."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def add(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    loras: Sequence[LoRARequest | None] = (),
) -> list[str]:
    """Queue requests, with adapters in turn; returns their ids."""
    ids = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for index, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        lora = loras[index % len(loras)] if loras else None
        engine.add_request(EngineRequest(request_id, list(prompt), params, lora=lora))
    return ids


def step(engine: EngineCore) -> int:
    """Run one step; returns its number of tokens.

    Raises:
        RuntimeError: a request has failed.
    """
    tokens = 0
    for delta in engine.step():
        if delta.error is not None:
            raise RuntimeError(f"a request failed: {delta.error.message}")
        tokens += len(delta.token_ids)
    return tokens


def start(engine: EngineCore, ids: Sequence[str]) -> None:
    """Run steps until all prompts are computed and every adapter is loaded."""
    wanted, ends = len(ids), time.monotonic() + _WAIT_SECONDS
    while True:
        step(engine)
        running = engine.scheduler.running
        if len(running) == wanted and all(request.num_output_tokens for request in running):
            return
        if time.monotonic() > ends or not engine.has_work():
            raise RuntimeError(f"{len(running)} of {wanted} requests were running in the end")


def decode(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    steps: int,
    loras: Sequence[LoRARequest | None] = (),
) -> Decoded:
    """Time steps of these requests together, after their prompts and a few steps; then abort them."""
    warm = 4
    if loras:  # load first: a request would end while the adapter of another is still being loaded
        generate(engine, prompts, greedy(1), loras)
    ids = add(engine, prompts, greedy(warm + steps + 2), loras)
    start(engine, ids)
    for _ in range(warm):
        step(engine)
    synchronize()
    started, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += step(engine)
    synchronize()
    seconds = time.perf_counter() - started
    engine.abort(ids)
    return Decoded(seconds, steps, tokens)


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    loras: Sequence[LoRARequest | None] = (),
) -> list[list[int]]:
    """Generate all tokens of all requests, in their order."""
    found: dict[str, list[int]] = {request_id: [] for request_id in add(engine, prompts, params, loras)}
    while engine.has_work():
        for delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(f"a request failed: {delta.error.message}")
            found[delta.request_id] += delta.token_ids
    return list(found.values())


def device_seconds(engine: EngineCore, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
    """(seconds of a step, seconds of it in which the device computes); the difference is the host's gap.

    The first is measured without the profiler, the second with it.
    """
    seconds = decode(engine, prompts, steps).step_seconds
    ids = add(engine, prompts, greedy(steps + 8))
    start(engine, ids)
    step(engine)
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step(engine)
        synchronize()
    engine.abort(ids)
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return seconds, busy / steps


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
