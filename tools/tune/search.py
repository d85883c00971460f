"""Search for the configs of one device: the fastest ones that give the default's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench

from ...kernels.tuning.configs import KernelConfig
from ...kernels.tuning.files import ConfigEntry, ConfigFile, Key, Times, today
from ...kernels.tuning.store import Configs, using
from .space import SPACES, Space, candidates
from .workloads import ModelShape, Workload, WorkSizes, every_work

TRITON_VERSION: str = triton.__version__
LEAST_GAIN = 0.02
"""Least share of the default's time that a config must save: less is noise."""
_CONFIRMATIONS = 2
_UNFIT = (CompilationError, PTXASError, OutOfResources, torch.OutOfMemoryError)
"""Errors of a config that does not compile or fit."""
T = TypeVar("T")


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
    entry: ConfigEntry
    refused: dict[KernelConfig, str]
    """Configs that did not compile, did not fit or gave other results, with the reason."""

    def __str__(self) -> str:
        """Line about it: times of all work together before and after, and the config."""
        old, new = (sum(times) for times in zip(*self.entry.times.values(), strict=True))
        return f"{self.job.kernel} {self.job.shape}: {old:.1f} to {new:.1f} µs, {self.entry.config}"


def make_jobs(model: ModelShape, sizes: WorkSizes) -> list[Job]:
    """Jobs of all kernels: every shape once, with all its work."""
    works: dict[Key, list[Workload]] = {}
    for kernel in SPACES:
        for shape, work in every_work(kernel, model, sizes):
            works.setdefault((kernel, shape), []).append(work)
    return [Job(kernel, shape, tuple(found)) for (kernel, shape), found in works.items()]


class OutOfTimeError(Exception):
    """Signal that the time ended in the middle of a job; nothing of the job is kept."""


def seconds_on_gpu(run: Callable[[], object]) -> float:
    """Median time of a run with a cold cache. The run is replayed from a graph if it can be captured: the host needs
    longer to launch a small kernel than the device to run it."""
    work = run
    try:
        work = _captured(run)
    except RuntimeError:
        torch.cuda.synchronize()
    return float(do_bench(work, rep=50, return_mode="median")) / 1000


def _captured(run: Callable[[], object]) -> Callable[[], None]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@dataclass(frozen=True)
class Searcher:
    """Searcher on one device."""

    device: torch.device
    arch: int
    """Its compute capability times ten."""
    seconds: Callable[[Callable[[], object]], float] = seconds_on_gpu
    """Timer of runs."""
    spaces: Mapping[str, Space] | None = None
    """Other search spaces than `SPACES`."""
    has_time: Callable[[], bool] = lambda: True
    """Called before each trial; False ends the search."""

    def search(self, job: Job, found: Mapping[Key, KernelConfig]) -> Found:
        """Best config of a job, while the other kernels are launched with their `found` configs.

        Raises:
            OutOfTimeError: the time ended.
        """
        space = (self.spaces or SPACES)[job.kernel]
        best = default = space.default(job.shape, self.arch)

        def results(work: Workload) -> tuple[Tensor, ...]:
            return work.make(self.device)()

        def seconds(work: Workload) -> float:
            return self.seconds(work.make(self.device))

        def each(config: KernelConfig, measure: Callable[[Workload], T]) -> list[T]:
            if not self.has_time():
                raise OutOfTimeError
            with using(Configs({**found, job.key: config})):
                return [measure(work) for work in job.works]

        expected = each(default, results)
        times = {default: each(default, seconds)}
        refused: dict[KernelConfig, str] = {}
        for group in space.groups:
            for config in candidates(space, job.shape, best, group):
                if config in times or config in refused:
                    continue
                try:
                    if _are_alike(each(config, results), expected, space.tolerance):
                        times[config] = each(config, seconds)
                    else:
                        refused[config] = "other results than the default's"
                except _UNFIT as error:
                    refused[config] = f"{type(error).__name__}: {error}"
            best = min(times, key=lambda config: _score(times[config], times[default]))
        if best != default:  # measured again in turn: the best of many is partly luck
            again = [(each(default, seconds), each(best, seconds)) for _ in range(_CONFIRMATIONS)]
            times[default], times[best] = (
                [min(of_work) for of_work in zip(*one, strict=True)] for one in zip(*again, strict=True)
            )
            if _score(times[best], times[default]) > 1 - LEAST_GAIN:
                best = default
        names = [work.name for work in job.works]
        pairs = zip(names, times[default], times[best], strict=True)
        of_works = {name: Times(round(old * 1e6, 2), round(new * 1e6, 2)) for name, old, new in pairs}
        return Found(job, ConfigEntry(best, of_works), refused)


def _are_alike(found: list[tuple[Tensor, ...]], expected: list[tuple[Tensor, ...]], tolerance: float) -> bool:
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return all(
        torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
        if want.is_floating_point()
        else torch.equal(got, want)
        for got, want in pairs
    )


def _score(new: Sequence[float], old: Sequence[float]) -> float:
    """Geometric mean of the times over those of the default."""
    return math.exp(sum(math.log(a / b) for a, b in zip(new, old, strict=True)) / len(new))


def tune(
    jobs: Sequence[Job], searcher: Searcher, file: ConfigFile, path: Path, on_found: Callable[[Found], None]
) -> bool:
    """Search every job that the file does not have, and write the file after each; returns True when all are done.

    Args:
        jobs: jobs to search.
        searcher: searcher on the device.
        file: entries of earlier searches, which are kept; the object is not changed.
        path: path of the written file.
        on_found: called after each search.
    """
    entries = dict(file.entries)
    for job in jobs:
        if job.key in entries:
            continue
        try:
            found = searcher.search(job, {key: entry.config for key, entry in entries.items()})
        except OutOfTimeError:
            return False
        entries[job.key] = found.entry
        replace(file, date=today(), entries=dict(entries)).write(path)
        on_found(found)
    return True
