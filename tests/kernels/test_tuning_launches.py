"""A config changes the launch, and never the result."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.act_and_mul import triton as silu
from outrider.kernels.lora import device_rows
from outrider.kernels.noise import triton as noise
from outrider.kernels.paged_attention import device_step
from outrider.kernels.paged_attention.schedule import Gpu
from outrider.kernels.quantized_linear import device_linear as quantized
from outrider.kernels.rms_norm import triton as norm
from outrider.kernels.sampling import triton as filters
from outrider.kernels.sampling import triton_logprobs as logprobs
from outrider.kernels.tuning import Configs, KernelConfig, using
from outrider.kernels.verification import triton as verification
from outrider.tools.tune import workloads
from outrider.tools.tune.search import Job, make_jobs
from outrider.tools.tune.space import SPACES, candidates
from outrider.tools.tune.workloads import ModelShape, WorkSizes

TINY = ModelShape(160, 96, 4, 2, 16, 301, torch.float16)
SIZES = WorkSizes(((1, 40),), ((1, 100),), 40, (1,), (3,), (1,), ((6, 2),), ((40, 2),), 4, 1, ((8, 3),))
KERNELS = {
    "attention": (device_step, "attention_kernel"),
    "kv_write": (device_step, "write_kernel"),
    "rms_norm": (norm, "_rms_norm_kernel"),
    "act_and_mul": (silu, "_act_and_mul_kernel"),
    "quantized_linear": (quantized, "product_kernel"),
    "lora_shrink": (device_rows, "shrink_kernel"),
    "lora_expand": (device_rows, "expand_kernel"),
    "sampling_filter": (filters, "_filter_kernel"),
    "sampling_stats": (logprobs, "_stats_kernel"),
    "sampling_logprobs": (logprobs, "_logprobs_kernel"),
    "noise_argmax": (noise, "_argmax_kernel"),
    "verification": (verification, "_verify_kernel"),
}
CONSTANTS = {
    "attention": {"block_n": "BLOCK_N"},
    "kv_write": {"block_heads": "BLOCK_HEADS"},
    "rms_norm": {"rows": "ROWS"},
    "act_and_mul": {"block": "BLOCK"},
    "quantized_linear": {"block_o": "BLOCK_O", "block_k": "BLOCK_K"},
    "lora_shrink": {"block": "BLOCK", "dot_block": "DOT_BLOCK"},
    "lora_expand": {"block": "BLOCK"},
    "sampling_filter": {"block": "BLOCK", "depth": "DEPTH"},
    "sampling_stats": {"block": "BLOCK"},
    "sampling_logprobs": {"block": "BLOCK", "depth": "DEPTH"},
    "noise_argmax": {"block": "BLOCK"},
    "verification": {"block": "BLOCK"},
}
"""Constants of the compiled kernel, by the config's field."""
A_PROGRAM_A_ROW = ("sampling_filter", "sampling_logprobs")
JOBS = make_jobs(TINY, SIZES)


@pytest.fixture(autouse=True)
def _large_steps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of 40 tokens go through the large tiles."""
    monkeypatch.setattr("outrider.kernels.lora.groups.SMALL_STEP", 32)


class Spy:
    """A kernel whose launches are remembered."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append((grid, options))
            self._kernel[grid](*args, **options)

        return launch


def find_job(kernel: str) -> Job:
    return next(job for job in JOBS if job.kernel == kernel)


def results(job: Job, config: KernelConfig, device: str) -> list[torch.Tensor]:
    with using(Configs({job.key: config})):
        return [tensor for work in job.works for tensor in work.make(torch.device(device))()]


def other_configs(job: Job) -> Iterator[KernelConfig]:
    """Each value of each field at least once, whatever fits: registers are no matter of results."""
    space = SPACES[job.kernel]._replace(fits=lambda shape, config: True)
    default = space.default(job.shape, 90)
    for group in space.groups:
        for name, values in group.items():
            if name not in ("num_warps", "num_stages"):  # the interpreter has none
                yield from list(candidates(space, job.shape, default, {name: values}))[1:]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.kernel}-{'-'.join(map(str, job.shape))}")
def test_every_config_gives_the_defaults_results(job: Job, device: str) -> None:
    space = SPACES[job.kernel]
    expected = results(job, space.default(job.shape, 90), device)
    for config in other_configs(job):
        for got, want in zip(results(job, config, device), expected, strict=True):
            if want.is_floating_point():
                torch.testing.assert_close(got, want, rtol=space.tolerance, atol=space.tolerance, msg=str(config))
            else:
                assert torch.equal(got, want), config


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_config_changes_the_launch(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = KERNELS[kernel]
    job, space = find_job(kernel), SPACES[kernel]
    monkeypatch.setattr(workloads, "describe_gpu", lambda device: Gpu(16, 90))
    monkeypatch.setattr(device_rows, "_num_programs", lambda device, per_processor: per_processor)
    base = space.default(job.shape, 90)
    if kernel in A_PROGRAM_A_ROW:  # else there would be more lanes than tokens
        base = dataclasses.replace(base, block=128)
    grids = set()
    for config in (base, *changes(base)):
        spy = Spy(getattr(module, name))
        with monkeypatch.context() as patch:
            patch.setattr(module, name, spy)
            results(job, config, device)
        assert spy.launches
        grids.add(tuple(grid for grid, _ in spy.launches))
        wanted = {constant: getattr(config, field) for field, constant in CONSTANTS[job.kernel].items()}
        wanted |= {option: getattr(config, option) for option in ("num_warps", "num_stages") if hasattr(config, option)}
        for _, options in spy.launches:
            assert {option: options[option] for option in wanted} == wanted
    assert len(grids) > 1 or kernel in A_PROGRAM_A_ROW


def changes(base: KernelConfig) -> Iterator[KernelConfig]:
    """Each field changed, to what changes the launch on a tiny model too."""
    small = {
        "block": 64,
        "block_n": 16,
        "rows": 1,
        "block_heads": 1,
        "block_k": 64,
        "units": 16,
        "programs": 1,
        "splits": 1,
    }
    for field in dataclasses.fields(base):
        value = getattr(base, field.name)
        if field.name == "programs" and value > 16:
            yield dataclasses.replace(base, programs=2)
        else:
            yield dataclasses.replace(base, **{field.name: small.get(field.name, 2 * value)})


def test_shapes_without_a_config_use_the_default_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = find_job("act_and_mul")
    spy = Spy(silu._act_and_mul_kernel)
    monkeypatch.setattr(silu, "_act_and_mul_kernel", spy)
    with using(Configs({("act_and_mul", (1 << 20, 2)): SPACES["act_and_mul"].default((1 << 20, 2), 90)})):
        job.works[0].make(torch.device(device))()
    assert spy.launches[0][1]["BLOCK"] == silu.DEFAULT.block
