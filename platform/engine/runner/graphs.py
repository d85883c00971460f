"""Graphs of an engine: the passes that are captured, and their capture before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ....kernels.graphs import CudaGraphs, GraphBackend
from ....models.pass_graphs import PassGraphs, PassLimits, bucket
from ...core.config import EngineConfig
from ...core.request import Request, Status
from ..queue.scheduler import Scheduler
from .model_runner import ModelRunner
from .warm_up import PROMPT, dummy, step, unpaced_step

SECONDS = 20.0
_STEPS = 2
"""Steps for each number of requests: with a drafter the first one decodes, and the second verifies."""
_PROMPT_ROWS = (256, 64, 16, 4, 1)
_PROMPT_TOKENS = (512, 256, 128, 64)
"""Rows and tokens of steps with a part of a prompt, for each of which passes differ."""


def graph_backend(config: EngineConfig) -> GraphBackend | None:
    """Backend that captures this engine's passes; None: none is captured. On a CPU a launch costs next to nothing."""
    if config.device != "cuda" or config.enforce_eager or config.batch_invariant:
        return None
    return CudaGraphs(torch.device(config.device))


def make_graphs(config: EngineConfig) -> PassGraphs | None:
    """Graphs that the engine's passes are captured in; None: nothing is."""
    backend = graph_backend(config)
    if backend is None:
        return None
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    rows, verified = config.scheduler.max_num_seqs, bucket(config.scheduler.max_num_seqs) * bucket(1 + drafts)
    return PassGraphs(backend, PassLimits(rows, config.scheduler.max_model_len, max_verified=verified))


def capture_ahead(
    scheduler: Scheduler,
    runner: ModelRunner,
    num_drafts: int,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run steps of dummy requests, from the most at once to one, for at most about `seconds`: what they need is
    captured, so that the first requests do not wait for it. The largest come first: the others fit into their memory.

    Must come before the first request; nothing is left of the dummies. Shapes that do not come here (adapters, drafts
    that were cut short) are captured when they come.

    Args:
        num_drafts: most drafts a step.
    """
    ends = clock() + seconds
    sizes = _sizes(scheduler, num_drafts)
    dummies = [dummy(f"capture {index}", index) for index in range(max(sizes, default=0))]
    for request in dummies:
        scheduler.add(request)
    try:
        # The prompts, in one step or in several; who fails does not come back.
        while any(r.status is not Status.FINISHED and not r.num_output_tokens for r in dummies) and clock() < ends:
            step(scheduler, runner)
        for size in sizes:
            scheduler.abort([request.request_id for request in dummies[size:]])
            for _ in range(_STEPS):
                if clock() < ends:
                    step(scheduler, runner)
    finally:
        scheduler.abort([request.request_id for request in dummies])
    for rows in _PROMPT_ROWS:
        _capture_prompts(scheduler, runner, rows, lambda: clock() < ends)


def _capture_prompts(scheduler: Scheduler, runner: ModelRunner, rows: int, in_time: Callable[[], bool]) -> None:
    """Run steps of a prompt beside `rows` - 1 requests that decode, as far as they fit."""
    config, block_size = scheduler.config, scheduler.prefix_cache.block_size
    most = min(config.max_model_len, config.max_num_batched_tokens)
    lengths = [tokens - rows + 1 for tokens in _PROMPT_TOKENS if 2 * rows <= tokens < most]
    decodes = (rows - 1) * -(-(PROMPT + 2 * len(lengths) + 4) // block_size)
    if not lengths or rows > config.max_num_seqs or decodes + lengths[0] // block_size + 2 > scheduler.pool.num_free:
        return
    dummies = [dummy(f"capture {index}", index) for index in range(rows - 1)]

    def run(requests: Sequence[Request]) -> None:
        for request in requests:
            scheduler.add(request)
        while any(r.status is not Status.FINISHED and not r.num_output_tokens for r in requests) and in_time():
            unpaced_step(scheduler, runner)

    try:
        run(dummies)
        for length in lengths:
            run([prompt := dummy("capture a prompt", 0, length=length)])
            scheduler.abort([prompt.request_id])
    finally:
        scheduler.abort(["capture a prompt", *(request.request_id for request in dummies)])


def _sizes(scheduler: Scheduler, num_drafts: int) -> list[int]:
    """Numbers of requests whose passes differ, descending; all of them fit, without preemption and to the end."""
    config = scheduler.config
    sizes = sorted({min(bucket(count), config.max_num_seqs) for count in range(1, config.max_num_seqs + 1)})
    length = PROMPT + 1 + (1 + _STEPS * len(sizes)) * (1 + num_drafts) + num_drafts
    if length >= config.max_model_len:
        return []
    blocks = -(-length // scheduler.prefix_cache.block_size)
    most = min(scheduler.pool.num_free // blocks, config.max_num_batched_tokens // (1 + num_drafts))
    return [size for size in reversed(sizes) if size <= most]
