"""The search with a timer that makes the times up, on kernels in the interpreter."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from outrider.kernels.tuning import DeviceName, KernelConfig, configs_of
from outrider.kernels.tuning.configs import KINDS, ActAndMulConfig, NoiseArgmaxConfig, RMSNormConfig
from outrider.kernels.tuning.files import ConfigFile, read_configs
from outrider.tools.tune.search import Found, Job, Searcher, make_jobs, tune
from outrider.tools.tune.space import SPACES, Space, candidates
from outrider.tools.tune.workloads import ModelShape, Run, Workload, WorkSizes, every_work

TINY = ModelShape(64, 96, 4, 2, 16, 301, torch.float16)
SIZES = WorkSizes(((2, 40),), ((1, 200),), 64, (1, 4), (3,), (2,), ((3, 2),), ((1030, 2),), 4, 2, ((16, 3),))
MODELS = {
    "llama3-8b": ModelShape(4096, 14336, 32, 8, 128, 128256),
    "llama3-70b": ModelShape(8192, 28672, 64, 8, 128, 128256),
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128, 151936),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 4, 128, 152064),
}
Price = Callable[[KernelConfig], float]


class FakeTimer:
    """Asks `price` for the time of a job's config, and remembers what was timed."""

    def __init__(self, job: Job, price: Price, device: torch.device) -> None:
        self._job, self._price, self._device = job, price, device
        self.timed: list[KernelConfig] = []

    def __call__(self, run: Run) -> float:
        default = SPACES[self._job.kernel].default(self._job.shape, 90)
        config = configs_of(self._device).get(default, *self._job.shape)
        self.timed.append(config)
        return self._price(config)


def find_job(kernel: str, sizes: WorkSizes = SIZES) -> Job:
    return next(job for job in make_jobs(TINY, sizes) if job.kernel == kernel)


def search(job: Job, price: Price, device: str, space: Space | None = None) -> tuple[Found, FakeTimer]:
    timer = FakeTimer(job, price, torch.device(device))
    spaces = None if space is None else {job.kernel: space}
    return Searcher(torch.device(device), 90, timer, spaces).search(job, {}), timer


def default_config(job: Job) -> KernelConfig:
    return SPACES[job.kernel].default(job.shape, 90)


def gain(found: Found) -> float:
    (times,) = found.entry.times.values()
    return times.default / times.tuned


def test_the_fastest_is_found_and_every_candidate_was_timed(device: str) -> None:
    job = find_job("rms_norm")
    best = RMSNormConfig(8, 8)
    found, timer = search(job, lambda config: 1e-6 if config == best else 2e-6, device)
    assert found.entry.config == best
    assert found.entry.times == {"3 rows": (2.0, 1.0)}
    default = SPACES["rms_norm"].default(job.shape, 90)
    assert set(timer.timed) == set(candidates(SPACES["rms_norm"], job.shape, default, SPACES["rms_norm"].groups[0]))
    assert found.refused == {}


def test_search_starts_from_the_previous_groups_best(device: str) -> None:
    def price(config: NoiseArgmaxConfig) -> float:
        return 1.0 - 0.3 * (config.block == 512) - 0.3 * (config.programs == 2048)

    found, _ = search(find_job("noise_argmax"), price, device)
    assert (found.entry.config.block, found.entry.config.programs) == (512, 2048)


def test_a_config_faster_by_one_percent_is_not_chosen(device: str) -> None:
    found, _ = search(find_job("rms_norm"), lambda config: 1.0 if config.num_warps == 1 else 1.01, device)
    assert found.entry.config == default_config(found.job)
    assert gain(found) == 1


def test_luck_does_not_last(device: str) -> None:
    """A config that is fast once and slow when it is measured again is not taken."""
    seen: set[KernelConfig] = set()

    def price(config: KernelConfig) -> float:
        lucky = config.num_warps == 1 and config not in seen
        seen.add(config)
        return 0.5 if lucky else 1.0

    found, _ = search(find_job("rms_norm"), price, device)
    assert found.entry.config == default_config(found.job)


def test_works_are_weighed_by_ratio(device: str) -> None:
    """Half the time of a short work outweighs a little more of a long one."""
    job = find_job("rms_norm", SIZES._replace(rows=(1, 3)))

    def seconds(run: Run) -> float:
        is_other = configs_of(torch.device(device)).get(RMSNormConfig(1, 4), *job.shape).num_warps == 1
        (output,) = run()
        return {1: (1.0, 0.5), 3: (100.0, 120.0)}[len(output)][is_other]

    found = Searcher(torch.device(device), 90, seconds).search(job, {})
    assert found.entry.config.num_warps == 1


@pytest.mark.parametrize(
    "error", [OutOfResources(300_000, 232_448, "shared memory"), torch.OutOfMemoryError("of the device")]
)
def test_configs_that_exceed_memory_are_skipped(device: str, error: Exception) -> None:
    def price(config: KernelConfig) -> float:
        if config.num_warps == 1:
            raise error
        return 1.0 / config.num_warps

    found, _ = search(find_job("rms_norm"), price, device)
    assert found.entry.config.num_warps == 8
    assert {config.num_warps for config in found.refused} == {1}
    assert all(reason.startswith(type(error).__name__) for reason in found.refused.values())


def test_other_errors_are_not_hidden(device: str) -> None:
    def price(config: KernelConfig) -> float:
        if config.num_warps == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1.0

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search(find_job("rms_norm"), price, device)


def test_wrong_results_do_not_count(device: str) -> None:
    """The fastest of all gives another result: it is reported, and the next one is chosen."""

    def make(where: torch.device) -> Callable[[], tuple[torch.Tensor, ...]]:
        config = configs_of(where).get(ActAndMulConfig(1024, 4), 128, 2)
        return lambda: (torch.full((2,), 3.0 if config.block == 256 else 7.0, device=where),)

    job = Job("act_and_mul", (128, 2), (Workload("w", make),))
    space = SPACES["act_and_mul"]._replace(fits=lambda shape, config: True)
    found, timer = search(job, lambda config: config.block / 1e9, device, space)
    assert found.entry.config.block == 512
    assert {config.block: reason for config, reason in found.refused.items()} == {
        256: "other results than the default's"
    }
    assert not any(config.block == 256 for config in timer.timed)


@pytest.mark.parametrize(
    ("want", "got", "is_alike"),
    [
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan")], [1.0], False),
        ([1.0], [1.05], True),
        ([100000], [100001], False),
    ],
)
def test_nan_is_alike_and_integers_are_exact(device: str, want: list, got: list, is_alike: bool) -> None:
    def make(where: torch.device) -> Run:
        config = configs_of(where).get(ActAndMulConfig(1024, 4), 128, 2)
        return lambda: (torch.tensor(want if config == ActAndMulConfig(1024, 4) else got, device=where),)

    space = SPACES["act_and_mul"]._replace(fits=lambda shape, config: True, tolerance=0.1)
    found, _ = search(Job("act_and_mul", (128, 2), (Workload("w", make),)), lambda config: 1.0, device, space)
    assert bool(found.refused) != is_alike


class Clock:
    """Time for this number of trials."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def has_time(self) -> bool:
        self.left -= 1
        return self.left >= 0


def tuned_file(tmp_path: Path, device: str, clock: Clock) -> tuple[list[Found], bool]:
    jobs = [find_job("rms_norm"), find_job("act_and_mul")]
    path = tmp_path / "device.json"
    file = read_configs(path) if path.exists() else ConfigFile(DeviceName("Test", (9, 0)), "3.6.0", "2026-01-31")
    done: list[Found] = []

    def seconds(run: Run) -> float:
        configs = configs_of(torch.device(device))
        norm, silu = (configs.get(default_config(job), *job.shape) for job in jobs)
        return 1.0 / norm.num_warps + 1.0 / silu.num_warps

    searcher = Searcher(torch.device(device), 90, seconds, has_time=clock.has_time)
    return done, tune(jobs, searcher, file, path, done.append)


def test_an_interrupted_search_continues(tmp_path: Path, device: str) -> None:
    first, whole = tuned_file(tmp_path, device, Clock(30))
    assert [found.job.kernel for found in first] == ["rms_norm"]
    assert not whole
    half = read_configs(tmp_path / "device.json")
    assert list(half.entries) == [first[0].job.key]
    second, whole = tuned_file(tmp_path, device, Clock(1000))
    assert [found.job.kernel for found in second] == ["act_and_mul"]
    assert whole
    file = read_configs(tmp_path / "device.json")
    assert file.entries == {**half.entries, second[0].job.key: second[0].entry}
    assert tuned_file(tmp_path, device, Clock(0)) == ([], True)


def test_found_configs_are_used_during_the_search(device: str) -> None:
    norm = RMSNormConfig(4, 16)
    seen: list[KernelConfig] = []

    def seconds(run: Run) -> float:
        seen.append(configs_of(torch.device(device)).get(RMSNormConfig(1, 1), 64, 2))
        return 1.0

    Searcher(torch.device(device), 90, seconds).search(find_job("act_and_mul"), {("rms_norm", (64, 2)): norm})
    assert set(seen) == {norm}


def test_every_kernel_has_a_space_and_work_on_every_model() -> None:
    assert set(SPACES) == set(KINDS)
    for model in MODELS.values():
        for kernel, space in SPACES.items():
            shapes = {shape for shape, _ in every_work(kernel, model, WorkSizes())}
            assert shapes
            for shape in shapes:
                default = space.default(shape, 90)
                assert isinstance(default, KINDS[kernel])
                assert len(shape) == len(KINDS[kernel].shape)
                assert sum(len(list(candidates(space, shape, default, group))) for group in space.groups) > 3


@pytest.mark.parametrize("kernel", SPACES)
def test_candidates_are_within_the_limits_of_files(kernel: str) -> None:
    space = SPACES[kernel]
    for shape, _ in every_work(kernel, MODELS["llama3-8b"], WorkSizes()):
        default = space.default(shape, 90)
        found = [config for group in space.groups for config in candidates(space, shape, default, group)]
        assert found[0] == default
        for config in found:
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                assert field.metadata["least"] <= value <= field.metadata["most"]
                assert not field.metadata["power"] or value & (value - 1) == 0


def test_work_that_shares_a_shape_is_searched_together() -> None:
    jobs = make_jobs(TINY, SIZES._replace(rows=(3, 5)))
    assert len(jobs) == len({job.key for job in jobs})
    assert [work.name for job in jobs if job.kernel == "rms_norm" for work in job.works] == ["3 rows", "5 rows"]
