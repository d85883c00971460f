"""The search for the configs of one device: what is fastest of what gives the default's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from ...kernels.tuning.configs import KernelConfig
from ...kernels.tuning.files import ConfigEntry, ConfigFile, Key, Times, today
from ...kernels.tuning.store import Configs, using
from .shapes import ModelShape, WorkSizes
from .space import SPACES, Space, candidates, num_candidates
from .workloads import Workload, every_work

TRITON_VERSION: str = triton.__version__
LEAST_GAIN = 0.02
"""What a config must save, of the default's time, to be taken: less is noise."""
_CONFIRMATIONS = 2


class Timer(Protocol):
    """How work is timed."""

    def seconds(self, workload: Workload) -> float:
        """Of one run."""
        ...


class Job(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    shape: tuple[int, ...]
    works: tuple[Workload, ...]

    @property
    def key(self) -> Key:
        """As in files."""
        return self.kernel, self.shape


class Found(NamedTuple):
    """What came of a job."""

    job: Job
    default: KernelConfig
    entry: ConfigEntry
    failures: tuple[tuple[KernelConfig, str], ...]
    """Configs that did not compile, did not fit or gave other results, and why."""

    @property
    def speedup(self) -> float:
        """The geometric mean over the work."""
        return 1 / _score([(times.tuned, times.default) for times in self.entry.times.values()])


def make_jobs(models: Mapping[str, ModelShape], kernels: Iterable[str], sizes: WorkSizes) -> list[Job]:
    """Every shape that the kernels have on the models, with the work of all models that have it."""
    works: dict[Key, list[Workload]] = {}
    for kernel in kernels:
        for name, model in models.items():
            for shape, work in every_work(kernel, model, sizes):
                works.setdefault((kernel, shape), []).append(work._replace(name=f"{name}: {work.name}"))
    return [Job(kernel, shape, tuple(found)) for (kernel, shape), found in works.items()]


class OutOfTimeError(Exception):
    """The budget ended in the middle of a job, of which nothing is kept."""


class Searcher:
    """Searches on one device."""

    def __init__(
        self,
        device: torch.device,
        arch: int,
        timer: Timer,
        *,
        spaces: Mapping[str, Space] = SPACES,
        has_time: Callable[[], bool] = lambda: True,
        on_trial: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            device: where the work is done.
            arch: its compute capability times ten.
            timer: measures.
            spaces: what is tried.
            has_time: asked before each trial.
            on_trial: called after each.
        """
        self._device, self._arch, self._timer = device, arch, timer
        self._spaces, self._has_time, self._on_trial = spaces, has_time, on_trial

    def num_trials(self, job: Job) -> int:
        """About, for a progress bar."""
        return num_candidates(self._spaces[job.kernel], job.shape, self._arch)

    def search(self, job: Job, found: Mapping[Key, KernelConfig]) -> Found:
        """The best config of a job, while the other kernels are launched with what was `found` for them.

        Raises:
            OutOfTimeError: there was no time for all of it.
        """
        space = self._spaces[job.kernel]
        default = space.default(job.shape, self._arch)
        trial = _Trials(self, job, space.tolerance, found)
        times = {default: trial.of_default(default)}
        best, best_score = default, 1.0
        for group in space.groups:
            for config in candidates(space, job.shape, best, group):
                if config in times or config in trial.failures:
                    continue
                measured = trial.of(config)
                if measured is None:
                    continue
                times[config] = measured
                score = _score(list(zip(measured, times[default], strict=True)))
                if score < best_score:
                    best, best_score = config, score
        if best != default:
            best = trial.confirm(best, default, times)
        pairs = zip(job.works, times[default], times[best], strict=True)
        of_works = {work.name: Times(round(old * 1e6, 2), round(new * 1e6, 2)) for work, old, new in pairs}
        return Found(job, default, ConfigEntry(best, of_works), tuple(trial.failures.items()))

    def begin(self) -> None:
        """Before a trial."""
        if not self._has_time():
            raise OutOfTimeError

    def end(self) -> None:
        """After a trial."""
        self._on_trial()

    def results(self, work: Workload) -> tuple[Tensor, ...]:
        """Of a first run."""
        return work.make(self._device)()

    def seconds(self, work: Workload) -> float:
        """Of a run."""
        return self._timer.seconds(work)


class _Trials:
    """The trials of one job."""

    def __init__(self, searcher: Searcher, job: Job, tolerance: float, found: Mapping[Key, KernelConfig]) -> None:
        self._searcher, self._job, self._tolerance, self._found = searcher, job, tolerance, found
        self._expected: list[tuple[Tensor, ...]] = []
        self.failures: dict[KernelConfig, str] = {}

    def of_default(self, default: KernelConfig) -> list[float]:
        """Its times; its results are what the others' are compared with. It must work."""
        self._searcher.begin()
        with self._configs(default):
            self._expected = [self._searcher.results(work) for work in self._job.works]
        times = self._times(default)
        self._searcher.end()
        return times

    def of(self, config: KernelConfig) -> list[float] | None:
        """Seconds of each work; None, and a failure, where it does not compile, does not fit or is wrong."""
        self._searcher.begin()
        problem: str | None = None
        times: list[float] | None = None
        try:
            problem = self._wrong(config)
            if problem is None:
                times = self._times(config)
        except (CompilationError, PTXASError, OutOfResources, torch.OutOfMemoryError) as error:
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        if problem is not None:
            self.failures[config] = problem
        self._searcher.end()
        return times

    def confirm(
        self, best: KernelConfig, default: KernelConfig, times: dict[KernelConfig, list[float]]
    ) -> KernelConfig:
        """Measure both again in turns: the best of many is partly luck. Returns what to take, its times in `times`."""
        rounds: dict[KernelConfig, list[list[float]]] = {default: [], best: []}
        for _ in range(_CONFIRMATIONS):
            for config, measured in rounds.items():
                self._searcher.begin()
                measured.append(self._times(config))
        for config, measured in rounds.items():
            times[config] = [min(of_work) for of_work in zip(*measured, strict=True)]
        gain = 1 - _score(list(zip(times[best], times[default], strict=True)))
        return best if gain >= LEAST_GAIN else default

    def _configs(self, config: KernelConfig) -> AbstractContextManager[None]:
        return using(Configs({**self._found, self._job.key: config}))

    def _times(self, config: KernelConfig) -> list[float]:
        with self._configs(config):
            return [self._searcher.seconds(work) for work in self._job.works]

    def _wrong(self, config: KernelConfig) -> str | None:
        with self._configs(config):
            for work, expected in zip(self._job.works, self._expected, strict=True):
                for got, want in zip(self._searcher.results(work), expected, strict=True):
                    if not _alike(got, want, self._tolerance):
                        return f"other results than the default's: {work.name}"
        return None


def _alike(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    return torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _score(pairs: Sequence[tuple[float, float]]) -> float:
    """The geometric mean of time over the default's."""
    return math.exp(sum(math.log(new / old) for new, old in pairs) / len(pairs))


def tune(
    jobs: Sequence[Job],
    searcher: Searcher,
    file: ConfigFile,
    path: Path,
    on_job: Callable[[Found | None], None] = lambda found: None,
) -> tuple[list[Found], bool]:
    """Search every job that the file does not have, and write it after each.

    Args:
        jobs: what to search.
        searcher: searches.
        file: what is there already, which is kept; not changed.
        path: where to write.
        on_job: called after each job; None: the file had it.

    Returns:
        (what was found now, whether the jobs are all done).
    """
    entries = dict(file.entries)
    done: list[Found] = []
    for job in jobs:
        if job.key in entries:
            on_job(None)
            continue
        try:
            found = searcher.search(job, {key: entry.config for key, entry in entries.items()})
        except OutOfTimeError:
            return done, False
        entries[job.key] = found.entry
        replace(file, date=today(), entries=dict(entries)).write(path)
        done.append(found)
        on_job(found)
    return done, True
