"""Search for the configs of one device: the fastest ones that give the default's results."""

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
"""Least share of the default's time that a config must save: less is noise."""
_CONFIRMATIONS = 2


class Timer(Protocol):
    """Timer of work."""

    def seconds(self, workload: Workload) -> float:
        """Seconds of one run."""
        ...


class Job(NamedTuple):
    """Kernel at one shape, with its work."""

    kernel: str
    shape: tuple[int, ...]
    works: tuple[Workload, ...]

    @property
    def key(self) -> Key:
        """Key in files."""
        return self.kernel, self.shape


class Found(NamedTuple):
    """Result of a job."""

    job: Job
    default: KernelConfig
    entry: ConfigEntry
    failures: tuple[tuple[KernelConfig, str], ...]
    """Configs that did not compile, did not fit or gave other results, with the reason."""

    @property
    def speedup(self) -> float:
        """Speed-up: the geometric mean over the work."""
        return 1 / _score([(times.tuned, times.default) for times in self.entry.times.values()])


def make_jobs(models: Mapping[str, ModelShape], kernels: Iterable[str], sizes: WorkSizes) -> list[Job]:
    """Jobs of the kernels on the models: every shape once, with the work of all models that have it."""
    works: dict[Key, list[Workload]] = {}
    for kernel in kernels:
        for name, model in models.items():
            for shape, work in every_work(kernel, model, sizes):
                works.setdefault((kernel, shape), []).append(work._replace(name=f"{name}: {work.name}"))
    return [Job(kernel, shape, tuple(found)) for (kernel, shape), found in works.items()]


class OutOfTimeError(Exception):
    """Signal that the time ended in the middle of a job; nothing of the job is kept."""


class Searcher:
    """Searcher on one device."""

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
            device: device of the work.
            arch: its compute capability times ten.
            timer: timer of the work.
            spaces: search spaces by kernel.
            has_time: called before each trial; False ends the search.
            on_trial: called after each.
        """
        self._device, self._arch, self._timer = device, arch, timer
        self._spaces, self._has_time, self._on_trial = spaces, has_time, on_trial

    def num_trials(self, job: Job) -> int:
        """Estimate of the number of trials, for a progress bar."""
        return num_candidates(self._spaces[job.kernel], job.shape, self._arch)

    def search(self, job: Job, found: Mapping[Key, KernelConfig]) -> Found:
        """Best config of a job, while the other kernels are launched with their `found` configs.

        Raises:
            OutOfTimeError: the time ended.
        """
        space = self._spaces[job.kernel]
        default = space.default(job.shape, self._arch)
        trial = _Trials(self, job, space.tolerance, found)
        times = {default: trial.measure_default(default)}
        best, best_score = default, 1.0
        for group in space.groups:
            for config in candidates(space, job.shape, best, group):
                if config in times or config in trial.failures:
                    continue
                measured = trial.measure(config)
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
        """Begin a trial; OutOfTimeError when the time has ended."""
        if not self._has_time():
            raise OutOfTimeError

    def end(self) -> None:
        """End a trial."""
        self._on_trial()

    def results(self, work: Workload) -> tuple[Tensor, ...]:
        """Results of a first run."""
        return work.make(self._device)()

    def seconds(self, work: Workload) -> float:
        """Seconds of a run."""
        return self._timer.seconds(work)


class _Trials:
    """Trials of one job."""

    def __init__(self, searcher: Searcher, job: Job, tolerance: float, found: Mapping[Key, KernelConfig]) -> None:
        self._searcher, self._job, self._tolerance, self._found = searcher, job, tolerance, found
        self._expected: list[tuple[Tensor, ...]] = []
        self.failures: dict[KernelConfig, str] = {}

    def measure_default(self, default: KernelConfig) -> list[float]:
        """Times of the default. Its results are the reference for the other configs; its errors are raised."""
        self._searcher.begin()
        with self._configs(default):
            self._expected = [self._searcher.results(work) for work in self._job.works]
        times = self._times(default)
        self._searcher.end()
        return times

    def measure(self, config: KernelConfig) -> list[float] | None:
        """Seconds of each work; None, and an entry in `failures`, when it does not compile or fit, or is wrong."""
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
        """Measure both again in turn, because the best of many is partly luck. Returns the config to take, and puts its
        new times into `times`."""
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
    """Geometric mean of the times over those of the default."""
    return math.exp(sum(math.log(new / old) for new, old in pairs) / len(pairs))


def tune(
    jobs: Sequence[Job],
    searcher: Searcher,
    file: ConfigFile,
    path: Path,
    on_job: Callable[[Found | None], None] = lambda found: None,
) -> tuple[list[Found], bool]:
    """Search every job that the file does not have, and write the file after each.

    Args:
        jobs: jobs to search.
        searcher: searcher on the device.
        file: entries of earlier searches, which are kept; the object is not changed.
        path: path of the written file.
        on_job: called after each job, with None when the file had it.

    Returns:
        (results of this search, True when all jobs are done).
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
