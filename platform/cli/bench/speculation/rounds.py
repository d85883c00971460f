"""The interleaved rounds: the same requests through the engine of every mode, in one process."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tqdm import tqdm

from ....core.lora_request import LoRARequest
from ....core.messages import EngineRequest
from ....core.sampling_params import SamplingParams
from ....engine.engine_core import EngineCore
from ..engine_runs import Run
from ..request_figures import Round
from .modes import OFF, Mode
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


def measure(engines: Sequence[ModeEngine], tasks: Sequence[Task], plan: Plan) -> list[dict[str, Any]]:
    """The rows of the result, by batch size, task, mode and adapter variant.

    A round is all requests of a task, batch by batch. Every engine runs a batch before the next batch begins, each time
    in another order. So whatever disturbs the machine for a while disturbs all modes alike. The round before the first
    is a warm-up.

    Args:
        engines: that of "off" first.
    """
    rows = []
    total = sum(len(_contestants(engines, task)) for task in tasks) * len(plan.batch_sizes) * (plan.rounds + 1)
    with tqdm(total=total, desc="Measuring", unit="run", file=sys.stderr, leave=False) as progress:
        for batch_size in plan.batch_sizes:
            for task in tasks:
                rows += _measure_task(_contestants(engines, task), task, batch_size, plan, progress)
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
    contestants: Sequence[_Contestant], task: Task, batch_size: int, plan: Plan, progress: Any
) -> list[dict[str, Any]]:
    requests = make_requests(task, batch_size * plan.queue, plan)
    cells = [Cell(c.engine.mode, task.name, c.kind, batch_size, []) for c in contestants]
    for number in range(-1, plan.rounds):
        batches: list[list[Round]] = [[] for _ in contestants]
        for first in range(0, len(requests), batch_size * plan.queue):
            batch = requests[first : first + batch_size * plan.queue]
            order = random.Random(f"{number} {first}").sample(range(len(contestants)), len(contestants))
            for index in order:
                batches[index].append(contestants[index].run(batch, batch_size, f"{batch_size} {number}"))
        if number >= 0:
            for cell, parts in zip(cells, batches, strict=True):
                cell.rounds.append(Round.joined(parts))
        progress.update(len(contestants))
    off = next(cell for cell in cells if cell.mode.name == OFF)
    return [figures(cell, off) for cell in cells]


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
