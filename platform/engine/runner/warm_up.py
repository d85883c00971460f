"""Dummy requests through the engine's own path before the first real one, so that the speculation policy starts with
measured step times with and without drafts, and first calls are not in them.

The time is bounded, since a large model's steps take long: one request is measured first, then batches, of each the
extremes first. The rest is measured while serving. The dummies leave no trace: they have their own namespace, their
blocks are not shared, and their acceptance is not recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ....spec_decode.control.policy import SpeculationPolicy
from ...core.batch import StepPlan, StepResult
from ...core.request import Request, Status
from ...core.sampling_params import SamplingParams
from ..queue.scheduler import Scheduler
from .model_runner import ModelRunner

SECONDS = float(os.environ.get("OUTRIDER_WARM_UP_SECONDS", "2"))
"""The bound. A smaller one gives an earlier start, and more is measured while serving."""
_ROWS = (1, 4, 16, 32, 2, 8, 64, 24, 12, 48, 3, 6)
_PASSES, _STEPS = 2, 3
"""Repetitions of each batch, and steps with each number of drafts: a temporary disturbance of the machine hits other
sizes the next time. The first of the steps verifies what was drafted before."""
PROMPT = 16
"""Tokens of a dummy's prompt."""
_SHAPED = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
_REHEARSED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 0},
    _SHAPED,
    _SHAPED | {"seed": 0},
    _PENALTIES | {"temperature": 0.0},
    _SHAPED | _PENALTIES,
    {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "min_tokens": 2, "logit_bias": {1: 1.0}, "bad_words_token_ids": [[2], [3, 4]]},
    {"temperature": 0.0, "allowed_token_ids": [1, 2, 3]},
)
"""Sampling parameters of dummy requests: each kind of sampling once."""
_REHEARSED_TOKENS = 3


def warm_up(
    scheduler: Scheduler,
    runner: ModelRunner,
    policy: SpeculationPolicy,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run steps with and without drafts, for at most about `seconds`. Must come before the first request."""
    ends = clock() + seconds
    try:
        for rows in _ROWS * _PASSES:
            for choices in _lives(scheduler, rows, policy.choices):
                if clock() < ends:
                    _measure(scheduler, runner, policy, rows, choices, lambda: clock() < ends)
    finally:
        policy.release()


def _lives(scheduler: Scheduler, rows: int, choices: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Parts of `choices`, each as many as one batch of `rows` dummies has room for without preemption; none if not even
    one choice fits."""
    config = scheduler.config
    most = max(count for _, count in choices)
    blocks = min(scheduler.pool.num_free // rows, -(-config.max_model_len // scheduler.prefix_cache.block_size))
    room = min(config.max_model_len - 1, blocks * scheduler.prefix_cache.block_size) - (PROMPT + 1 + 2 * most)
    if (
        rows > config.max_num_seqs
        or max(_tokens(0), _tokens(most)) > room
        or 2 * rows * (1 + most) > config.max_num_batched_tokens
    ):
        return []
    lives: list[list[tuple[int, int]]] = []
    left = 0
    for choice in choices:
        tokens = _tokens(choice[1])
        if tokens > left:
            lives.append([])
            left = room
        left -= tokens
        lives[-1].append(choice)
    return lives


def _tokens(num_drafts: int) -> int:
    """Number of a dummy's tokens for measuring a choice."""
    return 1 + _STEPS * (1 + num_drafts)


def _measure(
    scheduler: Scheduler,
    runner: ModelRunner,
    policy: SpeculationPolicy,
    rows: int,
    choices: Sequence[tuple[int, int]],
    in_time: Callable[[], bool],
) -> None:
    dummies = [dummy(f"warm-up {index}", index) for index in range(rows)]
    policy.hold(0, 0)
    for request in dummies:
        scheduler.add(request)
    try:
        while not all(request.num_output_tokens for request in dummies):  # the prompts, in one step or in several
            if not in_time():
                return
            step(scheduler, runner)
        for number, count in choices:
            policy.hold(number, count)
            for _ in range(_STEPS):
                if not in_time():
                    return
                step(scheduler, runner)
    finally:
        scheduler.abort([request.request_id for request in dummies])


def rehearse(scheduler: Scheduler, runner: ModelRunner) -> None:
    """Short requests of every kind of sampling: on a GPU a kernel is compiled at its first launch, for which the first
    request of its kind, and all others of its step, would wait. Must come before the first request."""
    if scheduler.config.max_model_len <= PROMPT + _REHEARSED_TOKENS:
        return
    together = scheduler.config.max_num_seqs
    for first in range(0, len(_REHEARSED), together):
        kinds = enumerate(_REHEARSED[first : first + together])
        params = [(index, SamplingParams(ignore_eos=True, max_tokens=None, **kind)) for index, kind in kinds]
        run_through(scheduler, runner, [dummy(f"rehearsal {index}", index, its) for index, its in params])


def run_through(
    scheduler: Scheduler,
    runner: ModelRunner,
    dummies: Sequence[Request],
    during: Sequence[Request] = (),
    add: Callable[[Request], None] | None = None,
) -> None:
    """Run requests until each has a few tokens, and remove them; `during`: started once the others decode, so that one
    step has prompts and decodes. `add`: the scheduler's, or one that calls it."""
    add = add or scheduler.add
    together = [*dummies, *during]
    for request in dummies:
        add(request)
    try:
        # A failed one does not come back.
        while pending := {r for r in together if r.status is not Status.FINISHED and not _is_through(r)}:
            plan, _ = unpaced_step(scheduler, runner)  # kernels are compiled in its seconds
            if during and all(request.num_output_tokens or request.status is Status.FINISHED for request in dummies):
                for request in during:
                    add(request)
                during = ()
            elif not any(row.request in pending for row in plan.rows):  # finished ones leave them no room
                scheduler.abort([request.request_id for request in together if _is_through(request)])
    finally:
        scheduler.abort([request.request_id for request in together])


def _is_through(request: Request) -> bool:
    return request.num_output_tokens >= _REHEARSED_TOKENS


def step(scheduler: Scheduler, runner: ModelRunner) -> None:
    """One step of the scheduled requests."""
    scheduler.observe(*unpaced_step(scheduler, runner))


def unpaced_step(scheduler: Scheduler, runner: ModelRunner) -> tuple[StepPlan, float]:
    """One step of the scheduled requests, and its seconds, which do not count for prompt pacing."""
    plan = scheduler.schedule()
    if not plan.rows:
        scheduler.commit(plan, StepResult([]))
        return plan, 0.0
    launched = runner.launch(plan)
    result = runner.collect(launched)
    scheduler.commit(plan, result)
    return plan, runner.draft(launched, result)


def dummy(name: str, index: int, params: SamplingParams | None = None, length: int = PROMPT) -> Request:
    """A request whose blocks are not shared; without `params` a greedy one that ends only when it is aborted."""
    return Request(
        request_id=name,
        tokens=[1 + (index + at) % 5 for at in range(length)],
        num_prompt_tokens=length,
        params=params or SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None),
        seed_key=0,
        text_namespace=(b"warm-up", b""),
    )
