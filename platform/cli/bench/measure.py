"""Runs the same requests through every mode, round by round, in one process."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from ...core.lora_request import LoRARequest
from ...core.messages import EngineRequest
from ...core.sampling_params import SamplingParams
from .driver import BenchEngine, Round
from .figures import Cell, figures
from .modes import OFF, ONE_DRAFT_A_PASS
from .workload import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT, Task

_CALIBRATED_ONE_IN = 4
"""Rounds in which the modes whose limit needs it run with one draft a step, too."""
_CALIBRATION_TOKENS = 48
_TRIAL_SECONDS, _TRIAL_ROUNDS = 2.0, (2, 16)
"""Of a trial that finds the fastest of some modes: until each took so long, but no fewer rounds, and no more."""


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
    with_one_draft: bool = False
    """Runs so only to find what one draft takes (see `limit`)."""

    @property
    def calibrates(self) -> bool:
        """Whether its limit needs that."""
        return self.engine.mode.fixed and self.engine.mode.method in ONE_DRAFT_A_PASS

    def address(self, requests: Sequence[EngineRequest], salt: str) -> list[EngineRequest]:
        """`requests` for one run. The salt is the run's own: what a drafter has learned from the answers to the same
        questions, in another round or at another batch size, must not help it."""
        changes: dict[str, Any] = {}
        if self.with_one_draft:
            salt += " single"
            tokens = min(requests[0].params.max_tokens or _CALIBRATION_TOKENS, _CALIBRATION_TOKENS)
            changes = {"speculative": 1, "min_tokens": 0, "max_tokens": tokens}
        return [
            EngineRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params.clone(**changes) if changes else request.params,
                eos_token_ids=request.eos_token_ids,
                lora=self.lora,
                cache_salt=f"{salt} {self.kind}",
            )
            for request in requests
        ]


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


def trial(engines: Sequence[BenchEngine], task: Task, plan: Plan) -> list[float]:
    """Output tokens/s of each, the median of some rounds of the requests of `task` at the smallest batch size: as
    whoever has to choose one of them would try them. Measured as `measure` does, but briefly."""
    batch_size = min(plan.batch_sizes)
    requests = make_requests(task, batch_size, plan)
    contestants = [_contestants([engine], task)[0] for engine in engines]
    rounds: list[list[Round]] = [[] for _ in engines]
    least, most = _TRIAL_ROUNDS
    with tqdm(total=most + 1, desc="Choosing", unit="round", file=sys.stderr, leave=False) as progress:
        for number in range(-1, most):
            turns: list[list[Round]] = [[] for _ in engines]
            for first in range(0, len(requests), batch_size):
                for index in _order(len(contestants), number, first):
                    some = contestants[index].address(requests[first : first + batch_size], f"choice {number}")
                    turns[index].append(contestants[index].engine.run(some, batch_size))
            progress.update()
            if number >= 0:
                for had, parts in zip(rounds, turns, strict=True):
                    had.append(Round.of(parts))
            if number + 1 >= least and all(sum(r.seconds for r in had) >= _TRIAL_SECONDS for had in rounds):
                break
    return [statistics.median(r.output_tokens / r.seconds for r in had) for had in rounds]


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
    single = {index: replace(c, with_one_draft=True) for index, c in enumerate(contestants) if c.calibrates}
    for number in range(-1, plan.rounds):
        running = list(contestants)
        if number >= 0 and number % _CALIBRATED_ONE_IN == 0:
            running += single.values()
        turns: list[list[Round]] = [[] for _ in running]
        for first in range(0, len(requests), batch_size):
            for index in _order(len(running), number, first):
                some = running[index].address(requests[first : first + batch_size], f"{batch_size} {number}")
                turns[index].append(running[index].engine.run(some, batch_size))
        if number >= 0:
            for cell, parts in zip(cells, turns, strict=False):
                cell.rounds.append(Round.of(parts))
            for index, parts in zip(single, turns[len(contestants) :], strict=False):
                cells[index].calibrations.append(Round.of(parts))
        progress.update(len(contestants))
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


def adapter_paths(tasks: Sequence[Task]) -> Mapping[str, str]:
    """Every adapter that the tasks ask for, name -> folder."""
    return {lora.name: lora.path for task in tasks for lora in (task.adapter, task.bare) if lora is not None}
