"""The interleaved rounds: the same requests through the engine of every mode, in one process."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ....core.lora_request import LoRARequest
from ....core.messages import EngineRequest
from ....core.sampling_params import SamplingParams
from ....engine.engine_core import EngineCore
from ..engine_runs import Run
from ..request_figures import Round
from .modes import OFF, ORACLE, Mode
from .speculation_figures import Cell, figures
from .tasks import PLAIN, RANDOM_TEXT, WITH_DRAFT, WITHOUT_DRAFT, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the measurement."""

    batch_sizes: tuple[int, ...]
    rounds: int
    max_tokens: int
    queue: int = 1
    """Requests of a batch over the batch size; those beyond the batch size start when others end."""
    ignore_eos: bool = False
    """Generate beyond the end of the text. For texts that mean nothing anyway: what follows is easy to draft."""
    eos_token_ids: tuple[int, ...] = ()


class ModeEngine(NamedTuple):
    """A mode and its engine."""

    mode: Mode
    core: EngineCore


class _Contestant(NamedTuple):
    """An engine, and the adapter of its requests."""

    engine: ModeEngine
    kind: str
    lora: LoRARequest | None

    def run(self, requests: Sequence[EngineRequest], concurrency: int, salt: str) -> Round:
        """Run `requests` with this adapter. The salt is unique to the run: a drafter must not profit from answers to
        the same questions in another round or at another batch size."""
        own = [replace(request, lora=self.lora, cache_salt=f"{salt} {self.kind}") for request in requests]
        return Run(self.engine.core, f"mode {self.engine.mode.name}").complete(own, concurrency)


class Measured(NamedTuple):
    """Rows of the result, by batch size, task, mode and adapter variant."""

    rows: list[dict[str, Any]]
    cut: str = ""
    """Description of what is missing if the measurement was stopped; "": nothing is."""


class _Stopped(Exception):
    """The measurement is to end after the run that has just ended."""


def measure(
    engines: Sequence[ModeEngine], tasks: Sequence[Task], plan: Plan, stops: Callable[[], bool] = lambda: False
) -> Measured:
    """Measure every cell. If it is stopped, whole rounds are kept.

    A round is all requests of a task, batch by batch. Every engine runs a batch before the next batch begins, each time
    in another order. So whatever disturbs the machine for a while disturbs all modes alike. The round before the first
    is a warm-up.

    Args:
        engines: that of "off" first.
        stops: returns True when the measurement is to end.
    """
    rows: list[dict[str, Any]] = []
    order = [(batch_size, task) for batch_size in plan.batch_sizes for task in tasks]
    total = sum(len(_contestants(engines, task)) for task in tasks) * len(plan.batch_sizes) * (plan.rounds + 1)
    with tqdm(total=total, desc="Measuring", unit="run", file=sys.stderr, leave=False) as progress:
        for number, (batch_size, task) in enumerate(order):
            contestants = _contestants(engines, task)
            cells = [Cell(c.engine.mode, task.name, c.kind, batch_size, []) for c in contestants]
            try:
                _measure_task(contestants, task, cells, plan, progress, stops)
            except _Stopped:
                rows += _rows(cells)
                rounds = len(cells[0].rounds)
                found = f"CUT: stopped after {number} of {len(order)} pairs of batch size and task"
                return Measured(rows, f"{found}, and {rounds} of {plan.rounds} rounds of the next" if rounds else found)
            rows += _rows(cells)
    return Measured(rows)


def _rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Figures of the cells of a task and batch size; none without a round."""
    if not cells[0].rounds:
        return []
    off = next(cell for cell in cells if cell.mode.name == OFF)
    rows = [figures(cell, off) for cell in cells]
    limits = {row["kind"]: row["speedup"] for row in rows if row["method"] == ORACLE}
    for row in rows:
        limit = limits.get(row["kind"]) or next(iter(limits.values()), None)
        row["of_oracle"] = None if limit is None else round(row["speedup"] / limit, 4)
    return rows


def _contestants(engines: Sequence[ModeEngine], task: Task) -> list[_Contestant]:
    if task.adapter is None:
        return [_Contestant(engine, RANDOM_TEXT if task.random else PLAIN, None) for engine in engines]
    found = []
    for engine in engines:
        adapter = engine.core.adapters.find(task.adapter.name)
        if adapter is not None and adapter.draft == "loaded":
            found.append(_Contestant(engine, WITH_DRAFT, task.adapter))
        found.append(_Contestant(engine, WITHOUT_DRAFT, task.bare or task.adapter))
    return found


def _measure_task(
    contestants: Sequence[_Contestant],
    task: Task,
    cells: Sequence[Cell],
    plan: Plan,
    progress: Any,
    stops: Callable[[], bool],
) -> None:
    """Add the rounds of a task to the cells of the contestants.

    Raises:
        _Stopped: the measurement is to end.
    """
    batch_size = cells[0].batch_size
    requests = make_requests(task, batch_size * plan.queue, plan)
    for number in range(-1, plan.rounds):
        batches: list[list[Round]] = [[] for _ in contestants]
        for first in range(0, len(requests), batch_size * plan.queue):
            batch = requests[first : first + batch_size * plan.queue]
            order = random.Random(f"{number} {first}").sample(range(len(contestants)), len(contestants))
            for index in order:
                if stops():
                    raise _Stopped
                batches[index].append(contestants[index].run(batch, batch_size, f"{batch_size} {number}"))
        if number >= 0:
            for cell, parts in zip(cells, batches, strict=True):
                cell.rounds.append(Round.joined(parts))
        progress.update(len(contestants))


def record_answers(off: ModeEngine, tasks: Sequence[Task], plan: Plan, file: Path) -> None:
    """Write the answers without drafts to every request of the measurement, for the oracle."""
    batch_size = max(plan.batch_sizes)
    with file.open("w", encoding="utf-8") as out:
        for task in tasks:
            requests = make_requests(task, batch_size * plan.queue, plan)
            contestant = _contestants([off], task)[-1]
            for request, record in zip(requests, contestant.run(requests, batch_size, "oracle").requests, strict=True):
                line = {"prompt_token_ids": request.prompt_token_ids, "completion_token_ids": record.token_ids}
                out.write(json.dumps(line) + "\n")


def make_requests(task: Task, least: int, plan: Plan) -> list[EngineRequest]:
    """Every prompt at least once, and at least `least` requests. Random text is sampled with seeds, so that every mode
    must give the same text."""
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
        for index in range(max(least, len(task.prompts)))
    ]
