"""The interleaved run: in each round and for each size, every engine in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .environments import Engine
from .process import Worker, WorkerError


class Size(NamedTuple):
    """Size of a workload whose requests are all sent at once."""

    requests: int
    prompt: int  # tokens of each
    output: int


SIZES = (Size(1, 32, 64), Size(8, 128, 64), Size(32, 128, 64))
_WARM_UP_TOKENS = 8


class Case(NamedTuple):
    """Case of the comparison: the common settings of the engines of one interleaved run."""

    model: str
    mode: str


@dataclass
class Results:
    """Results so far. Every entry names `model`, `mode` and `engine`."""

    measurements: list[dict[str, Any]] = field(default_factory=list)
    """Rounds of one size: `requests`, `prompt`, `output`, `round`, `seconds` (the mean of `repeats`),
    `tokens_per_second`, and the `first_tokens` of the requests."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Workers: `start_seconds` from the start of the process to ready, `load_seconds` of these in the engine's
    constructor, `peak_rss_mib` over its processes, `versions`."""
    failures: list[dict[str, str]] = field(default_factory=list)
    """Engines that could not be measured, and the `reason`; model and mode are "all" for one without an environment."""

    def fail(self, case: Case, engine: str, reason: str) -> None:
        """Add a failure."""
        self.failures.append({**case._asdict(), "engine": engine, "reason": reason})


@dataclass(frozen=True)
class Session:
    """Measure one case after the other."""

    models: Path
    logs: Path
    sizes: Sequence[Size]
    rounds: int
    timeout: float
    say: Callable[[str], None]

    def run(self, case: Case, engines: Sequence[Engine], results: Results) -> None:
        """Measure one case. An engine that fails is noted and left out; the others continue."""
        workers: dict[str, Worker] = {}
        most = {engine.name: engine.most_requests or max(self.sizes).requests for engine in engines}
        starts: dict[str, dict[str, Any]] = {}
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for engine in engines:
                try:
                    workers[engine.name] = worker = self._start(case, engine)
                    start = {"start_seconds": worker.start_seconds, **worker.ready, "peak_rss_mib": None}
                    starts[engine.name] = {**case._asdict(), "engine": engine.name, **start}
                    results.starts.append(starts[engine.name])
                    self._warm_up(worker)
                except WorkerError as error:
                    self._drop(case, engine.name, error, workers, results)
            for number in range(1, self.rounds + 1):
                for place, size in enumerate(self.sizes):
                    for name in _rotated([name for name in workers if size.requests <= most[name]], number + place):
                        try:
                            measured = self._measure(workers[name], size)
                        except WorkerError as error:
                            self._drop(case, name, error, workers, results)
                            continue
                        entry = {**case._asdict(), "engine": name, **size._asdict(), "round": number, **measured}
                        results.measurements.append(entry)
                        starts[name]["peak_rss_mib"] = round(workers[name].peak_bytes / 2**20)
                        self._tell(entry)
        finally:
            for worker in workers.values():
                worker.close()

    def _start(self, case: Case, engine: Engine) -> Worker:
        self.say(f"{case.model} {case.mode}: starting {engine.name}")
        log = self.logs / f"{case.model}-{case.mode}-{engine.name}.log"
        command = engine.command(self.models, case.model, case.mode)
        return Worker(command, engine.environment(), log, self.timeout)

    def _warm_up(self, worker: Worker) -> None:
        """Generate a few tokens of each size, so that code is compiled and memory allocated before the first round."""
        for size in self.sizes:
            worker.ask({"warm_up": True, **size._asdict(), "output": min(_WARM_UP_TOKENS, size.output)})

    def _measure(self, worker: Worker, size: Size) -> dict[str, Any]:
        answer = worker.ask(size._asdict())
        rate = size.requests * size.output / answer["seconds"]
        return {**answer, "tokens_per_second": rate}

    def _drop(self, case: Case, name: str, error: WorkerError, workers: dict[str, Worker], results: Results) -> None:
        if name in workers:
            workers.pop(name).close()
        results.fail(case, name, str(error))
        self.say(f"{case.model} {case.mode}: {name} FAILED: {error}")

    def _tell(self, entry: dict[str, Any]) -> None:
        where = f"{entry['model']} {entry['mode']} round {entry['round']}/{self.rounds}"
        rate = f"{entry['tokens_per_second']:9.1f} tokens/s"
        self.say(f"{where}: {entry['requests']:3d} requests {entry['engine']:18s} {rate}")


def _rotated(names: list[str], by: int) -> list[str]:
    """Engines in the order of a round: each round begins with another one."""
    by %= max(1, len(names))
    return names[by:] + names[:by]
