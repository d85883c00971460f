"""The search with a timer that makes the times up, on kernels in the interpreter."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from outrider.kernels.tuning import DeviceName, KernelConfig, configs_of
from outrider.kernels.tuning.configs import KINDS, NoiseArgmaxConfig, RMSNormConfig, SiluMulConfig
from outrider.kernels.tuning.files import ConfigFile, read_configs
from outrider.tools.tune import search as search_module
from outrider.tools.tune.search import Found, Job, Searcher, make_jobs, tune
from outrider.tools.tune.shapes import MODELS, ModelShape, WorkSizes
from outrider.tools.tune.space import SPACES, Space, candidates, num_candidates
from outrider.tools.tune.timer import num_copies
from outrider.tools.tune.workloads import Workload, every_work

TINY = ModelShape(64, 96, 4, 2, 16, 301, "float16")
SIZES = WorkSizes(((2, 40),), ((1, 200),), 64, (1, 4), (3,), (2,), ((3, 2),), ((1030, 2),), 4, 2)
Price = Callable[[KernelConfig, Workload], float]


class FakeTimer:
    """Asks `price` for the time of a job's config, and remembers what was timed."""

    def __init__(self, job: Job, price: Price, device: torch.device) -> None:
        self._job, self._price, self._device = job, price, device
        self.timed: list[KernelConfig] = []

    def seconds(self, workload: Workload) -> float:
        default = SPACES[self._job.kernel].default(self._job.shape, 90)
        config = configs_of(self._device).get(default, *self._job.shape)
        self.timed.append(config)
        return self._price(config, workload)


def job_of(kernel: str, number: int = 0, sizes: WorkSizes = SIZES) -> Job:
    return make_jobs({"tiny": TINY}, [kernel], sizes)[number]


def search(job: Job, price: Price, device: str, space: Space | None = None, **options) -> tuple[Found, FakeTimer]:
    timer = FakeTimer(job, price, torch.device(device))
    spaces = SPACES if space is None else {job.kernel: space}
    return Searcher(torch.device(device), 90, timer, spaces=spaces, **options).search(job, {}), timer


def test_the_fastest_is_found_and_every_candidate_was_timed(device: str) -> None:
    job = job_of("rms_norm")
    best = RMSNormConfig(8, 8)
    found, timer = search(job, lambda config, work: 1e-6 if config == best else 2e-6, device)
    assert found.entry.config == best
    assert found.speedup == pytest.approx(2)
    assert found.entry.times == {"tiny: 3 rows": (2.0, 1.0)}
    default = SPACES["rms_norm"].default(job.shape, 90)
    assert set(timer.timed) == set(candidates(SPACES["rms_norm"], job.shape, default, SPACES["rms_norm"].groups[0]))
    assert found.failures == ()


def test_a_group_begins_from_the_best_of_the_one_before(device: str) -> None:
    def price(config: NoiseArgmaxConfig, work: Workload) -> float:
        return 1.0 - 0.3 * (config.block == 512) - 0.3 * (config.programs == 2048)

    found, _ = search(job_of("noise_argmax"), price, device)
    assert (found.entry.config.block, found.entry.config.programs) == (512, 2048)


def test_a_little_faster_is_not_taken(device: str) -> None:
    found, _ = search(job_of("rms_norm"), lambda config, work: 1.0 if config.num_warps == 1 else 1.01, device)
    assert found.entry.config == found.default
    assert found.speedup == 1


def test_luck_does_not_last(device: str) -> None:
    """A config that is fast once and slow when it is measured again is not taken."""
    seen: set[KernelConfig] = set()

    def price(config: KernelConfig, work: Workload) -> float:
        lucky = config.num_warps == 1 and config not in seen
        seen.add(config)
        return 0.5 if lucky else 1.0

    found, _ = search(job_of("rms_norm"), price, device)
    assert found.entry.config == found.default


def test_works_are_weighed_by_ratio(device: str) -> None:
    """Half the time of a short work outweighs a little more of a long one."""
    sizes = SIZES._replace(rows=(1, 3))

    def price(config: KernelConfig, work: Workload) -> float:
        is_other = config.num_warps == 1
        return {True: (1.0, 0.5), False: (100.0, 120.0)}["1 rows" in work.name][is_other]

    found, _ = search(job_of("rms_norm", sizes=sizes), price, device)
    assert found.entry.config.num_warps == 1
    assert found.speedup == pytest.approx((2 / 1.2) ** 0.5)


@pytest.mark.parametrize(
    "error", [OutOfResources(300_000, 232_448, "shared memory"), torch.OutOfMemoryError("of the device")]
)
def test_what_does_not_fit_is_passed_over(device: str, error: Exception) -> None:
    def price(config: KernelConfig, work: Workload) -> float:
        if config.num_warps == 1:
            raise error
        return 1.0 / config.num_warps

    found, _ = search(job_of("rms_norm"), price, device)
    assert found.entry.config.num_warps == 8
    assert {config.num_warps for config, _ in found.failures} == {1}
    assert all(reason.startswith(type(error).__name__) for _, reason in found.failures)


def test_other_errors_are_not_hidden(device: str) -> None:
    def price(config: KernelConfig, work: Workload) -> float:
        if config.num_warps == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1.0

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search(job_of("rms_norm"), price, device)


def test_wrong_results_do_not_count(device: str) -> None:
    """The fastest of all gives another result: it is told, and the next one is taken."""

    def make(where: torch.device) -> Callable[[], tuple[torch.Tensor, ...]]:
        config = configs_of(where).get(SiluMulConfig(1024, 4), 128, 2)
        return lambda: (torch.full((2,), 3.0 if config.block == 256 else 7.0, device=where),)

    job = Job("silu_mul", (128, 2), (Workload("w", make, 8),))
    space = SPACES["silu_mul"]._replace(fits=lambda shape, config: True)
    found, timer = search(job, lambda config, work: config.block / 1e9, device, space)
    assert found.entry.config.block == 512
    assert {config.block for config, _ in found.failures} == {256}
    assert {reason for _, reason in found.failures} == {"other results than the default's: w"}
    assert not any(config.block == 256 for config in timer.timed)


def test_nan_is_alike_and_integers_are_exact() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert search_module._alike(nan, nan.clone(), 0.0)
    assert not search_module._alike(torch.tensor([1.0]), nan[:1], 1.0)
    assert search_module._alike(torch.tensor([1.05]), torch.tensor([1.0]), 0.1)
    assert not search_module._alike(torch.tensor([100001]), torch.tensor([100000]), 0.1)


class Clock:
    """Time for so many trials."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def has_time(self) -> bool:
        self.left -= 1
        return self.left >= 0


def tuned_file(tmp_path: Path, device: str, clock: Clock) -> tuple[list[Found], bool, list[object]]:
    jobs = make_jobs({"tiny": TINY}, ["rms_norm", "silu_mul"], SIZES)
    path = tmp_path / "device.json"
    name = DeviceName("Test", (9, 0))
    file = read_configs(path) if path.exists() else ConfigFile(name, "3.6.0", "2026-01-31")
    told: list[object] = []

    class Timer:
        def seconds(self, workload: Workload) -> float:
            configs = configs_of(torch.device(device))
            norm, silu = (configs.get(SPACES[job.kernel].default(job.shape, 90), *job.shape) for job in jobs)
            return 1.0 / norm.num_warps + 1.0 / silu.num_warps

    searcher = Searcher(torch.device(device), 90, Timer(), has_time=clock.has_time)
    return *tune(jobs, searcher, file, path, told.append), told


def test_a_run_that_was_cut_goes_on(tmp_path: Path, device: str) -> None:
    first, whole, told = tuned_file(tmp_path, device, Clock(16))
    assert [found.job.kernel for found in first] == ["rms_norm"]
    assert not whole
    half = read_configs(tmp_path / "device.json")
    assert list(half.entries) == [first[0].job.key]
    second, whole, told = tuned_file(tmp_path, device, Clock(1000))
    assert [found.job.kernel for found in second] == ["silu_mul"]
    assert whole
    assert told == [None, *second]
    file = read_configs(tmp_path / "device.json")
    assert file.entries == {**half.entries, second[0].job.key: second[0].entry}
    third, whole, _ = tuned_file(tmp_path, device, Clock(0))
    assert (third, whole) == ([], True)


def test_what_was_found_is_in_use_while_others_are_searched(device: str) -> None:
    norm = RMSNormConfig(4, 16)
    seen: list[KernelConfig] = []

    class Timer:
        def seconds(self, workload: Workload) -> float:
            seen.append(configs_of(torch.device(device)).get(RMSNormConfig(1, 1), 64, 2))
            return 1.0

    Searcher(torch.device(device), 90, Timer()).search(job_of("silu_mul"), {("rms_norm", (64, 2)): norm})
    assert set(seen) == {norm}


def test_trials_are_counted_for_the_bar(device: str) -> None:
    trials = []
    job = job_of("noise_argmax")
    searcher = Searcher(
        torch.device(device),
        90,
        FakeTimer(job, lambda *_: 1.0, torch.device(device)),
        on_trial=lambda: trials.append(1),
    )
    searcher.search(job, {})
    assert len(trials) == searcher.num_trials(job) - 1  # the default stands in both groups


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
                assert num_candidates(space, shape, 90) > 3


@pytest.mark.parametrize("kernel", SPACES)
def test_candidates_are_within_the_limits_of_files(kernel: str) -> None:
    space = SPACES[kernel]
    for shape in space.compiled.values():
        default = space.default(shape, 90)
        found = [config for group in space.groups for config in candidates(space, shape, default, group)]
        assert found[0] == default
        for config in found:
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                assert field.metadata["least"] <= value <= field.metadata["most"]
                assert not field.metadata["power"] or value & (value - 1) == 0


def test_models_that_share_a_shape_are_searched_together() -> None:
    models = {"a": TINY, "b": TINY._replace(hidden=60, inner=200)}
    jobs = make_jobs(models, ["rms_norm", "silu_mul"], SIZES)
    assert [(job.key, len(job.works)) for job in jobs] == [
        (("rms_norm", (64, 2)), 2),
        (("silu_mul", (128, 2)), 1),
        (("silu_mul", (256, 2)), 1),
    ]
    assert [work.name for work in jobs[0].works] == ["a: 3 rows", "b: 3 rows"]


def test_inputs_are_twice_the_cache() -> None:
    assert [num_copies(size, 50 << 20) for size in (1 << 30, 50 << 20, 10 << 20, 1)] == [1, 2, 10, 256]
