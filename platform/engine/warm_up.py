"""Dummy requests through the engine's own path before the first real one, so that the controller of speculation knows
from its first decision what steps take with and without drafts, and first calls are behind it.

Bounded by a time, since a large model's steps take long: what one request takes is measured first, then batches, of
each first the extremes. What was not measured is learned while serving. Nothing is left of the dummies: they have a
namespace of their own, their blocks are not shared, and of acceptance nothing is learned from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...spec_decode.adaptive import AdaptiveProposer
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from .model_runner import ModelRunner
from .scheduler import Scheduler

SECONDS = 2.0
_ROWS = (1, 4, 16, 32, 2, 8, 64, 24, 12, 48, 3, 6)
_PASSES, _STEPS = 3, 3
"""How often a batch comes, with each number of drafts for how many steps: what disturbs the machine for a while
disturbs others than the next time. The first step verifies what was drafted before."""
PROMPT = 16
"""Tokens of a dummy's prompt."""


def warm_up(
    scheduler: Scheduler,
    runner: ModelRunner,
    drafter: AdaptiveProposer,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run steps with and without drafts, for at most about `seconds`. Must come before the first request."""
    ends = clock() + seconds
    try:
        for rows in _ROWS * _PASSES:
            if clock() < ends and _fits(scheduler, rows, drafter.choices):
                _measure(scheduler, runner, drafter, rows, lambda: clock() < ends)
    finally:
        drafter.release()


def _fits(scheduler: Scheduler, rows: int, choices: Sequence[tuple[int, int]]) -> bool:
    """Whether so many dummies run at once without preemption, whole batches at a time."""
    config, most = scheduler.config, max(count for _, count in choices)
    length = PROMPT + 1 + sum(_STEPS * (1 + count) for _, count in choices) + 2 * most
    blocks = -(-length // scheduler.prefix_cache.block_size)
    return (
        rows <= config.max_num_seqs
        and length < config.max_model_len
        and rows * blocks <= scheduler.pool.num_free
        and 2 * rows * (1 + most) <= config.max_num_batched_tokens
    )


def _measure(
    scheduler: Scheduler,
    runner: ModelRunner,
    drafter: AdaptiveProposer,
    rows: int,
    in_time: Callable[[], bool],
) -> None:
    dummies = [dummy(f"warm-up {index}", index) for index in range(rows)]
    drafter.hold(0, 0)
    for request in dummies:
        scheduler.add(request)
    try:
        while not all(request.num_output_tokens for request in dummies):  # the prompts, in one step or in several
            if not in_time():
                return
            step(scheduler, runner)
        for number, count in drafter.choices:
            drafter.hold(number, count)
            for _ in range(_STEPS):
                if not in_time():
                    return
                step(scheduler, runner)
    finally:
        scheduler.abort([request.request_id for request in dummies])


def step(scheduler: Scheduler, runner: ModelRunner) -> None:
    """One step of whatever is due."""
    plan = scheduler.schedule()
    scheduler.commit(plan, runner.run(plan))


def dummy(name: str, index: int) -> Request:
    """A greedy request that ends only when it is aborted, and whose blocks nobody shares."""
    return Request(
        request_id=name,
        tokens=[1 + (index + at) % 5 for at in range(PROMPT)],
        num_prompt_tokens=PROMPT,
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None),
        seed_key=0,
        text_namespace=(b"warm-up", b""),
    )
