"""Runs the same requests through every mode, round by round, in one process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ...core.lora_request import LoRARequest
from ...core.messages import EngineRequest
from ...core.sampling_params import SamplingParams
from .driver import BenchEngine, Round
from .figures import Cell, figures
from .modes import OFF, ONE_DRAFT_A_PASS
from .workload import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT, Task

_CALIBRATION_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure."""

    batch_sizes: tuple[int, ...]
    rounds: int
    max_tokens: int
    ignore_eos: bool = False
    """Text beyond its end is a drafter's easiest: only where the text means nothing anyway."""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Contestant:
    """An engine and the adapter that it is asked for."""

    engine: BenchEngine
    kind: str
    lora: LoRARequest | None


def measure(engines: Sequence[BenchEngine], tasks: Sequence[Task], plan: Plan) -> list[dict[str, Any]]:
    """The rows of the result, by batch size, task, mode and adapter variant.

    A round is all requests, in turns of `batch_size` that begin together: each turn is all contestants once, each time
    in another order, so that what disturbs the machine for a while, or is left by who comes before, disturbs all alike.
    The shorter the turns, the more so: the speed of a shared machine changes within tenths of seconds. The round before
    the first is a warm-up.

    Args:
        engines: "off" first.
    """
    rows = []
    total = sum(len(_contestants(engines, task)) for task in tasks) * len(plan.batch_sizes) * (plan.rounds + 1)
    with tqdm(total=total, desc="Measuring", unit="run", file=sys.stderr, leave=False) as progress:
        for batch_size in plan.batch_sizes:
            for task in tasks:
                rows += _measure_task(_contestants(engines, task), task, batch_size, plan, progress)
    return rows


def _contestants(engines: Sequence[BenchEngine], task: Task) -> list[_Contestant]:
    if task.adapter is None:
        return [_Contestant(engine, RANDOM_TEXT if task.random else PLAIN, None) for engine in engines]
    found = []
    for engine in engines:
        if engine.drafts_for(task.adapter):
            found.append(_Contestant(engine, WITH_DRAFT, task.adapter))
        found.append(_Contestant(engine, WITHOUT_DRAFT, task.bare or task.adapter))
    return found


def _measure_task(
    contestants: Sequence[_Contestant], task: Task, batch_size: int, plan: Plan, progress: Any
) -> list[dict[str, Any]]:
    requests = make_requests(task, batch_size, plan)
    cells = [
        Cell(c.engine.mode, task.name, c.kind, batch_size, sum(len(r.prompt_token_ids) for r in requests), [])
        for c in contestants
    ]
    for number in range(-1, plan.rounds):
        turns: list[list[Round]] = [[] for _ in contestants]
        for first in range(0, len(requests), batch_size):
            for index in _order(len(contestants), number, first):
                contestant = contestants[index]
                salt = f"{batch_size} {contestant.kind} {number}"
                some = list(_addressed(requests[first : first + batch_size], contestant, salt))
                turns[index].append(contestant.engine.run(some, batch_size))
        if number >= 0:
            for cell, parts in zip(cells, turns, strict=True):
                cell.rounds.append(Round.of(parts))
        progress.update(len(contestants))
    for cell, contestant in zip(cells, contestants, strict=True):
        if cell.mode.fixed and cell.mode.method in ONE_DRAFT_A_PASS:
            cell.single = _run_with_one_draft(contestant, requests, batch_size, plan)
    off = next(cell for cell in cells if cell.mode.name == OFF)
    return [figures(cell, off) for cell in cells]


def _order(count: int, number: int, first: int) -> list[int]:
    """Of the contestants in a turn; the same in every run."""
    return random.Random(f"{number} {first}").sample(range(count), count)


def make_requests(task: Task, batch_size: int, plan: Plan) -> list[EngineRequest]:
    """Every prompt at least once, and `batch_size` requests at least. Random text is sampled with seeds, so that
    every mode must give the same."""
    count = max(batch_size, len(task.prompts))
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=task.prompts[index % len(task.prompts)],
            params=SamplingParams(
                temperature=1.0 if task.random else 0.0,
                seed=index if task.random else None,
                max_tokens=plan.max_tokens,
                ignore_eos=plan.ignore_eos,
                min_tokens=plan.max_tokens if task.random else 0,  # beyond its end it would only repeat itself
            ),
            eos_token_ids=list(plan.eos_token_ids),
        )
        for index in range(count)
    ]


def _addressed(
    requests: Sequence[EngineRequest], contestant: _Contestant, salt: str, **changes: Any
) -> Iterator[EngineRequest]:
    """`requests` for one run. The salt is the run's own: what a drafter has learned from the answers to the same
    questions, in another round or at another batch size, must not help it."""
    for request in requests:
        yield EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params.clone(**changes) if changes else request.params,
            eos_token_ids=request.eos_token_ids,
            lora=contestant.lora,
            cache_salt=salt,
        )


def _run_with_one_draft(
    contestant: _Contestant, requests: Sequence[EngineRequest], batch_size: int, plan: Plan
) -> Round:
    tokens = min(plan.max_tokens, _CALIBRATION_TOKENS)
    salt = f"{batch_size} {contestant.kind} single"
    turns = []
    for first in range(0, min(len(requests), max(batch_size, 4)), batch_size):
        some = requests[first : first + batch_size]
        changed = _addressed(some, contestant, salt, speculative=1, min_tokens=0, max_tokens=tokens)
        turns.append(contestant.engine.run(list(changed), batch_size))
    return Round.of(turns)


def adapter_paths(tasks: Sequence[Task]) -> Mapping[str, str]:
    """Every adapter that the tasks ask for, name -> folder."""
    return {lora.name: lora.path for task in tasks for lora in (task.adapter, task.bare) if lora is not None}
