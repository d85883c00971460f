"""Search for kernel configs within a run's time, with `tools/tune`, for one model."""

from __future__ import annotations

from pathlib import Path

import torch

from .models import ModelShape
from .report import Context


@torch.inference_mode()
def measure_tuning(context: Context, root: Path, shape: ModelShape) -> None:
    """Measure defaults and found configs, shape by shape; the device's file stays in the report's folder."""
    if context.device != "cuda":
        context.skip("tune", "kernels of GPUs alone")
        return
    from outrider.kernels.tuning.files import resumed
    from outrider.tools.tune.command import find_device, model_shape
    from outrider.tools.tune.search import TRITON_VERSION, Found, make_jobs, tune
    from outrider.tools.tune.workloads import WorkSizes

    name, searcher = find_device(context.seconds_left)
    path = context.report.folder / name.file_name

    def report(found: Found) -> None:
        times = found.entry.times.values()
        context.row(
            f"{found.job.kernel} {found.job.shape}",
            default_microseconds=sum(time.default for time in times),
            tuned_microseconds=sum(time.tuned for time in times),
            config=str(found.entry.config),
        )

    jobs = make_jobs(model_shape(shape.write(root)), WorkSizes())
    if not tune(jobs, searcher, resumed(path, name, TRITON_VERSION), path, report):
        context.skip("the other shapes", "no time left")
